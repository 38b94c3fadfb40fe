"""The data loader of a rank. The packs of each step are the same for any number of ranks and workers.

Pack g of the run is the next pack of lane g % lanes. Step s consists of packs s*G to (s+1)*G - 1, where G is
`train.packs_per_step`. Rank r reads the packs with g % world == r and decodes their media. Afterwards, packs are
redistributed to the ranks that train on them. With `train.samples_per_step`, the same is true for samples instead of
packs, and the samples of a lane in a step are packed together.

After a step, every lane is exactly at the end of that step, on every rank that runs it. A state that was saved on one
layout can therefore be loaded on any other.
"""

import errno
import functools
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset
from transformers import PreTrainedTokenizerBase

from omnizoo.config.errors import UserError, first_line, named_line
from omnizoo.config.plugins import CODE_ERRORS
from omnizoo.config.schema import Config
from omnizoo.data.loading.lane_stream import LaneAssignment, LaneSteps, LoadedStep, failed_steps
from omnizoo.data.loading.lanes import Counters
from omnizoo.data.loading.reader import Reader, build_reader
from omnizoo.data.loading.resume_check import check_fingerprint, fingerprint, with_saved_mix
from omnizoo.data.loading.worker_pickling import NotPicklable, SharedPickle
from omnizoo.data.loading.workers import Workers, start_server, worker_count, worker_setup

log = logging.getLogger(__name__)
WAIT_SECONDS = 1.0  # a rank that waits for its workers checks at this interval whether the run stops
TIMED_OUT = "DataLoader timed out"  # beginning of the error that torch raises after WAIT_SECONDS
MORE_SHARED_MEMORY = "Make /dev/shm writable and larger, or set data.workers to 0."
ROWS_READ = "rows_read"  # counter of rows whose samples are all in packs; rows in the packing window do not count


class PickledSteps(IterableDataset[LoadedStep]):
    """Dataset for loader workers that contains `LaneSteps` in pickled form.

    A worker unpickles them when it starts to iterate, so an error becomes a failed step instead of a crash.
    """

    def __init__(self, steps: LaneSteps) -> None:
        self.steps = SharedPickle(steps)

    def __iter__(self) -> Iterator[LoadedStep]:
        try:
            lane_steps: LaneSteps = self.steps.open()
        except (UserError, *CODE_ERRORS) as error:
            reason = named_line(error)
            return failed_steps(
                f"data.workers: a worker failed to unpickle the data sources or plugins: {reason}. Set it to 0 to load "
                "data in the training process."
            )
        return map(share_tensors, lane_steps)


def share_tensors(step: LoadedStep) -> LoadedStep:
    """Move the tensors of a step to shared memory, before a worker sends it. If that fails, return a failed step.

    Without this function, a thread of multiprocessing would move them later. If that failed, it would only print an
    error, and the step would be lost.
    """
    try:
        for pack in step.packs:
            for item in pack.items:
                for tensor in (item.inputs or {}).values():
                    tensor.share_memory_()
    except RuntimeError as error:
        return LoadedStep(packs=[], error=f"data.workers: {first_line(error)}. {MORE_SHARED_MEMORY}")
    return step


def identity(item: Any) -> Any:
    """Return `item`. This is the collate function for workers. It is a named function because it must be picklable."""
    return item


class Loader:
    """The data loader of a rank. It never ends: `next_step` can be called any number of times.

    `state_dict` describes the state after the last step that `next_step` returned. It does not depend on how many
    steps the workers have prefetched.

    Args:
        reader: The data of the run.
        assignment: The lanes and packs of the rank.
    """

    def __init__(self, reader: Reader, assignment: LaneAssignment) -> None:
        self.reader = reader
        self.config = reader.config
        self.assignment = assignment
        self.step = 0  # index of the next step
        self.undecodable = 0  # rows dropped on this rank because their media could not be decoded
        self.states: dict[int, dict[str, Any]] = {}
        self.workers = min(worker_count(self.config.data.workers), len(assignment.local_lanes))
        if self.workers:
            start_server()
        self.iterator: Iterator[LoadedStep] | None = None
        self.processes = Workers()
        self.is_stopped = False

    def start(self) -> None:
        """Start the workers, so that they load data while the model is being set up."""
        if self.iterator is not None:
            return
        try:
            if self.workers:
                self.processes.check_resources(self.workers)
        except OSError as error:
            hint = "Raise ulimit -n." if error.errno == errno.EMFILE else MORE_SHARED_MEMORY
            reason = f"workers cannot be started ({error.strerror}). {hint}"
            log.warning("data.workers: using 0 instead of %d, because %s", self.workers, reason)
            self.workers = 0
        self.iterator = iter(self._steps())

    def next_step(self) -> LoadedStep:
        """Load the next step of this rank.

        Returns:
            The packs that this rank has read, with its counters and bad rows. After `stop`, the step has no packs.

        Raises:
            UserError: If the data cannot be read, or a row is bad and `data.on_bad_row` is `error`.
            WorkerDeath: If a loader worker has died.
        """
        self.start()
        assert self.iterator is not None
        # DataLoader reads from its workers in turn, so one item from each of them makes a complete step.
        parts: list[LoadedStep] = []
        for _ in range(max(1, self.workers)):
            part = self._next_part(self.iterator)
            if part is None:
                return LoadedStep(packs=[], counters=self.counters(), is_stopped=True)
            if part.error is not None:
                self.close()
                raise UserError(part.error)
            parts.append(part)
        for part in parts:
            self.states |= part.states
        self.step += 1
        packs = sorted((pack for part in parts for pack in part.packs), key=lambda pack: pack.index)
        undecodable = [message for part in parts for message in part.undecodable]
        self.undecodable += len(undecodable)
        bad_rows = []
        if self.assignment.counts:
            bad_rows = [message for part in parts for message in part.bad_rows]
        return LoadedStep(packs, bad_rows + undecodable, counters=self.counters())

    def stop(self) -> None:
        """Stop waiting for workers, because they may be stuck. Another thread may run `next_step` at the same time."""
        self.is_stopped = True

    def _next_part(self, iterator: Iterator[LoadedStep]) -> LoadedStep | None:
        """Return the part of the current step that the next worker has loaded; None after `stop`."""
        while not self.is_stopped:
            try:
                return next(iterator)
            except RuntimeError as error:  # raised by torch after a timeout, and when a loader worker has died
                death = self.processes.death()
                if death is not None or not str(error).startswith(TIMED_OUT):
                    raise death or error from error
        return None

    def _steps(self) -> Iterable[LoadedStep]:
        """Return an iterable over the current step and all later ones, loaded by workers or in this process."""
        _ = self.fingerprint  # computed and cached before the first row is read
        steps = LaneSteps(self.reader, self.assignment, self.step, self.states)
        if not self.workers:
            return steps
        try:
            pickled_steps = PickledSteps(steps)
        except NotPicklable as reason:
            log.warning("data.workers: using 0 instead of %d, because pickling failed: %s", self.workers, reason)
            self.workers = 0
            return steps
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the workers already run in parallel
        self.processes = Workers()
        return DataLoader(
            pickled_steps,
            batch_size=None,
            collate_fn=identity,
            num_workers=self.workers,
            prefetch_factor=self.config.data.prefetch,
            timeout=WAIT_SECONDS,
            worker_init_fn=worker_setup(),
            multiprocessing_context=self.processes,
            generator=torch.Generator(),  # DataLoader draws a seed; the default generator must not change
        )

    def counters(self) -> dict[str, int]:
        """Return this rank's counters since the start of the run: rows read, rows skipped, samples dropped and so on.

        Each lane is counted on one rank only, so the sum over ranks is the total of the run.
        """
        names = [item.name for item in fields(Counters) if item.name != "packs"]
        counters = dict.fromkeys(names, 0)
        counters[ROWS_READ] = 0
        states = self.states.values() if self.assignment.counts else ()
        for state in states:
            for name in names:
                counters[name] += state["counters"].get(name, 0)
            rows_read = sum(cursor[0] for cursor in state["cursors"])
            rows_in_window = {tuple(id[:3]) for id in state["window"]}
            counters[ROWS_READ] += rows_read - len(rows_in_window)
        return counters | {"undecodable_rows": self.undecodable}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank's lanes, as a value that JSON can represent.

        `merge_states` merges the states of all ranks into one state for `load_state_dict`.
        """
        return {
            "step": self.step,
            "fingerprint": self.fingerprint,
            "undecodable": self.undecodable,
            "lanes": {str(lane): state for lane, state in self.states.items()},
        }

    @functools.cached_property
    def fingerprint(self) -> dict[str, Any]:
        """Everything that the samples and their order depend on.

        It is empty on all ranks except rank 0, because computing it reads data.
        """
        return fingerprint(self.reader) if self.assignment.rank == 0 else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the step at which `state` was saved. The number of ranks may have changed.

        Args:
            state: The result of `merge_states`.

        Raises:
            UserError: On rank 0, if the data has changed since the state was saved.
        """
        reader = with_saved_mix(self.reader, state["fingerprint"])
        if reader is not self.reader:
            self._use_equal_shares(reader)
        if self.fingerprint:
            check_fingerprint(state["fingerprint"], self.fingerprint)
        states: dict[int, dict[str, Any]] = {}
        for lane in self.assignment.local_lanes:
            packs = 0
            if str(lane) in state["lanes"]:
                states[lane] = state["lanes"][str(lane)]
                packs = states[lane]["counters"]["packs"]
            expected = self.assignment.taken_from(lane, state["step"])
            assert packs == expected, (
                f"lane {lane} is at pack {packs}, not {expected}: merge the states of all ranks with merge_states"
            )
        self.close()
        self.step = state["step"]
        self.states = states
        # The saved count is a sum over ranks, so only one rank continues from it.
        self.undecodable = state.get("undecodable", 0) if self.assignment.rank == 0 else 0

    def _use_equal_shares(self, reader: Reader) -> None:
        """Continue a run of an earlier version, in which sources without weights had equal shares.

        Args:
            reader: The data of the run, with equal weights.
        """
        self.reader = reader
        self.config = reader.config
        vars(self).pop("fingerprint", None)  # remove the cached fingerprint, because it contains the current shares
        if self.assignment.rank == 0:
            log.warning(
                "data.sources: sources without weights are now mixed in proportion to their numbers of rows. This run "
                "keeps the equal shares of its checkpoint."
            )

    def close(self) -> None:
        """End the workers. A later call of `next_step` starts new workers."""
        self.processes.end()
        self.iterator = None
        self.is_stopped = False


def build_loader(config: Config, tokenizer: PreTrainedTokenizerBase, rank: int, world: int, **media: Any) -> Loader:
    """Build the data loader of a rank.

    Args:
        config: The config of the run.
        tokenizer: Tokenizer of the model.
        rank: Global rank.
        world: World size.
        **media: Keyword arguments of `build_reader` that describe the media of the model, from `read_modalities`.

    Returns:
        A loader at the start of the data.

    Raises:
        UserError: If a source cannot be opened.
    """
    lanes = config.data.lanes
    if lanes % world and rank == 0:
        next_multiple = -(-lanes // world) * world
        log.warning(
            "data.lanes: %d is not a multiple of the %d ranks, so ranks prepare data that they do not use. Set it to "
            "%d to avoid this; the order of the data then changes.",
            lanes,
            world,
            next_multiple,
        )
    reader = build_reader(config, tokenizer, **media)
    assignment = LaneAssignment(
        rank=rank,
        world=world,
        lanes=lanes,
        sizes=config.train.step_sizes,
        by_samples=config.train.samples_per_step is not None,
    )
    return Loader(reader, assignment)


def merge_states(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge the loader states of all ranks into one state that any number of ranks can load.

    Args:
        states: `Loader.state_dict()` of every rank, in rank order and after the same step.

    Returns:
        A state for `Loader.load_state_dict`.
    """
    assert len({state["step"] for state in states}) == 1, "loader states of different steps"
    lanes: dict[str, Any] = {}
    for state in states:
        lanes |= state["lanes"]
    undecodable = sum(state["undecodable"] for state in states)
    return {**states[0], "undecodable": undecodable, "lanes": lanes}
