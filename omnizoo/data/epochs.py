"""How many steps `train.epochs` are: every row is measured once, then the lanes are run on lengths alone.

What lanes do depends on lengths only, so the count is exact, and the same on every layout. Ranks share the rows among
them to measure.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import numpy as np
import numpy.typing as npt

from omnizoo.config.schema import Config
from omnizoo.data.lanes import Lane
from omnizoo.data.lengths import Cut
from omnizoo.data.packing import Sample, SampleId
from omnizoo.data.reader import Reader
from omnizoo.parallel.agree import agree
from omnizoo.parallel.mesh import Mesh

log = logging.getLogger(__name__)
NO_TOKENS = np.zeros(1, np.int32)
NO_TARGETS = np.zeros(0, np.bool_)


@dataclass(frozen=True)
class Lengths:
    """Of the samples of each row from `first` on. Nearly all rows are one sample."""

    first: int
    single: npt.NDArray[np.int32]  # 0: none
    several: dict[int, list[int]]  # by row

    def of(self, row: int) -> list[int]:
        return self.several.get(row) or [int(length) for length in [self.single[row - self.first]] if length]


def measure(reader: Reader, rank: int, world: int) -> list[Lengths]:
    """This rank's part of every source. A bad row stops it here already, or counts as none (`data.on_bad_row`)."""
    lane = reader.lane(0)
    measured = []
    for number, source in enumerate(reader.sources):
        first, last = (len(source) * part // world for part in (rank, rank + 1))
        single, several = np.zeros(last - first, np.int32), {}
        for row in range(first, last):
            lengths = [len(sample.ids) for sample in lane.samples_of(number, 0, row).samples]
            if len(lengths) == 1:
                single[row - first] = lengths[0]
            elif lengths:
                several[row] = lengths
        measured.append(Lengths(first, single, several))
    return measured


@dataclass
class CountingLane(Lane):
    """Packs rows of which only the lengths are known."""

    lengths: Sequence[Sequence[Lengths]] = field(default=(), kw_only=True)  # by source, and by who has measured

    def _read_samples(self, i: int, epoch: int, row: int) -> Cut:
        part = next(part for part in self.lengths[i] if row < part.first + len(part.single))
        lengths = enumerate(part.of(row))
        return Cut([Sample(SampleId(i, epoch, row, n), np.broadcast_to(NO_TOKENS, k), NO_TARGETS) for n, k in lengths])


def steps_of(reader: Reader, lengths: Sequence[Sequence[Lengths]]) -> int:
    """Up to the last step in which any lane still has a pack. `lengths` of each source, from all who have measured."""
    config, lanes, last = reader.config, reader.config.data.lanes, -1
    for number in range(lanes):
        lane = reader.lane(number, config.train.epochs, by_rows=True)
        settings = {item.name: getattr(lane, item.name) for item in fields(Lane)}
        counting = CountingLane(**settings | {"most_positions": None}, lengths=lengths)
        packs = sum(1 for _ in iter(counting.next_pack, None))
        if packs:
            last = max(last, number + (packs - 1) * lanes)
    return last // config.train.global_batch + 1


def count_steps(config: Config, reader: Reader, mesh: Mesh, known: int | None = None) -> Config:
    """`config` with the `train.steps` that its `train.epochs` are; without epochs, as it is. `known`: as counted when
    the run began."""
    if config.train.epochs is None:
        return config
    if known is None:
        rows = sum(map(len, reader.sources))
        log.info("train.epochs: measuring %s rows, to know how many steps they are", f"{rows:,}")
        own = agree(mesh, lambda: measure(reader, mesh.rank, mesh.layout.world))
        parts = mesh.gather(own)
        known = mesh.from_first(steps_of(reader, list(zip(*parts, strict=True))) if mesh.is_first else None)
    assert known is not None
    return config.model_copy(update={"train": config.train.model_copy(update={"steps": max(1, known)})})
