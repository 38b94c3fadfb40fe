"""Build a pack from samples: decode media, concatenate columns and shift labels."""

from collections.abc import Sequence
from dataclasses import replace

import torch
import xxhash

from omnizoo.data.loading.reader import Reader
from omnizoo.data.packing.pack import Pack, dummy_pack
from omnizoo.data.sample import Preferences, Sample, segment_slices
from omnizoo.data.token_fields import concatenate, score_last_tokens, select, shift_to_next_token
from omnizoo.modalities.item import MediaItem
from omnizoo.modalities.media import BadMedia


def hash_of_item(item: MediaItem) -> str:
    """Return a hash of the port and the inputs of a media item, after `Reader.prepare`."""
    assert item.inputs is not None
    digest = xxhash.xxh3_128(str(item.port).encode())
    for name, tensor in sorted(item.inputs.items()):
        digest.update(f"{name}{tensor.dtype}{list(tensor.shape)}".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def prepare_pack(index: int, samples: Sequence[Sample], reader: Reader) -> tuple[Pack, list[str]]:
    """Decode the media of samples and concatenate the samples into a pack.

    Args:
        index: Position of the pack in the run.
        samples: The samples of the pack.
        reader: The data of the run.

    Returns:
        The pack, and messages about rows whose media cannot be decoded. The samples of these rows are dropped. If no
        sample is left, the pack is a dummy pack.
    """
    usable: list[Sample] = []
    items: list[MediaItem] = []
    bad_rows = []
    start = 0
    for sample in samples:
        try:
            sample_items = [part for item in sample.items for part in reader.prepare(item)]
        except BadMedia as reason:
            where = reader.sources[sample.id.source].where(sample.id.row)
            bad_rows.append(f"{where}: {reason}")
            continue
        usable.append(sample)
        items += [item.moved(start, source=sample.id.source) for item in sample_items]
        start += len(sample)
    if not usable:
        return dummy_pack(index), bad_rows

    lengths = [length for sample in usable for length in sample.lengths]
    columns = shift_to_next_token(concatenate([sample.columns for sample in usable]), lengths)
    if reader.config.model.score_head is not None:
        columns = score_last_tokens(columns, lengths)
    pack = Pack(
        index=index,
        columns=columns,
        lengths=lengths,
        sample_ids=[name for sample in usable for name in sample.names],
        items=tuple(items),
        batch_shape=usable[0].batch_shape,
        sources=[sample.id.source for sample in usable for _ in sample.segments],
    )
    roles = [segment.role for sample in usable for segment in sample.segments]
    if any(roles):
        keys = content_keys(pack, roles) if reader.config.known_answers else [""] * len(roles)
        pack = replace(pack, preferences=Preferences(roles, keys))
    return pack, bad_rows


def content_keys(pack: Pack, roles: Sequence[str]) -> list[str]:
    """Return a hash of the tokens, targets, positions and media of each segment.

    For a given model, the log-probability of a response depends only on these, so the hash is the key of cached
    log-probabilities. It is empty for segments without a role.
    """
    item_hashes = [hash_of_item(item) for item in pack.items]
    keys = []
    for role, segment in zip(roles, segment_slices(pack.lengths), strict=True):
        columns = select(pack.columns, segment)
        digest = xxhash.xxh3_128(columns["input_ids"].tobytes() + columns["labels"].tobytes())
        if "position_ids" in columns:
            digest.update(columns["position_ids"].tobytes())
        for item, item_hash in zip(pack.items, item_hashes, strict=True):
            target = "!" * item.is_target
            for first, count in item.spans:
                if segment.start <= first < segment.stop:
                    digest.update(f"{first - segment.start},{count};{item_hash}{target}".encode())
        keys.append(digest.hexdigest() if role else "")
    return keys
