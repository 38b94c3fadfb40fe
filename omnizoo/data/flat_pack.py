"""A pack as it travels from loader workers to ranks: its samples end to end, labels shifted, media decoded."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from omnizoo.data.fingerprint import content_of_item
from omnizoo.data.packing import Pack, Sample
from omnizoo.data.reader import Reader
from omnizoo.modalities.base import Item
from omnizoo.modalities.item import BadMedia

IGNORE = -100  # the label of a position without a target, as torch's cross entropy has it


@dataclass(frozen=True)
class FlatPack:
    """A pack as it travels: few arrays, small types. labels are already shifted: labels[t] is the token after t, or
    -100 where that is no target or another sample's."""

    index: int
    ids: npt.NDArray[np.int32]
    labels: npt.NDArray[np.int32]
    lengths: list[int]
    sample_ids: list[str]  # source/epoch/row/part, of preferences /role; none: a filler, which counts nowhere
    positions: npt.NDArray[Any] | None = None  # [R, T], of models with several positions per token
    items: tuple[Item, ...] = ()  # prepared
    weights: npt.NDArray[np.float32] | None = None  # [T] of the loss on each label; None: 1
    roles: Sequence[str] = ()  # of each sample, in preferences: what kind of answer it is; "": of none
    keys: Sequence[str] = ()  # of each sample, if asked for: a hash of its content; "": of what is no answer
    extra: Mapping[str, npt.NDArray[np.float64]] = field(default_factory=dict)  # by name: [T] numbers for each label


def flatten(index: int, pack: Pack, reader: "Reader") -> tuple[FlatPack, list[str]]:
    """Decode the media of a pack and lay its samples end to end; also, rows left out since their media are bad."""
    bad, kept = [], []
    for sample in pack.samples:
        try:
            kept.append((sample, [part for item in sample.items for part in reader.prepare(item)]))
        except BadMedia as reason:
            bad.append(f"{reader.sources[sample.id.source].where(sample.id.row)}: {reason}")
    if not kept:
        return filler(index), bad
    samples = [sample for sample, _ in kept]
    ids = np.concatenate([sample.ids for sample in samples])
    targets = np.concatenate([sample.targets for sample in samples])
    lengths = [length for sample in samples for length in sample.lengths]
    labels = np.full_like(ids, IGNORE)
    labels[:-1] = np.where(targets[1:], ids[1:], IGNORE)
    labels[np.cumsum(lengths) - 1] = IGNORE  # what follows a sample is another one's
    positions = [sample.positions for sample in samples if sample.positions is not None]
    items = [
        item.moved(start) for (_, prepared), start in zip(kept, _starts(samples), strict=True) for item in prepared
    ]
    weights = join_weights(samples)
    flat = FlatPack(
        index=index,
        ids=ids,
        labels=labels,
        lengths=lengths,
        sample_ids=[name for sample in samples for name in sample.names],
        positions=np.concatenate(positions, axis=1) if positions else None,
        items=tuple(items),
        weights=None if weights is None else np.append(weights[1:], np.float32(0)),  # shifted as labels are
        roles=[role for sample in samples for role in sample.roles] if any(s.answers for s in samples) else (),
        extra={name: np.append(numbers[1:], 0.0) for name, numbers in join_extra(samples).items()},
    )
    return replace(flat, keys=_keys(flat)) if reader.config.known_answers and flat.roles else flat, bad


def _keys(pack: FlatPack) -> list[str]:
    """Of all that the log-probability of an answer depends on but the model: tokens, targets, positions, media."""
    media = [content_of_item(item) for item in pack.items]
    keys, first = [], 0
    for role, length in zip(pack.roles, pack.lengths, strict=True):
        last = first + length
        digest = xxhash.xxh3_128(pack.ids[first:last].tobytes() + pack.labels[first:last].tobytes())
        if pack.positions is not None:
            digest.update(pack.positions[:, first:last].tobytes())
        for item, content in zip(pack.items, media, strict=True):
            digest.update(
                b"".join(
                    f"{at - first},{n};{content}{'!' * item.is_target}".encode()
                    for at, n in item.spans
                    if first <= at < last
                )
            )
        keys.append(digest.hexdigest() if role else "")
        first = last
    return keys


def _starts(samples: Sequence[Sample]) -> list[int]:
    """Where each begins among the tokens of all."""
    lengths = [len(sample.ids) for sample in samples]
    return list(itertools.accumulate(lengths[:-1], initial=0))


def join_weights(parts: Sequence[Sample] | Sequence[FlatPack]) -> npt.NDArray[np.float32] | None:
    """The weights of samples or packs end to end; None if none of them has any."""
    if all(part.weights is None for part in parts):
        return None
    return np.concatenate([np.ones(len(p.ids), np.float32) if p.weights is None else p.weights for p in parts])


def join_extra(parts: Sequence[Sample] | Sequence[FlatPack]) -> dict[str, npt.NDArray[np.float64]]:
    """The further numbers of samples or packs end to end, by name; 0 where one has none of that name."""
    names = sorted({name for part in parts for name in part.extra})
    return {name: np.concatenate([p.extra.get(name, np.zeros(len(p.ids))) for p in parts]) for name in names}


def filler(index: int) -> FlatPack:
    """Keeps a rank in step with the others when there is no pack for it: computed, but counts nothing."""
    return FlatPack(index, np.zeros(2, np.int32), np.full(2, IGNORE, np.int32), [2], [])
