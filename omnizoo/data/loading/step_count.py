"""Convert `train.epochs` to a number of steps.

First, each rank renders a part of the rows once and records the lengths of the samples. Then rank 0 packs these
lengths without any content. Packing depends only on lengths and batch shapes, so the count is exact and the same on
every layout.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from omnizoo.config.schema import Config
from omnizoo.data.loading.lanes import Lane
from omnizoo.data.loading.reader import Reader
from omnizoo.data.packing.overlong import SampleSplit
from omnizoo.data.sample import Sample, SampleId
from omnizoo.parallel.errors import sync_errors
from omnizoo.parallel.mesh import Mesh

log = logging.getLogger(__name__)
NO_TOKENS = np.zeros(1, np.int32)


@dataclass(frozen=True)
class Lengths:
    """The sample lengths of consecutive rows of one source."""

    first: int  # number of the first row
    starts: npt.NDArray[np.int64]  # [rows + 1], index in `lengths` of the first sample of each row, and the total
    lengths: npt.NDArray[np.int32]  # [samples], number of tokens of each sample
    shapes: Sequence[tuple[int, ...]]  # batch shapes of the part, without duplicates
    shape_numbers: npt.NDArray[np.int32]  # [samples], index in `shapes` of the batch shape of each sample

    @property
    def num_rows(self) -> int:
        """Number of rows whose samples were measured."""
        return len(self.starts) - 1

    def of_row(self, row: int) -> list[tuple[int, tuple[int, ...]]]:
        """Return the length and the batch shape of each sample of a row."""
        index = row - self.first
        samples = slice(self.starts[index], self.starts[index + 1])
        lengths: list[int] = self.lengths[samples].tolist()
        shapes = [self.shapes[number] for number in self.shape_numbers[samples]]
        return list(zip(lengths, shapes, strict=True))


def measure(reader: Reader, rank: int, world: int) -> list[Lengths]:
    """Measure the samples of this rank's part of every source.

    Args:
        reader: The data of the run.
        rank: This rank.
        world: Number of ranks.

    Returns:
        The lengths for each source.

    Raises:
        UserError: If a row is bad and `data.on_bad_row` is `error`. With `skip`, a bad row has no samples.
    """
    lane = Lane(reader, 0)
    measured = []
    for number, source in enumerate(reader.sources):
        first = len(source) * rank // world
        stop = len(source) * (rank + 1) // world
        starts = [0]
        lengths: list[int] = []
        shape_numbers: list[int] = []
        numbers: dict[tuple[int, ...], int] = {}
        for row in range(first, stop):
            samples = lane.samples_of(number, 0, row).samples
            lengths += map(len, samples)
            shape_numbers += [numbers.setdefault(sample.batch_shape, len(numbers)) for sample in samples]
            starts.append(len(lengths))
        measured.append(
            Lengths(
                first=first,
                starts=np.array(starts, np.int64),
                lengths=np.array(lengths, np.int32),
                shapes=tuple(numbers),
                shape_numbers=np.array(shape_numbers, np.int32),
            )
        )
    return measured


@dataclass
class CountingLane(Lane):
    """A lane that packs samples of known lengths without reading their content."""

    lengths: Sequence[Sequence[Lengths]] = field(default=(), kw_only=True)  # lengths by source, then by measuring rank

    def _read_samples(self, i: int, epoch: int, row: int) -> SampleSplit:
        """Return samples that have the measured lengths of the row, and no content."""
        measured = next(part for part in self.lengths[i] if row < part.first + part.num_rows)
        samples = []
        for part, (length, shape) in enumerate(measured.of_row(row)):
            columns = {"input_ids": np.broadcast_to(NO_TOKENS, length)}
            samples.append(Sample(columns, batch_shape=shape, id=SampleId(i, epoch, row, part)))
        return SampleSplit(samples)


def steps_of(reader: Reader, lengths: Sequence[Sequence[Lengths]]) -> int:
    """Return the number of steps until all lanes are exhausted.

    Args:
        reader: The data of the run.
        lengths: For each source, the lengths that each rank measured, in rank order.
    """
    config = reader.config
    lanes = reader.config.data.lanes
    last = -1  # number of the last pack or sample of the run
    for number in range(lanes):
        lane = CountingLane(reader, number, config.train.epochs, by_rows=True, lengths=lengths)
        samples_by_pack = [len(pack) for pack in iter(lane.next_pack, None)]
        count = sum(samples_by_pack) if config.train.samples_per_step else len(samples_by_pack)
        if count:
            last = max(last, number + (count - 1) * lanes)
    return config.train.step_sizes.steps_for(last + 1)


def count_steps(config: Config, reader: Reader, mesh: Mesh, known: int | None = None) -> Config:
    """Set `train.steps` to the number of steps in `train.epochs`. Collective: all ranks must call it.

    Args:
        config: The config of the run. It is returned unchanged if `train.epochs` is not set.
        reader: The data of the run.
        mesh: The device mesh. Each rank measures a part of the rows.
        known: The number of steps, if it is known from a checkpoint; None to count the steps.

    Returns:
        The config with `train.steps`.

    Raises:
        UserError: If a row is bad and `data.on_bad_row` is `error`. The error is raised on all ranks.
    """
    if config.train.epochs is None:
        return config
    if known is None:
        num_rows = sum(map(len, reader.sources))
        log.info("train.epochs: measuring %s rows to compute the number of steps", f"{num_rows:,}")
        local_lengths = sync_errors(mesh, lambda: measure(reader, mesh.rank, mesh.layout.world))
        lengths_by_rank = mesh.gather(local_lengths)
        num_steps = None
        if mesh.is_first:
            lengths_by_source = list(zip(*lengths_by_rank, strict=True))
            num_steps = steps_of(reader, lengths_by_source)
        known = mesh.from_first(num_steps)
    assert known is not None
    return config.changed(train={"steps": max(1, known)})
