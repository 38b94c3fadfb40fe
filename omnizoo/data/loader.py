"""Lanes become steps: the same packs at the same step for any number of ranks and loader workers.

Pack g of the run is the next one of lane g % lanes; step s holds packs s*G to (s+1)*G - 1 with G = train.global_batch;
rank r reads those with g % world == r, and decodes their media (who trains on them is dealt out afterwards). After a
step every lane is exactly at the end of that step, wherever it runs, so a state saved on one layout continues on any
other.
"""

import functools
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset
from transformers import PreTrainedTokenizerBase

from omnizoo.config.doors import CODE_ERRORS
from omnizoo.config.errors import UserError, named_line
from omnizoo.config.schema import Config
from omnizoo.data.flat_pack import FlatPack
from omnizoo.data.handover import Handover, NotPicklable
from omnizoo.data.lane_steps import Failure, LaneStep, LaneSteps, Share
from omnizoo.data.lanes import Counters
from omnizoo.data.reader import Reader, build_reader
from omnizoo.data.same_data import check_fingerprint, fingerprint
from omnizoo.data.workers import Surroundings, Workers, start_server, worker_count
from omnizoo.modalities.base import Modality
from omnizoo.models.media_model import Positions, Turns

log = logging.getLogger(__name__)
ROWS_READ = "rows_read"  # a counter, without those that wait to be packed
AT_HOME = "data.workers: 0 reads without other processes"


@dataclass(frozen=True)
class Step:
    packs: list[FlatPack]  # those this rank has read
    bad_rows: list[str]  # rows skipped while this step was made; each on one rank only


class HandedOver(IterableDataset[LaneStep | Failure]):
    """Lanes on their way to a worker. They are made there only when they are to run: a mistake is then told as one."""

    def __init__(self, steps: LaneSteps) -> None:
        self.steps = Handover(steps)

    def __iter__(self) -> Iterator[LaneStep | Failure]:
        try:
            steps: LaneSteps = self.steps.open()
        except (UserError, *CODE_ERRORS) as error:
            while True:  # whichever worker fails, the loader must find it at its turn
                yield Failure(f"data.workers: a worker cannot make what it reads with: {named_line(error)}; {AT_HOME}")
        yield from steps


def identity(item: Any) -> Any:
    return item


class Loader:
    """`next_step()` for ever. `state_dict()` is of the last step handed out, however far workers are ahead."""

    def __init__(self, reader: Reader, share: Share) -> None:
        self.reader, self.config, self.share = reader, reader.config, share
        self.step = 0  # the next one
        self.undecodable = 0  # rows left out after packing, on this rank
        self.states: dict[int, dict[str, Any]] = {}
        self.workers = min(worker_count(self.config.data.workers), len(share.own_lanes))
        if self.workers:
            start_server()
        self.iterator: Iterator[LaneStep | Failure] | None = None
        self.processes = Workers()

    def start(self) -> None:
        """Start the workers now, so that they read while others get ready."""
        if self.iterator is None:
            self.iterator = iter(self._reading())

    def next_step(self) -> Step:
        self.start()
        assert self.iterator is not None
        # torch takes items from its workers in turn, so these are one of each: the whole step
        parts: list[LaneStep] = []
        for _ in range(max(1, self.workers)):
            item = self._next()
            if isinstance(item, Failure):
                self.close()
                raise UserError(item.message)
            parts.append(item)
        for part in parts:
            self.states |= part.states
        self.step += 1
        packs = sorted((pack for part in parts for pack in part.packs), key=lambda pack: pack.index)
        undecodable = [message for part in parts for message in part.undecodable]
        self.undecodable += len(undecodable)
        bad_rows = [message for part in parts for message in part.bad_rows] if self.share.counts else []
        return Step(packs, bad_rows + undecodable)

    def _next(self) -> LaneStep | Failure:
        assert self.iterator is not None
        try:
            return next(self.iterator)
        except RuntimeError as error:  # of torch, once it has waited for a worker that is gone
            raise self.processes.death() or error from error

    def _reading(self) -> Iterable[LaneStep | Failure]:
        _ = self.fingerprint  # of the data as it is now, before the run
        steps = LaneSteps(self.reader, self.share, self.step, self.states)
        if not self.workers:
            return steps
        try:
            handed_over = HandedOver(steps)
        except NotPicklable as reason:
            log.warning("data.workers: 0 instead of %d: other processes cannot be given %s", self.workers, reason)
            self.workers = 0
            return steps
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # one process per worker is parallel enough
        self.processes = Workers()
        return DataLoader(
            handed_over,
            batch_size=None,
            collate_fn=identity,
            num_workers=self.workers,
            prefetch_factor=self.config.data.prefetch,
            worker_init_fn=Surroundings.here().start,
            multiprocessing_context=self.processes,
            generator=torch.Generator(),  # torch draws a seed for its workers: not from the run's own generator
        )

    def counters(self) -> dict[str, int]:
        """What became of rows so far. Sums over ranks are right: a lane is counted on one rank."""
        names = [item.name for item in fields(Counters) if item.name != "packs"]
        states = list(self.states.values()) if self.share.counts else []
        counters = {name: sum(state["counters"].get(name, 0) for state in states) for name in names}
        drawn = sum(drawn for state in states for drawn, *_ in state["cursors"])
        counters[ROWS_READ] = drawn - sum(len({tuple(id[:3]) for id in state["window"]}) for state in states)
        return counters | {"undecodable_rows": self.undecodable}

    def state_dict(self) -> dict[str, Any]:
        """JSON-able. Of this rank's lanes: `merge_states` of all ranks is what `load_state_dict` takes."""
        lanes = {str(lane): state for lane, state in self.states.items()}
        own = {"undecodable": self.undecodable, "lanes": lanes}
        return {"step": self.step, "fingerprint": self.fingerprint} | own

    @functools.cached_property
    def fingerprint(self) -> dict[str, Any]:
        """All that the order of the data depends on. On the first rank, which alone reads data for it; else empty."""
        return fingerprint(self.reader) if self.share.rank == 0 else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.fingerprint:
            check_fingerprint(state["fingerprint"], self.fingerprint)
        own = {lane: state["lanes"][str(lane)] for lane in self.share.own_lanes if str(lane) in state["lanes"]}
        for lane in self.share.own_lanes:
            packs, expected = (
                own[lane]["counters"]["packs"] if lane in own else 0,
                self.share.packs_of(lane, state["step"]),
            )
            assert packs == expected, (
                f"lane {lane} is at pack {packs}, not {expected}: was the state merged of all ranks?"
            )
        self.close()
        self.step, self.states = state["step"], own
        self.undecodable = state.get("undecodable", 0) if self.share.rank == 0 else 0  # sums over ranks are what counts

    def close(self) -> None:
        """End the workers. The loader may go on: the next step starts new ones."""
        self.iterator = None


def build_loader(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    rank: int,
    world: int,
    modalities: Mapping[str, Modality] | None = None,
    positions: Positions | None = None,
    turns: Turns | None = None,
    reserved: Sequence[int] = (),
    most_positions: int | None = None,
) -> Loader:
    lanes = config.data.lanes
    if lanes % world and rank == 0:
        log.warning(
            "data.lanes (%d) is not a multiple of the %d ranks: ranks prepare data they do not use; %d lanes would "
            "avoid it, with another order of the data",
            *(lanes, world, -(-lanes // world) * world),
        )
    reader = build_reader(config, tokenizer, modalities, positions, turns, reserved, most_positions)
    return Loader(reader, Share(rank, world, lanes, config.train.global_batch))


def merge_states(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The loader states of all ranks as one that any number of ranks can load."""
    assert len({state["step"] for state in states}) == 1, "loader states of different steps"
    undecodable = sum(state["undecodable"] for state in states)
    return {
        **states[0],
        "undecodable": undecodable,
        "lanes": {lane: value for state in states for lane, value in state["lanes"].items()},
    }
