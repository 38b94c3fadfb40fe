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
from omnizoo.config.sections.step_sizes import StepSizes
from omnizoo.data.loading.lanes import Lane
from omnizoo.data.loading.prepare import prepare_pack
from omnizoo.data.loading.reader import Reader
from omnizoo.data.packing.pack import Pack
from omnizoo.data.packing.packer import pack_samples
from omnizoo.data.row import stop_message
from omnizoo.data.sample import Sample


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
    sizes: StepSizes  # sizes of the steps, in packs or samples
    by_samples: bool = False  # whether steps have a number of samples (`train.samples_per_step`)

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

    def taken_from(self, lane: int, steps: int) -> int:
        """Return the number of packs or samples that the first `steps` steps take from a lane."""
        return (self.sizes.before(steps) - lane + self.lanes - 1) // self.lanes

    def loads_pack(self, lane: int, number: int) -> bool:
        """Whether this rank prepares a pack of a step with a number of samples.

        Args:
            lane: The lane of the pack.
            number: Index of the pack among the packs of the lane in this step.
        """
        common = math.gcd(self.lanes, self.world)
        return self.rank == lane % common + common * (number % (self.world // common))


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
        read = self._read_samples if self.assignment.by_samples else self._read_packs
        packs = []
        undecodable = []
        for index, samples in read(step, lane_numbers):
            pack, bad_media = prepare_pack(index, samples, self.reader)
            if bad_media and self.reader.config.data.on_bad_row == "error":
                raise UserError(stop_message(bad_media[0]))
            packs.append(pack)
            undecodable += bad_media

        bad_rows = []
        states = {}
        for number in lane_numbers:
            if self.assignment.taken_from(number, step) == self.assignment.taken_from(number, step + 1):
                continue  # the lane has not advanced
            bad_rows += self.lanes[number].take_bad_rows()
            states[number] = self.lanes[number].state()
        return LoadedStep(packs=packs, bad_rows=bad_rows, undecodable=undecodable, states=states)

    def _read_packs(self, step: int, lane_numbers: range) -> Iterator[tuple[int, list[Sample]]]:
        """Yield the index and the samples of each pack of this rank in a step with a number of packs."""
        assignment = self.assignment
        first_index = assignment.sizes.before(step)
        for index in range(first_index, first_index + assignment.sizes.of_step(step)):
            number = index % assignment.lanes
            if number not in lane_numbers:
                continue
            samples = self._lane(number).next_pack()
            if index % assignment.world == assignment.rank:
                yield index, samples or []

    def _read_samples(self, step: int, lane_numbers: range) -> Iterator[tuple[int, list[Sample]]]:
        """Yield the index and the samples of each pack of this rank in a step with a number of samples.

        Sample g of the run is the next sample of lane g % lanes. The samples of a lane in a step are packed together,
        and the index of a pack is the number of its first sample.
        """
        assignment = self.assignment
        for number in lane_numbers:
            first = assignment.taken_from(number, step)
            count = assignment.taken_from(number, step + 1) - first
            if not count:
                continue
            samples = self._lane(number).next_samples(count)
            if not samples and assignment.loads_pack(number, 0):  # the lane is exhausted
                yield number + first * assignment.lanes, []
            for i, chosen in enumerate(pack_samples(samples, self.reader.config.data.pack_tokens)):
                if assignment.loads_pack(number, i):
                    index = number + (first + chosen[0]) * assignment.lanes
                    yield index, [samples[position] for position in chosen]

    def _lane(self, number: int) -> Lane:
        """Return the lane `number`. A lane is built when it is first used, because many lanes may never be used."""
        if number not in self.lanes:
            epochs = self.reader.config.train.epochs
            self.lanes[number] = Lane(self.reader, number, epochs, by_rows=epochs is not None)
            if number in self.states:
                self.lanes[number].restore(self.states[number])
        return self.lanes[number]
