"""What ranks tell each other of the packs they have read: lengths, costs and places of media, no data.

A large step has tens of thousands of items, so that they are rows of a few arrays, which travel as their bytes.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from omnizoo.data.flat_pack import IGNORE, FlatPack
from omnizoo.modalities.base import Item, Port

Numbers = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
Rows = npt.NDArray[np.void]

HEADER = 5 * 8  # bytes of a message before its parts: their sizes

# What a pack has of preferences: pairs, and answers that are judged one by one or follow another row's prompt.
PREFERENCES = ("pairs", "desirable", "undesirable", "mismatched")
PACK = np.dtype(
    [
        ("index", "i8"),  # in the run
        ("is_filler", "i8"),
        ("samples", "i8"),  # how many
        ("items", "i8"),  # how many
        ("labels", "i8"),  # text targets
        ("weight", "f8"),  # sum of their weights; as many as they are where no row has any
        *((name, "i8") for name in PREFERENCES),
        ("answers", "i8"),  # samples with a text target
        ("cost", "f8"),  # FLOPs, but for those of its items
    ]
)
ITEM = np.dtype(
    [
        ("port", "i8"),  # its number among those of the model
        ("places", "i8"),
        ("targets", "i8"),  # what its loss is a mean over; 0: none
        ("is_target", "i8"),  # predicted, with or without such a loss
        ("residual", "i8"),  # the same of its second loss
        ("spans", "i8"),  # how many
        ("cost", "f8"),
    ]
)


@dataclass(frozen=True)
class Known:
    """What is known of a pack where it was read."""

    index: int
    lengths: list[int]
    labels: int  # text targets
    weight: float  # sum of their weights; as many as they are where no row has any
    is_filler: bool
    items: list[Item]  # their spans are within the pack
    preferences: tuple[int, ...] = (0,) * len(PREFERENCES)
    answers: int = 0  # samples with a text target

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    def places(self, is_predicted: bool) -> dict[str, int]:
        """By modality that is produced: places of its items; `is_predicted`: only of those that are to be learnt."""
        places: dict[str, int] = {}
        for item in self.items:
            if item.port.role == "decoder" and (item.is_target or not is_predicted):
                places[item.port.modality] = places.get(item.port.modality, 0) + item.size.places
        return places


Cost = Callable[[Known], float]  # of a pack -> FLOPs


def known_of(pack: FlatPack) -> Known:
    is_target = pack.labels != IGNORE
    labels = int(is_target.sum())
    weight = labels if pack.weights is None else float(pack.weights[is_target].sum(dtype=np.float64))
    is_filler = not pack.sample_ids
    preferences = tuple(list(pack.roles).count("chosen" if name == "pairs" else name) for name in PREFERENCES)
    ends = np.cumsum(pack.lengths)
    answers = len(np.unique(np.searchsorted(ends, np.flatnonzero(is_target), side="right")))
    return Known(pack.index, pack.lengths, labels, weight, is_filler, list(pack.items), preferences, answers)


@dataclass(frozen=True)
class Told:
    """Some packs, one after the other, and of each what it holds, in order."""

    packs: Rows  # [packs] of PACK
    lengths: Numbers  # [samples]
    items: Rows  # [items] of ITEM
    spans: Numbers  # [spans, 2]: first token in the pack, how many

    @classmethod
    def of(cls, packs: Sequence[Known], ports: Sequence[Port], cost: Cost) -> "Told":
        items = [item for pack in packs for item in pack.items]
        counts = [(len(p.lengths), len(p.items), p.labels, p.weight, *p.preferences, p.answers) for p in packs]
        return cls(
            np.array([(p.index, p.is_filler, *of, cost(p)) for p, of in zip(packs, counts, strict=True)], PACK),
            np.array([length for pack in packs for length in pack.lengths], np.int64),
            np.array([(ports.index(i.port), *_sizes(i), len(i.spans), i.size.cost) for i in items], ITEM),
            np.array([span for item in items for span in item.spans], np.int64).reshape(-1, 2),
        )

    @classmethod
    def join(cls, parts: Sequence["Told"]) -> "Told":
        arrays = zip(*((part.packs, part.lengths, part.items, part.spans) for part in parts), strict=True)
        return cls(*(np.concatenate(several) for several in arrays))

    @cached_property
    def first_sample(self) -> Numbers:
        """Of each pack, and one more: where the next one would begin."""
        return starts(self.packs["samples"])

    @cached_property
    def first_item(self) -> Numbers:
        return starts(self.packs["items"])

    @cached_property
    def first_span(self) -> Numbers:
        """Of each item, and one more."""
        return starts(self.items["spans"])

    @cached_property
    def tokens(self) -> Numbers:
        """Of each pack."""
        before = starts(self.lengths)
        tokens: Numbers = np.diff(before[self.first_sample])
        return tokens

    def lengths_of(self, packs: Numbers) -> list[int]:
        """Of the samples of these packs, in order."""
        lengths: list[int] = self.lengths[ranges(self.first_sample[packs], self.packs["samples"][packs])].tolist()
        return lengths

    def spans_of(self, item: int, moved: int) -> list[tuple[int, int]]:
        """Of an item, among tokens of which `moved` more come before its pack."""
        spans = self.spans[self.first_span[item] : self.first_span[item + 1]].tolist()
        return [(first + moved, count) for first, count in spans]


def _sizes(item: Item) -> tuple[int, int, bool, int]:
    return item.size.places, item.targets, item.is_target, item.size.residual if item.is_target else 0


def starts(counts: Numbers) -> Numbers:
    """0, and the sums so far."""
    sums = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=sums[1:])
    return sums


def ranges(first: Numbers, count: Numbers) -> Numbers:
    """first[0], first[0] + 1, ... (count[0] of them), then those of first[1], and so on."""
    before = starts(count)
    numbers: Numbers = np.repeat(first - before[:-1], count) + np.arange(before[-1])
    return numbers


def write_message(told: Told, note: Any) -> bytes:
    """`note` is anything JSON has."""
    parts = [array.tobytes() for array in (told.packs, told.lengths, told.items, told.spans)]
    parts.append(json.dumps(note).encode())
    return np.array([len(part) for part in parts], np.int64).tobytes() + b"".join(parts)


def read_messages(messages: Sequence[Bytes]) -> tuple[Told, list[Any]]:
    """What was told in all of them, and the note of each. Part by part, not message by message: there may be many."""
    sizes = np.stack([message[:HEADER] for message in messages]).view(np.int64)
    ends = (HEADER + sizes.cumsum(1)).tolist()
    starts = (HEADER + sizes.cumsum(1) - sizes).tolist()

    def part(number: int) -> list[Bytes]:
        each = zip(messages, starts, ends, strict=True)
        return [message[start[number] : end[number]] for message, start, end in each]

    packs, lengths, items, spans = (np.concatenate(part(number)) for number in range(4))
    told = Told(packs.view(PACK), lengths.view(np.int64), items.view(ITEM), spans.view(np.int64).reshape(-1, 2))
    return told, [json.loads(note.tobytes()) for note in part(4)]
