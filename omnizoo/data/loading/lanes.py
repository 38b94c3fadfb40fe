"""A lane is one endless stream of packs, determined by the `data` section, the seed and the number of the lane.

The packs of a lane do not depend on the rank or worker that runs it. The state of a lane is a few cursors and the ids
of the samples in its packing window. The order of rows is computed for any position in any epoch, so resuming replays
no data.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from omnizoo.config.errors import UserError
from omnizoo.data.loading.reader import Reader
from omnizoo.data.loading.row_order import EpochOrder, draws, other_rows
from omnizoo.data.packing.overlong import SampleSplit, fit_to_pack
from omnizoo.data.packing.packer import Packer
from omnizoo.data.row import BadRow, Row
from omnizoo.data.sample import Sample, SampleId


@dataclass
class Cursor:
    """The position of a lane in one source."""

    drawn: int  # rows read in all epochs
    epoch: int
    position: int  # rows read in this epoch
    fruitless: int = 0  # consecutive rows without a usable sample


@dataclass
class Counters:
    packs: int = 0
    skipped_rows: int = 0
    dropped_overlong: int = 0
    split_overlong: int = 0
    truncated_overlong: int = 0
    few_targets: int = 0  # samples with fewer targets than data.min_targets
    beyond_positions: int = 0  # samples longer than the model's maximum number of positions


@dataclass
class Lane:
    """A stream of packs: `next_pack` returns the samples of the next one.

    With `epochs`, every row of every source is read that many times; then `next_pack` returns None.
    """

    reader: Reader
    lane: int
    epochs: float | None = None
    patience: int = 0  # number of bad rows to collect before `data.on_bad_row: error` raises
    by_rows: bool = False  # mix sources by their numbers of rows instead of their weights
    counters: Counters = field(default_factory=Counters)
    bad_rows: list[str] = field(default_factory=list)  # messages about rows skipped since the last `take_bad_rows`

    def __post_init__(self) -> None:
        self.data, self.sources = self.reader.config.data, self.reader.sources
        self.seed = self.reader.config.train.seed
        weights = [len(s) for s in self.sources] if self.by_rows else [spec.weight for spec in self.data.sources]
        self.weights = [weight / sum(weights) for weight in weights]
        # Lanes start at different positions of the mix. Otherwise the first packs of all lanes have the same source.
        self.jitter = [float(draws(1, self.seed, self.lane, i)[0]) / 2**64 for i in range(len(self.sources))]
        # A source with fewer rows than lanes cannot be divided among the lanes. Each lane then reads all rows of every
        # `lanes`-th epoch.
        self.strides = [1 if len(source) >= self.data.lanes else self.data.lanes for source in self.sources]
        self.cursors = [Cursor(0, 0 if stride == 1 else self.lane, 0) for stride in self.strides]
        self.orders = [self._order(i) for i in range(len(self.sources))]
        self.packer = Packer(self.data.pack_tokens, self.data.look_ahead)

    def _order(self, i: int) -> EpochOrder:
        data, shuffle_rows = self.data, self.data.shuffle_rows if self.data.shuffle else None
        return EpochOrder(self.sources[i], i, self.lane, data.lanes, self.cursors[i].epoch, self.seed, shuffle_rows)

    def next_pack(self) -> list[Sample] | None:
        while not self.packer.is_ready and self._read_row():
            pass
        self.counters.packs += 1  # also counts packs after the end of the data: the position of the lane in the run
        return self.packer.pop() if self.packer.buffer else None

    def take_bad_rows(self) -> list[str]:
        taken, self.bad_rows = self.bad_rows, []
        return taken

    def _read_row(self) -> bool:
        """Read one row into the packer, or skip it if it is bad. Return False if no row is left (with `epochs`)."""
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
        # More rows than one epoch of all lanes: the part of a small source that one lane reads may have no usable row.
        if cursor.fruitless >= len(source) + 64 * min(self.data.lanes, len(source)):
            raise UserError(
                f"data source {self.data.sources[i].name}: none of the last {cursor.fruitless} rows read was usable; "
                f"the last one ({source.where(row)}): {read.reason}"
            )
        return True

    def samples_of(self, i: int, epoch: int, row: int) -> SampleSplit:
        """Return the samples of a row. A bad row has no samples, or raises with `data.on_bad_row: error`."""
        try:
            return self._read_samples(i, epoch, row)
        except BadRow as bad:
            where = self.sources[i].where(row)
            if self.data.on_bad_row == "error" and len(self.bad_rows) >= self.patience:
                raise UserError(f"{where}: {bad} (data.on_bad_row: skip goes on without such rows)") from None
            self.counters.skipped_rows += 1
            self.bad_rows.append(f"{where}: {bad}")
            return SampleSplit([], reason=str(bad))

    def _count(self, read: SampleSplit) -> None:
        counters, most = self.counters, self.reader.most_positions
        if read.counter:
            setattr(counters, read.counter, getattr(counters, read.counter) + 1)
        counters.few_targets += read.few_targets
        if most is not None:
            counters.beyond_positions += sum(sample.num_positions > most for sample in read.samples)

    def _choose_source(self) -> int | None:
        """Return the source that is furthest behind its share of rows, so that the mix is exact at any time.

        None if all sources are exhausted.
        """
        open_sources = [i for i in range(len(self.cursors)) if self._is_open(i)]
        rows = 1 + sum(cursor.drawn for cursor in self.cursors)
        return max(
            open_sources,
            key=lambda i: self.weights[i] * rows + self.jitter[i] - self.cursors[i].drawn,
            default=None,
        )

    def _is_open(self, i: int) -> bool:
        """Whether source `i` has rows left to read. `epochs` may end with a part of an epoch."""
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

    def _read_samples(self, i: int, epoch: int, row: int) -> SampleSplit:
        source = self.sources[i]
        given, where, find = source.read(row), (i, epoch, row), partial(source.find, row)

        def samples(other: Row | None = None, number: int = row) -> SampleSplit:
            rendered = self.reader.renderer.render(given, where, find, other, partial(source.find, number))
            return fit_to_pack(*where, rendered, self.data)

        if not self.reader.config.mismatched_answers:
            return samples()
        reason = ""
        for number in other_rows(row, len(source)):
            try:
                return samples(source.read(number), number)
            except BadRow as bad:
                samples()  # raises if the row itself is bad
                reason = str(bad)
        raise BadRow(f"its prompt needs the answer of another row, and none of those tried is of use: {reason}")

    def state(self) -> dict[str, Any]:
        """Return the state for `restore`, which can be stored as JSON. It has the ids of samples, not their content."""
        return {
            "cursors": [[c.drawn, c.epoch, c.position, c.fruitless] for c in self.cursors],
            "window": [tuple(sample.id) for sample in self.packer.buffer],
            "counters": dict(vars(self.counters)),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue exactly where `state` was taken. Samples of the packing window are read again."""
        self.cursors = [Cursor(*values) for values in state["cursors"]]
        self.orders = [self._order(i) for i in range(len(self.sources))]
        self.counters = Counters(**state["counters"])
        self.packer = Packer(self.data.pack_tokens, self.data.look_ahead, self.counters.packs)
        window = [SampleId(*values) for values in state["window"]]
        samples: dict[SampleId, Sample] = {}
        for i, epoch, row in sorted({id[:3] for id in window}, key=lambda id: (id[0], id[2])):  # in storage order
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
