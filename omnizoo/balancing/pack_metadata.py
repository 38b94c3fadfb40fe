"""Pack metadata that ranks exchange before each step: lengths, costs and media positions, but no token data.

Every rank describes the packs it has loaded. After one all-gather all ranks hold the same table, so each of them can
compute the same assignment of packs and media items to ranks without further communication.

A large step has tens of thousands of media items. The table therefore consists of a few NumPy arrays, which are sent as
raw bytes instead of as pickled Python objects.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from omnizoo.data.packing.pack import Pack
from omnizoo.data.token_fields import IGNORE_INDEX
from omnizoo.modalities.item import MediaItem, Port

Numbers = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
Rows = npt.NDArray[np.void]

HEADER = 5 * 8  # bytes; a message starts with the sizes of its 5 sections, as int64

# Preference counts of a pack: pairs, labeled responses (desirable and undesirable), mismatched responses.
PREFERENCES = ("pairs", "desirable", "undesirable", "mismatched")
PACK = np.dtype(
    [
        ("index", "i8"),  # position of the pack in the run
        ("is_filler", "i8"),  # 1 for dummy packs
        ("samples", "i8"),  # number of segments
        ("items", "i8"),  # number of media items
        ("labels", "i8"),  # number of text tokens that contribute to the loss
        ("weight", "f8"),  # sum of their weights; equals their number if no row sets a weight
        *((name, "i8") for name in PREFERENCES),
        ("answers", "i8"),  # number of segments with a text target
        ("cost", "f8"),  # FLOPs, without those of the media items
    ]
)
ITEM = np.dtype(
    [
        ("port", "i8"),  # index into the model's ports
        ("places", "i8"),  # number of placeholder tokens
        ("targets", "i8"),  # denominator of the item's loss; 0 if it has none
        ("is_target", "i8"),  # the model predicts the item, with or without a loss on it
        ("residual", "i8"),  # denominator of the second loss
        ("spans", "i8"),  # number of spans
        ("cost", "f8"),  # FLOPs
    ]
)


Cost = Callable[[Pack], float]  # returns the FLOPs of a pack


@dataclass(frozen=True)
class PackTable:
    """Metadata of several packs. Segments, items and spans are concatenated in pack order."""

    packs: Rows  # [packs], dtype PACK
    lengths: Numbers  # [segments], in tokens
    items: Rows  # [items], dtype ITEM
    spans: Numbers  # [spans, 2], first token in the pack and number of tokens

    @classmethod
    def of(cls, packs: Sequence[Pack], ports: Sequence[Port], cost: Cost) -> "PackTable":
        items = [item for pack in packs for item in pack.items]
        return cls(
            np.array([(*_counts(pack), cost(pack)) for pack in packs], PACK),
            np.array([length for pack in packs for length in pack.lengths], np.int64),
            np.array([(ports.index(i.port), *_sizes(i), len(i.spans), i.size.cost) for i in items], ITEM),
            np.array([span for item in items for span in item.spans], np.int64).reshape(-1, 2),
        )

    @classmethod
    def join(cls, parts: Sequence["PackTable"]) -> "PackTable":
        arrays = zip(*((part.packs, part.lengths, part.items, part.spans) for part in parts), strict=True)
        return cls(*(np.concatenate(several) for several in arrays))

    @cached_property
    def first_sample(self) -> Numbers:
        """The offset of each pack in `lengths`, followed by the total. Shape `[packs + 1]`."""
        return starts(self.packs["samples"])

    @cached_property
    def first_span(self) -> Numbers:
        """The offset of each item in `spans`, followed by the total. Shape `[items + 1]`."""
        return starts(self.items["spans"])

    @cached_property
    def tokens(self) -> Numbers:
        """The number of tokens of each pack. Shape `[packs]`."""
        before = starts(self.lengths)
        tokens: Numbers = np.diff(before[self.first_sample])
        return tokens

    def lengths_of(self, packs: Numbers) -> list[int]:
        """Return the lengths of the segments of these packs, in order."""
        lengths: list[int] = self.lengths[ranges(self.first_sample[packs], self.packs["samples"][packs])].tolist()
        return lengths

    def spans_of(self, item: int, moved: int) -> list[tuple[int, int]]:
        """Return the spans of an item, with `moved` tokens added before its pack."""
        spans = self.spans[self.first_span[item] : self.first_span[item + 1]].tolist()
        return [(first + moved, count) for first, count in spans]


def _counts(pack: Pack) -> tuple[float, ...]:
    """Return the fields of PACK in order, without the cost."""
    is_target = pack.columns["labels"] != IGNORE_INDEX
    weights = pack.columns.get("loss_weights")
    weight = pack.num_targets if weights is None else float(weights[is_target].sum(dtype=np.float64))
    roles = pack.preferences.roles if pack.preferences else []
    preferences = [roles.count("chosen" if name == "pairs" else name) for name in PREFERENCES]
    ends = np.cumsum(pack.lengths)
    answers = len(np.unique(np.searchsorted(ends, np.flatnonzero(is_target), side="right")))
    sizes = (len(pack.lengths), len(pack.items), pack.num_targets)
    return (pack.index, pack.is_dummy, *sizes, weight, *preferences, answers)


def _sizes(item: MediaItem) -> tuple[int, int, bool, int]:
    num_residual_targets = item.size.num_residual_targets if item.is_target else 0
    return item.size.num_placeholders, item.targets, item.is_target, num_residual_targets


def starts(counts: Numbers) -> Numbers:
    """Return the exclusive prefix sum of `counts`, followed by the total: [2, 3] -> [0, 2, 5]."""
    sums = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=sums[1:])
    return sums


def ranges(first: Numbers, count: Numbers) -> Numbers:
    """Return the concatenated ranges `first[i]` to `first[i] + count[i] - 1`: [4, 9], [2, 1] -> [4, 5, 9]."""
    before = starts(count)
    numbers: Numbers = np.repeat(first - before[:-1], count) + np.arange(before[-1])
    return numbers


def encode_message(told: PackTable, note: Any) -> bytes:
    """Return the bytes of a message with the table and a status.

    Args:
        told: Metadata of the packs of this rank.
        note: Status of this rank, which must be JSON-serializable.
    """
    parts = [array.tobytes() for array in (told.packs, told.lengths, told.items, told.spans)]
    parts.append(json.dumps(note).encode())
    return np.array([len(part) for part in parts], np.int64).tobytes() + b"".join(parts)


def decode_messages(messages: Sequence[Bytes]) -> tuple[PackTable, list[Any]]:
    """Return the concatenated table of all messages, and the status of each.

    Arrays are concatenated once per section, because there may be thousands of messages.
    """
    sizes = np.stack([message[:HEADER] for message in messages]).view(np.int64)
    ends = (HEADER + sizes.cumsum(1)).tolist()
    starts = (HEADER + sizes.cumsum(1) - sizes).tolist()

    def part(number: int) -> list[Bytes]:
        each = zip(messages, starts, ends, strict=True)
        return [message[start[number] : end[number]] for message, start, end in each]

    packs, lengths, items, spans = (np.concatenate(part(number)) for number in range(4))
    told = PackTable(packs.view(PACK), lengths.view(np.int64), items.view(ITEM), spans.view(np.int64).reshape(-1, 2))
    return told, [json.loads(note.tobytes()) for note in part(4)]
