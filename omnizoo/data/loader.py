"""Lanes become the steps of one rank: the same packs at the same step for any number of ranks and loader workers.

Pack g of the run is the next one of lane g % lanes; step s holds packs s*G to (s+1)*G - 1 with G = train.global_batch;
data-parallel rank r gets those with g % dp_size == r. After a step every lane is exactly at the end of that step,
wherever it runs, so a state saved on one layout continues on any other.
"""

import dataclasses
import faulthandler
import itertools
import logging
import math
import os
import signal
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from transformers import PreTrainedTokenizerBase

from omnizoo.config.errors import UserError
from omnizoo.config.schema import Config
from omnizoo.data.lanes import Lane
from omnizoo.data.packing import Pack
from omnizoo.data.render import Renderer
from omnizoo.data.sources import RowSource, open_source

log = logging.getLogger(__name__)

IGNORE = -100  # the label of a position without a target, as torch's cross entropy has it


@dataclass(frozen=True)
class Batch:
    """One micro-batch: its packs one after the other, without padding (T = real tokens), samples kept apart.

    labels are already shifted: labels[0, t] is the token after t, or -100 where that is no target or another sample's.
    """

    input_ids: torch.Tensor  # [1, T] int64
    position_ids: torch.Tensor  # [1, T] int64, from 0 in every sample
    labels: torch.Tensor  # [1, T] int64
    pack_of_token: torch.Tensor  # [T] int64, which of `packs`
    cu_seqlens: torch.Tensor  # [samples + 1] int32, where samples begin
    max_seqlen: int
    sample_ids: list[str]  # source/epoch/row/part
    tokens: int
    targets: int  # labels that are not -100
    packs: tuple[int, ...]  # their numbers in the run

    def to(self, device: torch.device | str) -> "Batch":
        moved: dict[str, Any] = {k: v.to(device) for k, v in vars(self).items() if isinstance(v, torch.Tensor)}
        return dataclasses.replace(self, **moved)


@dataclass(frozen=True)
class Step:
    micro_batches: list[Batch]
    bad_rows: list[str]  # rows skipped while this step was made; each on one rank only


@dataclass(frozen=True)
class FlatPack:
    """A pack as it travels from a worker: few arrays, small types."""

    index: int
    ids: npt.NDArray[np.int32]
    labels: npt.NDArray[np.int32]
    lengths: list[int]
    sample_ids: list[str]


@dataclass(frozen=True)
class LaneStep:
    """What the lanes of one worker add to a step."""

    packs: list[FlatPack]
    states: dict[int, dict[str, Any]]  # of the lanes that moved
    bad_rows: list[str]


@dataclass(frozen=True)
class Failure:
    """A UserError on its way out of a worker; raised there, it would arrive wrapped in a traceback."""

    message: str


def flatten(index: int, pack: Pack) -> FlatPack:
    samples = pack.samples
    ids = np.concatenate([sample.ids for sample in samples])
    targets = np.concatenate([sample.targets for sample in samples])
    lengths = [len(sample.ids) for sample in samples]
    labels = np.full_like(ids, IGNORE)
    labels[:-1] = np.where(targets[1:], ids[1:], IGNORE)
    labels[np.cumsum(lengths) - 1] = IGNORE  # what follows a sample is another one's
    return FlatPack(index, ids, labels, lengths, [str(sample.id) for sample in samples])


def make_batch(packs: Sequence[FlatPack]) -> Batch:
    lengths = np.array([length for pack in packs for length in pack.lengths])
    ends = np.cumsum(lengths)
    ids, labels = (np.concatenate([getattr(pack, k) for pack in packs]).astype(np.int64) for k in ("ids", "labels"))
    positions = np.arange(len(ids)) - np.repeat(ends - lengths, lengths)
    return Batch(
        input_ids=torch.from_numpy(ids)[None],
        position_ids=torch.from_numpy(positions)[None],
        labels=torch.from_numpy(labels)[None],
        pack_of_token=torch.from_numpy(np.repeat(np.arange(len(packs)), [len(pack.ids) for pack in packs])),
        cu_seqlens=torch.from_numpy(np.concatenate(([0], ends)).astype(np.int32)),
        max_seqlen=int(lengths.max()),
        sample_ids=[id for pack in packs for id in pack.sample_ids],
        tokens=len(ids),
        targets=int((labels != IGNORE).sum()),
        packs=tuple(pack.index for pack in packs),
    )


def dummy_batch() -> Batch:
    """Keeps a rank in step with the others when it has no pack: computed, but counts nothing."""
    batch = make_batch([FlatPack(-1, np.zeros(2, np.int32), np.full(2, IGNORE, np.int32), [2], [])])
    return dataclasses.replace(batch, tokens=0, packs=())


@dataclass(frozen=True)
class Share:
    """Which lanes and packs are a rank's."""

    dp_rank: int
    dp_size: int
    lanes: int
    global_batch: int

    @property
    def own_lanes(self) -> list[int]:
        # a lane has a pack for a rank at some step exactly if both agree modulo the common divisor
        common = math.gcd(self.lanes, self.dp_size)
        return list(range(self.dp_rank % common, self.lanes, common))

    @property
    def counts(self) -> bool:
        """Of the ranks that run the same lanes, the lowest reports what happened in them."""
        return self.dp_rank < math.gcd(self.lanes, self.dp_size)

    def packs_of(self, lane: int, steps: int) -> int:
        """Packs a lane has given after that many steps."""
        return (steps * self.global_batch - lane + self.lanes - 1) // self.lanes


class LaneSteps(IterableDataset[LaneStep | Failure]):
    """Runs lanes step by step, from a state on: all those of the rank, or in a loader worker its part of them."""

    def __init__(
        self,
        config: Config,
        sources: list[RowSource],
        renderer: Renderer,
        share: Share,
        first_step: int,
        states: dict[int, dict[str, Any]],
    ) -> None:
        self.config, self.sources, self.renderer, self.share = config, sources, renderer, share
        self.first_step, self.states = first_step, states

    def __iter__(self) -> Iterator[LaneStep | Failure]:
        try:
            yield from self.run()
        except UserError as error:
            while True:  # whichever worker fails, the loader must find it at its turn
                yield Failure(str(error))

    def run(self) -> Iterator[LaneStep]:
        config, share, worker = self.config, self.share, get_worker_info()
        numbers = share.own_lanes if worker is None else share.own_lanes[worker.id :: worker.num_workers]
        lanes = {n: Lane(config.data, self.sources, self.renderer, config.train.seed, n) for n in numbers}
        for number, state in self.states.items():
            if number in lanes:
                lanes[number].restore(state)
        for step in itertools.count(self.first_step):
            packs, moved = [], set()
            for index in range(step * share.global_batch, (step + 1) * share.global_batch):
                if (lane := lanes.get(index % share.lanes)) is None:
                    continue
                pack = lane.next_pack()
                assert pack is not None, "a lane that is not read just once never ends"
                moved.add(lane.lane)
                if index % share.dp_size == share.dp_rank:
                    packs.append(flatten(index, pack))
            bad_rows = [message for n in sorted(moved) for message in lanes[n].take_bad_rows()]
            yield LaneStep(packs, {n: lanes[n].state() for n in sorted(moved)}, bad_rows)


def start_worker(worker: int) -> None:
    """Interrupts are the training loop's to handle; a worker ends when its loader or its parent process does."""
    parent = os.getppid()
    faulthandler.enable()  # a worker that crashes in native code says where
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def watch() -> None:
        # Python ends the workers of an exiting process by SIGTERM, so that one must be obeyed. A killed process sends
        # none: torch's own watchdog then ends the loop, but not the wait for someone to take what is queued.
        while os.getppid() == parent:
            received = signal.sigtimedwait({signal.SIGTERM}, 1)
            if received is not None and received.si_pid == parent:
                break
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


def identity(item: Any) -> Any:
    return item


class Loader:
    """`next_step()` for ever. `state_dict()` is of the last step handed out, however far workers are ahead."""

    def __init__(self, config: Config, sources: list[RowSource], renderer: Renderer, share: Share) -> None:
        self.config, self.sources, self.renderer, self.share = config, sources, renderer, share
        self.step = 0  # the next one
        self.states: dict[int, dict[str, Any]] = {}
        self.workers = min(config.data.workers, len(share.own_lanes))
        self.iterator: Iterator[LaneStep | Failure] | None = None

    def next_step(self) -> Step:
        if self.iterator is None:
            self.iterator = iter(self._start())
        # torch takes items from its workers in turn, so these are one of each: the whole step
        parts: list[LaneStep] = []
        for _ in range(max(1, self.workers)):
            item = next(self.iterator)
            if isinstance(item, Failure):
                self.close()
                raise UserError(item.message)
            parts.append(item)
        for part in parts:
            self.states |= part.states
        self.step += 1
        packs = sorted((pack for part in parts for pack in part.packs), key=lambda pack: pack.index)
        size = self.config.train.micro_batch
        batches = [make_batch(packs[first : first + size]) for first in range(0, len(packs), size)]
        return Step(batches, [message for part in parts for message in part.bad_rows] if self.share.counts else [])

    def _start(self) -> Iterable[LaneStep | Failure]:
        steps = LaneSteps(self.config, self.sources, self.renderer, self.share, self.step, self.states)
        if not self.workers:
            return steps
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # one process per worker is parallel enough
        return DataLoader(
            steps,
            batch_size=None,
            collate_fn=identity,
            num_workers=self.workers,
            prefetch_factor=self.config.data.prefetch,
            worker_init_fn=start_worker,
            multiprocessing_context="fork",  # indices of large files are shared, not built again
            generator=torch.Generator(),  # torch draws a seed for its workers: not from the run's own generator
        )

    def counters(self) -> dict[str, int]:
        """What became of rows so far. Sums over ranks are right: a lane is counted on one rank."""
        names = ("skipped_rows", "dropped_overlong", "split_overlong")
        states = self.states.values() if self.share.counts else ()
        return {name: sum(state["counters"][name] for state in states) for name in names}

    def state_dict(self) -> dict[str, Any]:
        """JSON-able. Of this rank's lanes: `merge_states` of all ranks is what `load_state_dict` takes."""
        lanes = {str(lane): state for lane, state in self.states.items()}
        return {"step": self.step, "fingerprint": fingerprint(self.config, self.sources), "lanes": lanes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        check_fingerprint(state["fingerprint"], fingerprint(self.config, self.sources))
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

    def close(self) -> None:
        """End the workers. The loader may go on: the next step starts new ones."""
        self.iterator = None


def build_loader(config: Config, tokenizer: PreTrainedTokenizerBase, dp_rank: int, dp_size: int) -> Loader:
    lanes, packs = config.data.lanes, config.train.global_batch
    if packs % dp_size:
        raise UserError(
            f"train.global_batch is {packs}, which {dp_size} data-parallel ranks cannot share evenly; "
            f"nearest that works: {max(dp_size, packs // dp_size * dp_size)} or {(packs // dp_size + 1) * dp_size}"
        )
    if lanes % dp_size and dp_rank == 0:
        log.warning(
            "data.lanes (%d) is not a multiple of the %d data-parallel ranks: ranks prepare data they do not use; "
            "%d lanes would avoid it, with another order of the data",
            *(lanes, dp_size, -(-lanes // dp_size) * dp_size),
        )
    sources = [open_source(spec) for spec in config.data.sources]
    return Loader(config, sources, Renderer(tokenizer, config.data.append_eos), Share(dp_rank, dp_size, lanes, packs))


def build_eval_batches(config: Config, tokenizer: PreTrainedTokenizerBase, dp_rank: int, dp_size: int) -> list[Batch]:
    """This rank's part of the first `train.eval_packs` packs of `data.eval_sources`, in file order and read at most
    once. All ranks get equally many batches.
    """
    if not config.data.eval_sources:
        return []
    data = config.data.model_copy(update={"sources": config.data.eval_sources, "lanes": 1, "shuffle": False})
    sources = [open_source(spec) for spec in data.sources]
    lane = Lane(data, sources, Renderer(tokenizer, data.append_eos), config.train.seed, 0, once=True)
    packs = [
        flatten(i, p) for i, p in enumerate(itertools.islice(iter(lane.next_pack, None), config.train.eval_packs)) if p
    ]
    if lane.bad_rows and dp_rank == 0:
        log.warning("skipped %d rows of data.eval_sources; the first: %s", len(lane.bad_rows), lane.bad_rows[0])
    if not packs:
        raise UserError(f"data.eval_sources ({', '.join(s.path for s in data.sources)}): no usable row")
    batches = [make_batch([pack]) for pack in packs[dp_rank::dp_size]]
    return batches + [dummy_batch()] * (-(-len(packs) // dp_size) - len(batches))


def merge_states(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The loader states of all ranks as one that any number of ranks can load."""
    assert len({state["step"] for state in states}) == 1, "loader states of different steps"
    return {**states[0], "lanes": {lane: value for state in states for lane, value in state["lanes"].items()}}


def fingerprint(config: Config, sources: Sequence[RowSource]) -> dict[str, Any]:
    """All that the order of the data depends on."""
    keys = ("lanes", "pack_tokens", "look_ahead", "overlong", "shuffle", "shuffle_rows", "append_eos")
    specs = [
        {**spec.model_dump(), "rows": len(source)} for spec, source in zip(config.data.sources, sources, strict=True)
    ]
    values = {f"data.{key}": getattr(config.data, key) for key in keys}
    return {
        **values,
        "train.seed": config.train.seed,
        "train.global_batch": config.train.global_batch,
        "sources": specs,
    }


def check_fingerprint(saved: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuse to continue on other data: samples would be lost or repeated without a word."""

    def refuse(key: str, before: Any, after: Any) -> None:
        raise UserError(
            f"{key} is {after!r}, but {before!r} in the checkpoint: its place in the data means nothing then; "
            "restore the old value, or start a new run"
        )

    for key in now.keys() - {"sources"}:
        if saved[key] != now[key]:
            refuse(key, saved[key], now[key])
    if len(saved["sources"]) != len(now["sources"]):
        refuse("the number of data.sources", len(saved["sources"]), len(now["sources"]))
    for i, (before, after) in enumerate(zip(saved["sources"], now["sources"], strict=True)):
        for key in ("weight", "split", "rows"):
            if before[key] != after[key]:
                refuse(f"data.sources[{i}].{key} ({after['path']})", before[key], after[key])
        if before["path"] != after["path"]:
            log.warning(
                "data.sources[%d] moved from %s to %s; taken to be the same rows", i, before["path"], after["path"]
            )
