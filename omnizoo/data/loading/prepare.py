"""Build a pack from samples: decode media, concatenate columns and shift labels."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch
import xxhash

from omnizoo.data.loading.reader import Reader
from omnizoo.data.packing.pack import Pack, dummy_pack
from omnizoo.data.sample import Preferences, Sample, segment_slices
from omnizoo.data.token_fields import concatenate, select, shift_to_next_token
from omnizoo.modalities.item import MediaItem
from omnizoo.modalities.media import BadMedia


def content_of_item(item: MediaItem) -> str:
    """Return a hash of the port and the inputs of a prepared item."""
    assert item.inputs is not None
    digest = xxhash.xxh3_128(str(item.port).encode())
    for name, tensor in sorted(item.inputs.items()):
        digest.update(f"{name}{tensor.dtype}{list(tensor.shape)}".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def prepare_pack(index: int, samples: Sequence[Sample], reader: Reader) -> tuple[Pack, list[str]]:
    """Decode the media of samples and concatenate their columns.

    Returns:
        The pack, and messages about rows with bad media, whose samples are dropped. A dummy pack if no sample is left.
    """
    kept: list[Sample] = []
    items: list[list[MediaItem]] = []
    bad_rows = []
    for sample in samples:
        try:
            items.append([part for item in sample.items for part in reader.prepare(item)])
            kept.append(sample)
        except BadMedia as reason:
            bad_rows.append(f"{reader.sources[sample.id.source].where(sample.id.row)}: {reason}")
    if not kept:
        return dummy_pack(index), bad_rows
    lengths = [length for sample in kept for length in sample.lengths]
    starts = accumulate(map(len, kept), initial=0)
    pack = Pack(
        index,
        shift_to_next_token(concatenate([sample.columns for sample in kept]), lengths),
        lengths,
        sample_ids=[name for sample in kept for name in sample.names],
        items=tuple(item.moved(start) for start, prepared in zip(starts, items, strict=False) for item in prepared),
    )
    roles = [segment.role for sample in kept for segment in sample.segments]
    if any(roles):
        keys = content_keys(pack, roles) if reader.config.known_answers else [""] * len(roles)
        pack = replace(pack, preferences=Preferences(roles, keys))
    return pack, bad_rows


def content_keys(pack: Pack, roles: Sequence[str]) -> list[str]:
    """Return, for each segment, a hash of its tokens, targets, positions and media.

    Apart from the model, the log-probability of a response depends on nothing else. The hash is empty for segments
    without a role.
    """
    media = [content_of_item(item) for item in pack.items]
    keys = []
    for role, segment in zip(roles, segment_slices(pack.lengths), strict=True):
        columns = select(pack.columns, segment)
        digest = xxhash.xxh3_128(columns["input_ids"].tobytes() + columns["labels"].tobytes())
        if "position_ids" in columns:
            digest.update(columns["position_ids"].tobytes())
        for item, content in zip(pack.items, media, strict=True):
            spans = [(at - segment.start, n) for at, n in item.spans if segment.start <= at < segment.stop]
            target = "!" * item.is_target
            digest.update("".join(f"{at},{n};{content}{target}" for at, n in spans).encode())
        keys.append(digest.hexdigest() if role else "")
    return keys
