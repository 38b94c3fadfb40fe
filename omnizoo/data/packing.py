"""Packing: samples of many lengths become packs of at most `pack_tokens` tokens, nearly always exactly full.

The packer is a pure function of the samples it is given, in their order.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from omnizoo.data.rendered import Answers, Rendered
from omnizoo.data.rows import BadRow
from omnizoo.modalities.base import Item

WINDOW, GROWTH = 256, 32  # samples to look at, and how many more of them from pack to pack at the start


class SampleId(NamedTuple):
    source: int
    epoch: int
    row: int
    part: int  # 0, or which piece of a row longer than a pack

    def __str__(self) -> str:
        return "/".join(map(str, self))


@dataclass(frozen=True)
class Sample:
    id: SampleId
    ids: npt.NDArray[np.int32]
    targets: npt.NDArray[np.bool_]
    items: tuple[Item, ...] = ()  # media, in order; their spans are within the sample
    positions: npt.NDArray[Any] | None = None  # [R, L], for models with several positions per token
    weights: npt.NDArray[np.float32] | None = None  # of the loss on each token; None: 1
    answers: Answers = ()  # of a row with preferences, in order; each has a copy of the prompt before it
    extra: Mapping[str, npt.NDArray[np.float64]] = field(default_factory=dict)  # by name: numbers for each token
    format: str = ""  # what its row was taken as

    @property
    def lengths(self) -> list[int]:
        """Of what does not see each other: itself, or its answers."""
        return [length for _, length in self.answers] or [len(self.ids)]

    @property
    def positions_needed(self) -> int:
        """How many positions a model must tell apart to read it."""
        return max(self.lengths) if self.positions is None else int(self.positions.max()) + 1

    @property
    def names(self) -> list[str]:
        return [f"{self.id}/{role}" for role, _ in self.answers] or [str(self.id)]

    @property
    def roles(self) -> list[str]:
        """Of its answers; of a row without preferences, nothing."""
        return [role for role, _ in self.answers] or [""]


@dataclass(frozen=True)
class Pack:
    samples: tuple[Sample, ...]

    @property
    def tokens(self) -> int:
        return sum(len(sample.ids) for sample in self.samples)


def split(source: int, epoch: int, row: int, rendered: Rendered, pack_tokens: int) -> Iterator[Sample]:
    """The row as samples of at most `pack_tokens`; more than one only if it is longer than that, and all text."""
    ids, items, positions = rendered.ids, rendered.items, rendered.positions
    if items and len(ids) > pack_tokens:
        inside = [item for item in items if item.port.role != "follower"]
        largest = max(inside, key=lambda item: item.size.places, default=None)
        raise BadRow(
            f"{len(ids)} tokens are longer than data.pack_tokens ({pack_tokens}), and a row with media is never cut "
            "into pieces (data.overlong: truncate cuts it off)"
            + (f"; its largest item, {largest.media.name}, takes {largest.size.places}" if largest else "")
        )
    if rendered.answers and len(ids) > pack_tokens:
        raise BadRow(
            f"the {len(ids)} tokens of this preference pair are longer than data.pack_tokens ({pack_tokens}), and a "
            "pair is never cut into pieces (data.overlong: truncate cuts its answers off)"
        )
    for part, start in enumerate(range(0, len(ids), pack_tokens)):
        piece = slice(start, start + pack_tokens)
        own = None if positions is None else positions[:, piece] - (positions[:, [start]] if part else 0)
        weights = None if rendered.weights is None else rendered.weights[piece]
        id, targets = SampleId(source, epoch, row, part), rendered.targets[piece]
        yield Sample(id, ids[piece], targets, items, own, weights, rendered.answers, format=rendered.format)


class Packer:
    """Best fit over a window of samples: the oldest one, and those that fill the rest of the pack best.

    The window has `look_ahead` samples. Without that number it has `WINDOW`, or more where samples are so short that
    they would not fill two packs; and it grows to that from pack to pack, since the first packs of all lanes are what a
    run waits for when it starts. No sample waits for more than as many packs as the window has samples. Among equally
    full packs, older samples win.
    """

    def __init__(self, pack_tokens: int, look_ahead: int | None = None, packs: int = 0) -> None:
        self.pack_tokens, self.look_ahead = pack_tokens, look_ahead
        self.packs = packs  # that were made before
        self.tokens = 0  # in the window
        self.buffer: list[Sample] = []

    @property
    def is_ready(self) -> bool:
        if self.look_ahead is not None:
            return len(self.buffer) >= self.look_ahead
        return len(self.buffer) >= min(WINDOW, GROWTH * (1 + self.packs)) and self.tokens >= 2 * self.pack_tokens

    def add(self, sample: Sample) -> None:
        assert 0 < len(sample.ids) <= self.pack_tokens, "over-long samples are split or dropped before"
        self.buffer.append(sample)
        self.tokens += len(sample.ids)

    def pop(self) -> Pack:
        lengths = [len(sample.ids) for sample in self.buffer]
        chosen = [0, *(1 + i for i in best_fill(lengths[1:], self.pack_tokens - lengths[0]))]
        pack = Pack(tuple(self.buffer[i] for i in chosen))
        for i in reversed(chosen):
            del self.buffer[i]
        self.packs += 1
        self.tokens -= pack.tokens
        return pack


def best_fill(lengths: list[int], room: int) -> list[int]:
    """Indices (ascending) of lengths with the largest sum that is at most `room`.

    Subset sum, with an integer as the set of reachable sums (bit n: some subset sums to n): one shift of it adds a
    sample to all of them, which takes about a microsecond; it stops at the first samples that fill `room` exactly.
    """
    if sum(lengths) <= room:
        return list(range(len(lengths)))
    within = (1 << (room + 1)) - 1
    reachable = [1]
    for length in lengths:
        if reachable[-1] >> room:
            break
        reachable.append((reachable[-1] | reachable[-1] << length) & within)
    left = reachable[-1].bit_length() - 1
    chosen = []
    for i in range(len(reachable) - 2, -1, -1):
        if not reachable[i] >> left & 1:  # only reachable with sample i
            chosen.append(i)
            left -= lengths[i]
    return chosen[::-1]
