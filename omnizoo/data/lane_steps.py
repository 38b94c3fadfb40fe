"""Lanes run step by step, in a rank or in a loader worker: which packs of a step are whose, and what lanes add."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from omnizoo.config.errors import UserError
from omnizoo.data.flat_pack import FlatPack, filler, flatten
from omnizoo.data.reader import Reader


@dataclass(frozen=True)
class LaneStep:
    """What the lanes of one worker add to a step."""

    packs: list[FlatPack]
    states: dict[int, dict[str, Any]]  # of the lanes that moved
    bad_rows: list[str]  # skipped by the lanes
    undecodable: list[str]  # rows whose media turned out bad after they were packed


@dataclass(frozen=True)
class Failure:
    """A UserError on its way out of a worker; raised there, it would arrive wrapped in a traceback."""

    message: str


@dataclass(frozen=True)
class Share:
    """Which lanes and packs a rank reads."""

    rank: int
    world: int
    lanes: int
    global_batch: int

    @property
    def own_lanes(self) -> range:
        # a lane has a pack for a rank at some step exactly if both agree modulo the common divisor
        common = math.gcd(self.lanes, self.world)
        return range(self.rank % common, self.lanes, common)

    @property
    def counts(self) -> bool:
        """Of the ranks that run the same lanes, the lowest reports what happened in them."""
        return self.rank < math.gcd(self.lanes, self.world)

    def packs_of(self, lane: int, steps: int) -> int:
        """Packs a lane has given after that many steps."""
        return (steps * self.global_batch - lane + self.lanes - 1) // self.lanes


class LaneSteps(IterableDataset[LaneStep | Failure]):
    """Runs lanes step by step, from a state on: all those of the rank, or in a loader worker its part of them."""

    def __init__(self, reader: Reader, share: Share, first_step: int, states: dict[int, dict[str, Any]]) -> None:
        self.reader, self.share, self.first_step, self.states = reader, share, first_step, states

    def __iter__(self) -> Iterator[LaneStep | Failure]:
        try:
            yield from self.run()
        except UserError as error:
            while True:  # whichever worker fails, the loader must find it at its turn
                yield Failure(str(error))

    def run(self) -> Iterator[LaneStep]:
        reader, share, worker = self.reader, self.share, get_worker_info()
        numbers = share.own_lanes if worker is None else share.own_lanes[worker.id :: worker.num_workers]
        # Others are made when their first pack is due: there may be far more lanes than packs.
        epochs = reader.config.train.epochs
        by_rows = epochs is not None
        lanes = {n: reader.lane(n, epochs, by_rows=by_rows) for n in self.states if n in numbers}
        for number, lane in lanes.items():
            lane.restore(self.states[number])
        for step in itertools.count(self.first_step):
            packs, moved, undecodable = [], set(), []
            for index in range(step * share.global_batch, (step + 1) * share.global_batch):
                number = index % share.lanes
                if number not in numbers:
                    continue
                if number not in lanes:
                    lanes[number] = reader.lane(number, epochs, by_rows=by_rows)
                lane = lanes[number]
                pack = lane.next_pack()
                moved.add(lane.lane)
                if index % share.world == share.rank:
                    flat, bad = flatten(index, pack, reader) if pack else (filler(index), [])
                    if bad and reader.config.data.on_bad_row == "error":
                        raise UserError(f"{bad[0]} (data.on_bad_row: skip goes on without such rows)")
                    packs.append(flat)
                    undecodable += bad
            bad_rows = [message for n in sorted(moved) for message in lanes[n].take_bad_rows()]
            yield LaneStep(packs, {n: lanes[n].state() for n in sorted(moved)}, bad_rows, undecodable)
