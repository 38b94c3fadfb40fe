"""A lane is one endless stream of packs: a function of the data section, the seed and the number of the lane.

Ranks and workers run lanes, they never change them. A lane's state is a few cursors and the ids of the samples in its
packing window; the order of rows is computed for any place in any epoch, so nothing is replayed on resume.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from omnizoo.config import data_section
from omnizoo.config.errors import UserError
from omnizoo.data.lengths import Cut, cut
from omnizoo.data.packing import Pack, Packer, Sample, SampleId
from omnizoo.data.render import Renderer
from omnizoo.data.rows import BadRow, Row, Rows, RowSource

PIECE = 256  # most rows dealt to a lane in one go
TRIES = 8  # other rows, to find an answer that fits a prompt


def draws(count: int, *key: int) -> npt.NDArray[np.uint64]:
    """Random 64-bit numbers. Raw bits, as numpy promises those (unlike its shuffles) to be the same in all versions."""
    return np.random.PCG64(list(key)).random_raw(count)


def lane_pieces(source: RowSource, lane: int, lanes: int, epoch: int, key: tuple[int, ...] | None) -> tuple[Rows, Rows]:
    """First row and number of rows of each piece of the source that the lane reads in an epoch, in reading order.

    Rows are cut into pieces inside their extents; with a `key` to shuffle by, extents are permuted, and pieces inside
    them, so that lanes of one process read from the same few extents at a time. Pieces are dealt to the lanes in turn,
    starting at another lane each epoch to even out what does not divide.
    """
    size = min(PIECE, max(1, len(source) // (lanes * 16)))
    lengths = np.diff(source.extents)
    counts = -(-lengths // size)
    extent = np.repeat(np.arange(len(counts)), counts)
    within = size * (np.arange(len(extent)) - np.repeat(np.cumsum(counts) - counts, counts))
    starts, sizes = source.extents[extent] + within, np.minimum(size, lengths[extent] - within)
    if key is not None:
        order = np.lexsort((draws(len(starts), *key, 1), draws(len(lengths), *key, 0)[extent]))
        starts, sizes = starts[order], sizes[order]
    if len(source) >= lanes:
        mine = slice((lane + epoch) % lanes, None, lanes)
        starts, sizes = starts[mine], sizes[mine]
    return starts, sizes


class EpochOrder:
    """The rows of one source that a lane reads in one epoch, by position; shuffled in windows of `shuffle_rows`."""

    def __init__(
        self, source: RowSource, number: int, lane: int, lanes: int, epoch: int, seed: int, shuffle_rows: int | None
    ) -> None:
        self.key = None if shuffle_rows is None else (seed, number, epoch)
        self.starts, sizes = lane_pieces(source, lane, lanes, epoch, self.key)
        self.ends = np.cumsum(sizes)
        self.lane, self.window_rows = lane, shuffle_rows or PIECE
        self.window, self.rows = -1, np.zeros(0, np.int64)

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, position: int) -> int:
        window, offset = divmod(position, self.window_rows)
        if window != self.window:
            self.window, self.rows = window, self._read_window(window)
        return int(self.rows[offset])

    def _read_window(self, window: int) -> Rows:
        positions = np.arange(window * self.window_rows, min((window + 1) * self.window_rows, len(self)))
        piece = np.searchsorted(self.ends, positions, side="right")
        rows: Rows = self.starts[piece] + positions - np.concatenate(([0], self.ends))[piece]
        if self.key is None:
            return rows
        return rows[np.argsort(draws(len(rows), *self.key, 2, self.lane, window), kind="stable")]


def other_rows(row: int, rows: int) -> list[int]:
    """Rows to take an answer from, best first. They are the same in every epoch, on every layout and after a resume."""
    found = dict.fromkeys((draws(2 * TRIES, row) % rows).tolist())
    return [other for other in found if other != row][:TRIES]


@dataclass
class Cursor:
    """How far a lane is in one source."""

    drawn: int  # rows in all
    epoch: int
    position: int  # rows in this epoch
    fruitless: int = 0  # rows since the last usable one


@dataclass
class Counters:
    packs: int = 0
    skipped_rows: int = 0
    dropped_overlong: int = 0
    split_overlong: int = 0
    truncated_overlong: int = 0
    few_targets: int = 0  # samples, not rows
    beyond_positions: int = 0  # samples, too


@dataclass
class Lane:
    """`next_pack()` for ever; or, with `epochs`, until every row of every source has been read so often, then None."""

    data: data_section.Data
    sources: Sequence[RowSource]
    renderer: Renderer
    seed: int
    lane: int
    epochs: float | None = None
    patience: int = 0  # bad rows to list before `data.on_bad_row: error` stops
    by_rows: bool = False  # mix sources by how many rows they have, and not by their weights
    mismatched: bool = False  # prompts also get the answers of other rows
    most_positions: int | None = None  # that the model was made for
    counters: Counters = field(default_factory=Counters)
    bad_rows: list[str] = field(default_factory=list)  # skipped since they were last taken

    def __post_init__(self) -> None:
        weights = [len(s) for s in self.sources] if self.by_rows else [spec.weight for spec in self.data.sources]
        self.weights = [weight / sum(weights) for weight in weights]
        # lanes begin at different places of the mix, else the first packs of all lanes are of the same source
        self.jitter = [float(draws(1, self.seed, self.lane, i)[0]) / 2**64 for i in range(len(self.sources))]
        # a source with fewer rows than lanes cannot be dealt out: whole epochs are, each lane reads every `lanes`-th
        self.strides = [1 if len(source) >= self.data.lanes else self.data.lanes for source in self.sources]
        self.cursors = [Cursor(0, 0 if stride == 1 else self.lane, 0) for stride in self.strides]
        self.orders = [self._order(i) for i in range(len(self.sources))]
        self.packer = Packer(self.data.pack_tokens, self.data.look_ahead)

    def _order(self, i: int) -> EpochOrder:
        data, shuffle_rows = self.data, self.data.shuffle_rows if self.data.shuffle else None
        return EpochOrder(self.sources[i], i, self.lane, data.lanes, self.cursors[i].epoch, self.seed, shuffle_rows)

    def next_pack(self) -> Pack | None:
        while not self.packer.is_ready and self._read_row():
            pass
        self.counters.packs += 1  # also of those that are not there any more: a lane's place in the run
        return self.packer.pop() if self.packer.buffer else None

    def take_bad_rows(self) -> list[str]:
        taken, self.bad_rows = self.bad_rows, []
        return taken

    def _read_row(self) -> bool:
        """Move one row into the packer, or skip it. False if there is none left (with `epochs`)."""
        i = self._choose_source()
        if i is None:
            return False
        cursor, source = self.cursors[i], self.sources[i]
        epoch, row = cursor.epoch, self.orders[i][cursor.position]
        self._advance(i)
        read = self.samples_of(i, epoch, row)
        self._count(read)
        for sample in read.samples:
            self.packer.add(sample)
        cursor.fruitless = 0 if read.samples else cursor.fruitless + 1
        # an epoch of all lanes and then some: a lane's own share of a small source may well have no usable row
        if cursor.fruitless >= len(source) + 64 * min(self.data.lanes, len(source)):
            raise UserError(
                f"data source {self.data.sources[i].name}: none of the last {cursor.fruitless} rows read was usable; "
                f"the last one ({source.where(row)}): {read.reason}"
            )
        return True

    def samples_of(self, i: int, epoch: int, row: int) -> Cut:
        """What a row gives; of a bad one, nothing, unless the run stops at it."""
        try:
            return self._read_samples(i, epoch, row)
        except BadRow as bad:
            where = self.sources[i].where(row)
            if self.data.on_bad_row == "error" and len(self.bad_rows) >= self.patience:
                raise UserError(f"{where}: {bad} (data.on_bad_row: skip goes on without such rows)") from None
            self.counters.skipped_rows += 1
            self.bad_rows.append(f"{where}: {bad}")
            return Cut([], reason=str(bad))

    def _count(self, read: Cut) -> None:
        counters, most = self.counters, self.most_positions
        if read.became:
            setattr(counters, read.became, getattr(counters, read.became) + 1)
        counters.few_targets += read.few_targets
        if most is not None:
            counters.beyond_positions += sum(sample.positions_needed > most for sample in read.samples)

    def _choose_source(self) -> int | None:
        """The source that is furthest behind its share of rows, so that the mix is exact at any time."""
        open_sources = [i for i in range(len(self.cursors)) if self._is_open(i)]
        rows = 1 + sum(cursor.drawn for cursor in self.cursors)
        return max(
            open_sources,
            key=lambda i: self.weights[i] * rows + self.jitter[i] - self.cursors[i].drawn,
            default=None,
        )

    def _is_open(self, i: int) -> bool:
        """Whether it is to be read on. Of the last epoch, a part may be all that is asked for."""
        if self.epochs is None:
            return True
        share = min(1.0, max(0.0, self.epochs - self.cursors[i].epoch))
        return self.cursors[i].position < round(share * len(self.orders[i]))

    def _advance(self, i: int) -> None:
        cursor = self.cursors[i]
        cursor.drawn += 1
        cursor.position += 1
        if cursor.position == len(self.orders[i]):
            cursor.epoch, cursor.position = cursor.epoch + self.strides[i], 0
            self.orders[i] = self._order(i)

    def _read_samples(self, i: int, epoch: int, row: int) -> Cut:
        source = self.sources[i]
        given, where, find = source.read(row), (i, epoch, row), partial(source.find, row)

        def samples(other: Row | None = None, number: int = row) -> Cut:
            rendered = self.renderer.render(given, where, find, other, partial(source.find, number))
            return cut(*where, rendered, self.data)

        if not self.mismatched:
            return samples()
        reason = ""
        for number in other_rows(row, len(source)):
            try:
                return samples(source.read(number), number)
            except BadRow as bad:
                samples()  # which says if it is the row itself
                reason = str(bad)
        raise BadRow(f"its prompt needs the answer of another row, and none of those tried is of use: {reason}")

    def state(self) -> dict[str, Any]:
        """JSON-able, and small: samples are named, not stored."""
        return {
            "cursors": [[c.drawn, c.epoch, c.position, c.fruitless] for c in self.cursors],
            "window": [tuple(sample.id) for sample in self.packer.buffer],
            "counters": dict(vars(self.counters)),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on exactly where `state` was taken; samples of the packing window are read again."""
        self.cursors = [Cursor(*values) for values in state["cursors"]]
        self.orders = [self._order(i) for i in range(len(self.sources))]
        self.counters = Counters(**state["counters"])
        self.packer = Packer(self.data.pack_tokens, self.data.look_ahead, self.counters.packs)
        window = [SampleId(*values) for values in state["window"]]
        samples: dict[SampleId, Sample] = {}
        for i, epoch, row in sorted({id[:3] for id in window}, key=lambda id: (id[0], id[2])):  # as they are stored
            try:
                samples |= {sample.id: sample for sample in self._read_samples(i, epoch, row).samples}
            except BadRow as bad:
                raise UserError(f"{self.sources[i].where(row)} has changed since the checkpoint: {bad}") from None
        for id in window:
            if id not in samples:
                raise UserError(
                    f"{self.sources[id.source].where(id.row)} has changed since the checkpoint: it is shorter"
                )
            self.packer.add(samples[id])
