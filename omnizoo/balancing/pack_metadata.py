"""Pack metadata that ranks exchange before each step: lengths, costs and media positions, but no token data.

Every rank describes the packs it has loaded. After one all-gather, all ranks have the same table, so each of them can
compute the same assignment of packs and media items to ranks without further communication.

A large step has tens of thousands of media items. The table therefore consists of a few NumPy arrays, which are sent as
raw bytes instead of pickled Python objects.
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
Records = npt.NDArray[np.void]

# A message consists of a header with the size of each section in bytes (int64), and these sections in this order.
SECTIONS = ("packs", "lengths", "counts", "items", "spans", "status")
HEADER_BYTES = len(SECTIONS) * np.dtype(np.int64).itemsize

# Maps each preference count of a pack to the role of the segments to count. A pair counts once, by its chosen response.
PREFERENCES = {
    "pairs": "chosen",
    "desirable": "desirable",
    "undesirable": "undesirable",
    "mismatched": "mismatched",
}
PACK = np.dtype(
    [
        ("index", "i8"),  # position of the pack in the run
        ("is_dummy", "i8"),  # 1 for dummy packs
        ("num_segments", "i8"),
        ("num_items", "i8"),  # number of media items
        ("cost", "f8"),  # FLOPs, without media items
    ]
)
COUNT = np.dtype(  # counts of the segments of a pack that come from the same source
    [
        ("source", "i8"),  # index in data.sources
        ("num_samples", "i8"),
        ("num_tokens", "i8"),
        ("num_targets", "i8"),  # number of text tokens that contribute to the loss
        ("target_weight", "f8"),  # sum of their weights; equals their number if no row sets a weight
        *((name, "i8") for name in PREFERENCES),
        ("num_responses", "i8"),  # number of segments with a text target
    ]
)
ITEM = np.dtype(
    [
        ("port", "i8"),  # index into the model's ports
        ("source", "i8"),  # index in data.sources
        ("num_placeholders", "i8"),
        ("num_targets", "i8"),  # contribution of the item to the denominator of its loss; 0 if it has no loss
        ("is_target", "i8"),  # 1 if the model predicts the item, with or without a loss on it
        ("num_residual_targets", "i8"),  # contribution of the item to the denominator of the second loss
        ("num_spans", "i8"),
        ("cost", "f8"),  # FLOPs
    ]
)

Cost = Callable[[Pack], float]  # returns the FLOPs of a pack, without its media items


@dataclass(frozen=True)
class PackTable:
    """Metadata of several packs.

    The segments, counts, items and spans of all packs are concatenated in the order of packs.
    """

    packs: Records  # [packs], dtype PACK
    lengths: Numbers  # [segments], in tokens
    counts: Records  # [counts], dtype COUNT
    items: Records  # [items], dtype ITEM
    spans: Numbers  # [spans, 2], index of the first token in the pack, and number of tokens

    @classmethod
    def from_packs(cls, packs: Sequence[Pack], ports: Sequence[Port], cost: Cost) -> "PackTable":
        """Build the table that describes `packs`.

        Args:
            packs: The packs.
            ports: All ports of the model. Items refer to them by index.
            cost: Returns the FLOPs of a pack, without its media items.
        """
        items = [item for pack in packs for item in pack.items]
        lengths = [length for pack in packs for length in pack.lengths]
        spans = [span for item in items for span in item.spans]
        counts = [record for pack in packs for record in _count_records(pack)]
        return cls(
            packs=np.array([_pack_record(pack, cost) for pack in packs], PACK),
            lengths=np.array(lengths, np.int64),
            counts=np.array(counts, COUNT),
            items=np.array([_item_record(item, ports) for item in items], ITEM),
            spans=np.array(spans, np.int64).reshape(-1, 2),
        )

    @classmethod
    def concatenate(cls, tables: Sequence["PackTable"]) -> "PackTable":
        """Return one table with the packs of all `tables`, in order."""
        return cls(
            packs=np.concatenate([table.packs for table in tables]),
            lengths=np.concatenate([table.lengths for table in tables]),
            counts=np.concatenate([table.counts for table in tables]),
            items=np.concatenate([table.items for table in tables]),
            spans=np.concatenate([table.spans for table in tables]),
        )

    @cached_property
    def first_sample(self) -> Numbers:
        """Index in `lengths` of the first segment of each pack, followed by the total. Shape `[packs + 1]`."""
        return offsets(self.packs["num_segments"])

    @cached_property
    def first_span(self) -> Numbers:
        """Index in `spans` of the first span of each item, followed by the total. Shape `[items + 1]`."""
        return offsets(self.items["num_spans"])

    @cached_property
    def tokens(self) -> Numbers:
        """Number of tokens of each pack. Shape `[packs]`."""
        token_offsets = offsets(self.lengths)
        tokens: Numbers = np.diff(token_offsets[self.first_sample])
        return tokens

    def lengths_of(self, packs: Numbers) -> list[int]:
        """Return the lengths of the segments of some packs, in order.

        Args:
            packs: Rows of the packs in this table.
        """
        segments = concatenate_ranges(self.first_sample[packs], self.packs["num_segments"][packs])
        lengths: list[int] = self.lengths[segments].tolist()
        return lengths

    def spans_of(self, item: int, offset: int) -> list[tuple[int, int]]:
        """Return the spans of an item as (first token, number of tokens) in a sequence of several packs.

        Args:
            item: Row of the item in this table.
            offset: First token of its pack in the sequence.
        """
        spans = self.spans[self.first_span[item] : self.first_span[item + 1]].tolist()
        return [(first + offset, count) for first, count in spans]


def _pack_record(pack: Pack, cost: Cost) -> tuple[Any, ...]:
    """Return the metadata of one pack as a record of dtype `PACK`."""
    return (pack.index, pack.is_dummy, len(pack.lengths), len(pack.items), cost(pack))


def _count_records(pack: Pack) -> list[tuple[Any, ...]]:
    """Return the counts of a pack for each source that its segments come from, as records of dtype `COUNT`.

    Dummy packs have none.
    """
    if pack.is_dummy:
        return []
    target_index = np.flatnonzero(pack.columns["labels"] != IGNORE_INDEX)
    segment_of_target = np.searchsorted(np.cumsum(pack.lengths), target_index, side="right")
    weights = np.ones(len(target_index))
    if "loss_weights" in pack.columns:
        weights = pack.columns["loss_weights"][target_index].astype(np.float64)
    roles = pack.preferences.roles if pack.preferences else [""] * len(pack.lengths)

    samples = [name.removesuffix(f"/{role}") for name, role in zip(pack.sample_ids, roles, strict=True)]

    records = []
    source_of_segment = np.array(pack.sources)
    for source in np.unique(source_of_segment).tolist():
        segments = np.flatnonzero(source_of_segment == source)
        is_counted = source_of_segment[segment_of_target] == source
        roles_of_source = [roles[segment] for segment in segments]
        record = (
            source,
            len({samples[segment] for segment in segments}),
            sum(pack.lengths[segment] for segment in segments),
            int(is_counted.sum()),
            float(weights[is_counted].sum()),
            *(roles_of_source.count(role) for role in PREFERENCES.values()),
            len(np.unique(segment_of_target[is_counted])),
        )
        records.append(record)
    return records


def _item_record(item: MediaItem, ports: Sequence[Port]) -> tuple[Any, ...]:
    """Return the metadata of one media item as a record of dtype `ITEM`."""
    return (
        ports.index(item.port),
        item.source,
        item.size.num_placeholders,
        item.targets,
        item.is_target,
        item.size.num_residual_targets if item.is_target else 0,
        len(item.spans),
        item.size.cost,
    )


def offsets(counts: Numbers) -> Numbers:
    """Return the exclusive prefix sum of `counts`, followed by the total: [2, 3] -> [0, 2, 5]."""
    sums = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=sums[1:])
    return sums


def concatenate_ranges(first: Numbers, count: Numbers) -> Numbers:
    """Concatenate the ranges from `first[i]` to `first[i] + count[i] - 1`: [4, 9], [2, 1] -> [4, 5, 9]."""
    result_offsets = offsets(count)
    indices: Numbers = np.repeat(first - result_offsets[:-1], count) + np.arange(result_offsets[-1])
    return indices


def encode_message(table: PackTable, status: Any) -> bytes:
    """Encode the message that a rank sends to all other ranks.

    Args:
        table: Metadata of the packs that this rank has loaded.
        status: Status of this rank, as a value that JSON can represent.
    """
    arrays = (table.packs, table.lengths, table.counts, table.items, table.spans)
    sections = [array.tobytes() for array in arrays]
    sections.append(json.dumps(status).encode())
    header = np.array([len(section) for section in sections], np.int64).tobytes()
    return header + b"".join(sections)


def decode_messages(messages: Sequence[Bytes]) -> tuple[PackTable, list[Any]]:
    """Decode the messages of all ranks.

    Each section is concatenated over all messages before it is parsed, because there may be thousands of messages.

    Args:
        messages: The message of each rank, in rank order.

    Returns:
        A table with the packs of all ranks, and the status of each rank.
    """
    section_sizes = np.stack([message[:HEADER_BYTES] for message in messages]).view(np.int64)  # [ranks, sections]
    section_ends = HEADER_BYTES + section_sizes.cumsum(1)
    ends = section_ends.tolist()
    starts = (section_ends - section_sizes).tolist()

    def section(name: str) -> list[Bytes]:
        """Return the section `name` of every message."""
        i = SECTIONS.index(name)
        return [message[start[i] : end[i]] for message, start, end in zip(messages, starts, ends, strict=True)]

    table = PackTable(
        packs=np.concatenate(section("packs")).view(PACK),
        lengths=np.concatenate(section("lengths")).view(np.int64),
        counts=np.concatenate(section("counts")).view(COUNT),
        items=np.concatenate(section("items")).view(ITEM),
        spans=np.concatenate(section("spans")).view(np.int64).reshape(-1, 2),
    )
    statuses = [json.loads(status.tobytes()) for status in section("status")]
    return table, statuses
