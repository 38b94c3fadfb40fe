"""A lane is an independent stream of packs. A run consists of several lanes.

The packs of a lane depend only on the `data` section, the seed and the number of the lane, and not on the rank or
worker that runs it. The state of a lane consists of a few cursors and the ids of the samples in its packing window.
The order of rows can be computed for any position in any epoch, so resuming does not read earlier rows again.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

from omnizoo.config.errors import UserError
from omnizoo.data.loading.reader import Reader
from omnizoo.data.loading.row_order import EpochOrder, other_rows, random_bits
from omnizoo.data.packing.overlong import SampleSplit, fit_all_to_packs
from omnizoo.data.packing.packer import Packer
from omnizoo.data.row import BadRow, Row, stop_message
from omnizoo.data.sample import Sample, SampleId


@dataclass
class Cursor:
    """The position of a lane in one source."""

    rows_read: int  # number of rows read in all epochs
    epoch: int
    position: int  # number of rows read in this epoch
    rows_without_sample: int = 0  # number of consecutive rows without a usable sample


@dataclass
class Counters:
    """Counters of a lane since the start of the run."""

    packs: int = 0  # packs that the lane has produced; samples with `train.samples_per_step`
    skipped_rows: int = 0  # bad rows
    dropped_overlong: int = 0  # samples longer than a pack that were dropped
    split_overlong: int = 0  # samples longer than a pack that were split
    truncated_overlong: int = 0  # samples longer than a pack that were truncated
    few_targets: int = 0  # samples that were dropped because they have fewer targets than data.min_targets
    beyond_positions: int = 0  # samples longer than the model's maximum number of positions


def shares_of(reader: Reader, by_rows: bool) -> list[float]:
    """Return the fraction of rows that come from each source. The fractions sum to 1.

    They follow the weights of the sources, or their numbers of rows if no source has a weight.

    Args:
        reader: The data of a run.
        by_rows: Whether to use the numbers of rows even if the sources have weights.
    """
    weights: Sequence[float] | None = None if by_rows else reader.config.data.weights
    if weights is None:
        weights = [len(source) for source in reader.sources]
    return [weight / sum(weights) for weight in weights]


@dataclass
class Lane:
    """A stream of packs. `next_pack` returns the samples of the next pack."""

    reader: Reader
    lane: int  # number of the lane
    epochs: float | None = None  # how often the lane reads each of its rows; None for an endless lane
    by_rows: bool = False  # mix sources in proportion to their numbers of rows, even if they have weights
    counters: Counters = field(default_factory=Counters)
    bad_rows: list[str] = field(default_factory=list)  # messages about rows skipped since the last `take_bad_rows`

    def __post_init__(self) -> None:
        self.data = self.reader.config.data
        self.sources = self.reader.sources
        self.seed = self.reader.config.train.seed
        self.shares = shares_of(self.reader, self.by_rows)
        # Random numbers, so that lanes start at different positions of the mix. Otherwise, all lanes would begin with
        # the same source.
        self.jitter = [float(random_bits(1, self.seed, self.lane, i)[0]) / 2**64 for i in range(len(self.sources))]
        # A source with fewer rows than lanes cannot be divided among the lanes. Each lane then reads all rows of the
        # source, but only in every `lanes`-th epoch.
        self.strides = [1 if len(source) >= self.data.lanes else self.data.lanes for source in self.sources]
        self.cursors = [Cursor(0, 0 if stride == 1 else self.lane, 0) for stride in self.strides]
        self.orders = [self._order(i) for i in range(len(self.sources))]
        self.packer = Packer(self.data.pack_tokens, self.data.look_ahead)

    def _order(self, i: int) -> EpochOrder:
        """Return the order of the rows of source `i` in the current epoch."""
        return EpochOrder(
            self.sources[i],
            number=i,
            lane=self.lane,
            lanes=self.data.lanes,
            epoch=self.cursors[i].epoch,
            seed=self.seed,
            shuffle_rows=self.data.shuffle_rows if self.data.shuffle else None,
        )

    def next_pack(self) -> list[Sample] | None:
        """Return the samples of the next pack; None after the last pack, if `epochs` is set."""
        while not self.packer.is_ready and self._read_row():
            pass
        self.counters.packs += 1  # count calls after the last pack as well, because this is the position in the run
        return self.packer.pop() if self.packer.buffer else None

    def next_samples(self, count: int) -> list[Sample]:
        """Return the next `count` samples; fewer after the last sample, if `epochs` is set."""
        while len(self.packer.buffer) < count and self._read_row():
            pass
        self.counters.packs += count  # the position in the run, even after the last sample
        return self.packer.pop_oldest(count)

    def take_bad_rows(self) -> list[str]:
        """Return the messages about bad rows since the last call."""
        bad_rows = self.bad_rows
        self.bad_rows = []
        return bad_rows

    def _read_row(self) -> bool:
        """Read one row and add its samples to the packing window. Return False if there is no row left."""
        i = self._choose_source()
        if i is None:
            return False
        cursor = self.cursors[i]
        epoch = cursor.epoch
        row = self.orders[i][cursor.position]
        self._advance(i)
        split = self.samples_of(i, epoch, row)
        self._count(split)
        for sample in split.samples:
            self.packer.add(sample)

        cursor.rows_without_sample = 0 if split.samples else cursor.rows_without_sample + 1
        self._check_usable(i, row, split.reason)
        return True

    def _check_usable(self, i: int, row: int, reason: str) -> None:
        """Check that source `i` has usable rows.

        Args:
            i: Index of the source.
            row: Number of the row that was read last.
            reason: Why that row has no samples.

        Raises:
            UserError: If many consecutive rows had no samples.
        """
        source = self.sources[i]
        rows_without_sample = self.cursors[i].rows_without_sample
        # The lane reads another part of the source in each epoch. At this limit, it has read all parts at least once. A
        # single part of a small source may have no usable row.
        if rows_without_sample >= len(source) + 64 * min(self.data.lanes, len(source)):
            raise UserError(
                f"{self.data.sources[i].name}: none of the last {rows_without_sample} rows was usable; "
                f"the last one ({source.where(row)}): {reason}"
            )

    def samples_of(self, i: int, epoch: int, row: int) -> SampleSplit:
        """Return the samples of a row. With `data.on_bad_row: skip`, a bad row has no samples.

        Args:
            i: Index of the source.
            epoch: Number of the epoch.
            row: Number of the row in its source.

        Raises:
            UserError: If the row is bad and `data.on_bad_row` is `error`.
        """
        try:
            return self._read_samples(i, epoch, row)
        except BadRow as bad:
            where = self.sources[i].where(row)
            message = f"{where}: {bad}"
            if self.data.on_bad_row == "error":
                raise UserError(stop_message(message)) from None
            self.counters.skipped_rows += 1
            self.bad_rows.append(message)
            return SampleSplit([], reason=str(bad))

    def _count(self, split: SampleSplit) -> None:
        """Add the samples of a row to the counters."""
        counters = self.counters
        max_positions = self.reader.most_positions
        for name in split.counters:
            setattr(counters, name, getattr(counters, name) + 1)
        counters.few_targets += split.few_targets
        if max_positions is not None:
            counters.beyond_positions += sum(sample.num_positions > max_positions for sample in split.samples)

    def _choose_source(self) -> int | None:
        """Return the index of the source to read from; None if all sources are exhausted.

        The chosen source is furthest behind its share of rows. The mix is therefore exact at any time.
        """
        open_sources = [i for i in range(len(self.cursors)) if self._is_open(i)]
        rows = 1 + sum(cursor.rows_read for cursor in self.cursors)

        def rows_behind(i: int) -> float:
            return self.shares[i] * rows + self.jitter[i] - self.cursors[i].rows_read

        return max(open_sources, key=rows_behind, default=None)

    def _is_open(self, i: int) -> bool:
        """Whether source `i` has rows left to read. `epochs` may be fractional, so the last epoch may be partial."""
        if self.epochs is None:
            return True
        share = min(1.0, max(0.0, self.epochs - self.cursors[i].epoch))
        return self.cursors[i].position < round(share * len(self.orders[i]))

    def _advance(self, i: int) -> None:
        """Move the cursor of source `i` to the next row or, after the last row, to the next epoch."""
        cursor = self.cursors[i]
        cursor.rows_read += 1
        cursor.position += 1
        if cursor.position == len(self.orders[i]):
            cursor.epoch += self.strides[i]
            cursor.position = 0
            self.orders[i] = self._order(i)

    def _read_samples(self, i: int, epoch: int, row: int) -> SampleSplit:
        """Read a row, render it and split it into samples. For the KTO baseline, add a response from another row."""
        source = self.sources[i]
        fields = source.read(row)
        find = source.files(row)

        def render(other: Row | None = None, other_number: int = row) -> SampleSplit:
            find_other = source.files(other_number)
            samples = self.reader.renderer.render_samples(fields, (i, epoch, row), find, other, find_other)
            return fit_all_to_packs(i, epoch, row, samples, self.data)

        if not self.reader.config.mismatched_answers:
            return render()
        reason = ""
        for number in other_rows(row, len(source)):
            try:
                return render(source.read(number), number)
            except BadRow as bad:
                render()  # raises an error if the row is bad
                reason = str(bad)
        raise BadRow(f"the KTO baseline needs the response of another row, but none was usable: {reason}")

    def state(self) -> dict[str, Any]:
        """Return the state for `restore`: a value for JSON, with ids of samples instead of their content."""
        return {
            "cursors": [list(astuple(cursor)) for cursor in self.cursors],
            "window": [tuple(sample.id) for sample in self.packer.buffer],
            "counters": dict(vars(self.counters)),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Set the lane to the position at which `state` was saved. Samples in the packing window are read again.

        Raises:
            UserError: If a row in the packing window has changed.
        """
        self.cursors = [Cursor(*values) for values in state["cursors"]]
        self.orders = [self._order(i) for i in range(len(self.sources))]
        self.counters = Counters(**state["counters"])
        self.packer = Packer(self.data.pack_tokens, self.data.look_ahead, self.counters.packs)
        window = [SampleId(*values) for values in state["window"]]
        samples: dict[SampleId, Sample] = {}
        rows = sorted({id[:3] for id in window}, key=lambda id: (id[0], id[2]))  # in the order of storage
        for i, epoch, row in rows:
            try:
                split = self._read_samples(i, epoch, row)
            except BadRow as bad:
                where = self.sources[i].where(row)
                raise UserError(f"{where}: the row has changed since the checkpoint: {bad}") from None
            samples |= {sample.id: sample for sample in split.samples}
        for id in window:
            if id not in samples:
                where = self.sources[id.source].where(id.row)
                raise UserError(f"{where}: the row has changed since the checkpoint: it is shorter")
            self.packer.add(samples[id])
