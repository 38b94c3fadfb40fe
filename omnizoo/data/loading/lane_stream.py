"""Run lanes step by step, in a rank or in a loader worker.

`LaneAssignment` computes which lanes and packs a rank reads. `LaneSteps` yields these packs step by step.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from omnizoo.config.errors import UserError
from omnizoo.data.loading.lanes import Lane
from omnizoo.data.loading.prepare import prepare_pack
from omnizoo.data.loading.reader import Reader
from omnizoo.data.packing.pack import Pack
from omnizoo.data.row import stop_message


class LoadingStopped(Exception):  # noqa: N818 (no error: the run ends after the step before)
    """Raised on all ranks if at least one of them received a stop signal and did not finish loading a step."""


@dataclass(frozen=True)
class LoadedStep:
    """The packs of one step that a loader worker or a rank has loaded.

    First, each worker sets `undecodable` and `states`. Then the rank merges the steps of its workers, and sets
    `counters` and `is_stopped`.
    """

    packs: list[Pack]  # empty if loading failed
    bad_rows: list[str] = field(default_factory=list)  # messages about skipped rows; each row is on one rank only
    undecodable: list[str] = field(default_factory=list)  # messages about rows whose media cannot be decoded
    states: dict[int, dict[str, Any]] = field(default_factory=dict)  # state of each lane that advanced, by lane number
    counters: dict[str, int] = field(default_factory=dict)  # `Loader.counters` after this step
    is_stopped: bool = False  # whether a stop signal arrived while the step was loading; `packs` is then empty
    error: str | None = None  # message of a UserError, because DataLoader would add a traceback to a raised error

    def status(self) -> dict[str, Any]:
        """Return the part of this object that is sent to all ranks together with the pack metadata."""
        return {
            "error": self.error,
            "is_stopped": self.is_stopped,
            "counters": self.counters,
            "bad_rows": self.bad_rows,
        }


def failed_steps(error: str) -> Iterator[LoadedStep]:
    """Yield an endless sequence of failed steps with this error message.

    The loader reads from its workers in turn. If the sequence of a failed worker ended, the loader would skip this
    worker, and the error would be lost.
    """
    return itertools.repeat(LoadedStep(packs=[], error=error))


@dataclass(frozen=True)
class LaneAssignment:
    """Determines which lanes and packs a rank reads."""

    rank: int
    world: int  # number of ranks
    lanes: int  # number of lanes
    packs_per_step: int

    @property
    def local_lanes(self) -> range:
        """Numbers of the lanes that this rank runs."""
        # Pack g belongs to lane g % lanes and to rank g % world. A lane and a rank have a pack in common if and only if
        # their numbers are equal modulo the greatest common divisor of `lanes` and `world`.
        common = math.gcd(self.lanes, self.world)
        return range(self.rank % common, self.lanes, common)

    @property
    def counts(self) -> bool:
        """Whether this rank reports counters and bad rows. Of the ranks with the same lanes, only the lowest does."""
        return self.rank < math.gcd(self.lanes, self.world)

    def packs_of(self, lane: int, steps: int) -> int:
        """Return the number of packs that the first `steps` steps take from a lane."""
        return (steps * self.packs_per_step - lane + self.lanes - 1) // self.lanes


class LaneSteps(IterableDataset[LoadedStep]):
    """Dataset whose items are the steps of a run, loaded one after the other.

    In the process of a rank, it runs all lanes of the rank. In a loader worker, it runs only the lanes of that worker.

    Args:
        reader: The data of the run.
        assignment: The lanes and packs of the rank.
        first_step: Index of the first step to load.
        states: The state of each lane before `first_step`, by lane number; a lane without a state starts from the
            beginning.
    """

    def __init__(
        self, reader: Reader, assignment: LaneAssignment, first_step: int, states: dict[int, dict[str, Any]]
    ) -> None:
        self.reader = reader
        self.assignment = assignment
        self.first_step = first_step
        self.states = states
        self.lanes: dict[int, Lane] = {}

    def __iter__(self) -> Iterator[LoadedStep]:
        try:
            yield from self.run()
        except UserError as error:
            yield from failed_steps(str(error))

    def run(self) -> Iterator[LoadedStep]:
        """Yield what this process loads for each step.

        Raises:
            UserError: If a step cannot be loaded.
        """
        self.lanes = {}
        lane_numbers = self.assignment.local_lanes
        worker = get_worker_info()
        if worker is not None:
            lane_numbers = lane_numbers[worker.id :: worker.num_workers]
        for step in itertools.count(self.first_step):
            yield self._load_step(step, lane_numbers)

    def _load_step(self, step: int, lane_numbers: range) -> LoadedStep:
        """Advance the lanes of this process by one step, and prepare the packs that belong to this rank."""
        assignment = self.assignment
        first_index = step * assignment.packs_per_step
        packs = []
        undecodable = []
        advanced = set()
        for index in range(first_index, first_index + assignment.packs_per_step):
            number = index % assignment.lanes
            if number not in lane_numbers:
                continue
            samples = self._lane(number).next_pack()
            advanced.add(number)
            if index % assignment.world == assignment.rank:
                pack, bad_media = prepare_pack(index, samples or [], self.reader)
                if bad_media and self.reader.config.data.on_bad_row == "error":
                    raise UserError(stop_message(bad_media[0]))
                packs.append(pack)
                undecodable += bad_media

        bad_rows = []
        states = {}
        for number in sorted(advanced):
            bad_rows += self.lanes[number].take_bad_rows()
            states[number] = self.lanes[number].state()
        return LoadedStep(packs=packs, bad_rows=bad_rows, undecodable=undecodable, states=states)

    def _lane(self, number: int) -> Lane:
        """Return the lane `number`. A lane is built when it is first used, because many lanes may never be used."""
        if number not in self.lanes:
            epochs = self.reader.config.train.epochs
            self.lanes[number] = Lane(self.reader, number, epochs, by_rows=epochs is not None)
            if number in self.states:
                self.lanes[number].restore(self.states[number])
        return self.lanes[number]
