"""Lanes become steps: the same packs at the same step for any number of ranks and loader workers.

Pack g of the run is the next one of lane g % lanes; step s holds packs s*G to (s+1)*G - 1 with G = train.global_batch;
rank r reads those with g % world == r, and decodes their media (who trains on them is dealt out afterwards). After a
step every lane is exactly at the end of that step, wherever it runs, so a state saved on one layout continues on any
other.
"""

import faulthandler
import functools
import itertools
import logging
import math
import multiprocessing
import os
import re
import signal
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from transformers import PreTrainedTokenizerBase

from omnizoo.config.errors import UserError
from omnizoo.config.schema import Config, Source
from omnizoo.data.fingerprint import content_of, content_of_item, reading_of
from omnizoo.data.formats import Shape
from omnizoo.data.lanes import Counters, Lane
from omnizoo.data.packing import Pack, Sample
from omnizoo.data.render import Renderer
from omnizoo.data.rows import BadRow, RowSource
from omnizoo.data.sources import open_source
from omnizoo.modalities.base import Encoder, Item, Modality
from omnizoo.modalities.item import BadMedia
from omnizoo.models.build import tokenizer_folder
from omnizoo.models.media_model import Positions, Turns

log = logging.getLogger(__name__)

WORKER_DEATH = re.compile(r"DataLoader worker \(pid\S* .*?\) (?:is killed by signal: ([^.]*)|exited unexpectedly)")
SHAPED = ("format", "columns", "json_columns", "take")  # what a source says of how its rows are written
LOOKED_AT = 8  # rows, to tell the format of a source
ROWS_READ = "rows_read"  # a counter, without those that wait to be packed
OF_CHATS = "data.overlong of chats"
IGNORE = -100  # the label of a position without a target, as torch's cross entropy has it


@dataclass(frozen=True)
class FlatPack:
    """A pack as it travels: few arrays, small types. labels are already shifted: labels[t] is the token after t, or
    -100 where that is no target or another sample's."""

    index: int
    ids: npt.NDArray[np.int32]
    labels: npt.NDArray[np.int32]
    lengths: list[int]
    sample_ids: list[str]  # source/epoch/row/part, of preferences /role; none: a filler, which counts nowhere
    positions: npt.NDArray[Any] | None = None  # [R, T], of models with several positions per token
    items: tuple[Item, ...] = ()  # prepared
    weights: npt.NDArray[np.float32] | None = None  # [T] of the loss on each label; None: 1
    roles: Sequence[str] = ()  # of each sample, in preferences: what kind of answer it is; "": of none
    keys: Sequence[str] = ()  # of each sample, if asked for: a hash of its content; "": of what is no answer
    extra: Mapping[str, npt.NDArray[np.float64]] = field(default_factory=dict)  # by name: [T] numbers for each label


@dataclass(frozen=True)
class Step:
    packs: list[FlatPack]  # those this rank has read
    bad_rows: list[str]  # rows skipped while this step was made; each on one rank only


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


def flatten(index: int, pack: Pack, reader: "Reader") -> tuple[FlatPack, list[str]]:
    """Decode the media of a pack and lay its samples end to end; also, rows left out since their media are bad."""
    bad, kept = [], []
    for sample in pack.samples:
        try:
            kept.append((sample, [part for item in sample.items for part in reader.prepare(item)]))
        except BadMedia as reason:
            bad.append(f"{reader.sources[sample.id.source].where(sample.id.row)}: {reason}")
    if not kept:
        return filler(index), bad
    samples = [sample for sample, _ in kept]
    ids = np.concatenate([sample.ids for sample in samples])
    targets = np.concatenate([sample.targets for sample in samples])
    lengths = [length for sample in samples for length in sample.lengths]
    labels = np.full_like(ids, IGNORE)
    labels[:-1] = np.where(targets[1:], ids[1:], IGNORE)
    labels[np.cumsum(lengths) - 1] = IGNORE  # what follows a sample is another one's
    positions = [sample.positions for sample in samples if sample.positions is not None]
    items = [
        item.moved(start) for (_, prepared), start in zip(kept, _starts(samples), strict=True) for item in prepared
    ]
    weights = join_weights(samples)
    flat = FlatPack(
        index=index,
        ids=ids,
        labels=labels,
        lengths=lengths,
        sample_ids=[name for sample in samples for name in sample.names],
        positions=np.concatenate(positions, axis=1) if positions else None,
        items=tuple(items),
        weights=None if weights is None else np.append(weights[1:], np.float32(0)),  # shifted as labels are
        roles=[role for sample in samples for role in sample.roles] if any(s.answers for s in samples) else (),
        extra={name: np.append(numbers[1:], 0.0) for name, numbers in join_extra(samples).items()},
    )
    return replace(flat, keys=_keys(flat)) if reader.config.known_answers and flat.roles else flat, bad


def _keys(pack: FlatPack) -> list[str]:
    """Of all that the log-probability of an answer depends on but the model: tokens, targets, positions, media."""
    media = [content_of_item(item) for item in pack.items]
    keys, first = [], 0
    for role, length in zip(pack.roles, pack.lengths, strict=True):
        last = first + length
        digest = xxhash.xxh3_128(pack.ids[first:last].tobytes() + pack.labels[first:last].tobytes())
        if pack.positions is not None:
            digest.update(pack.positions[:, first:last].tobytes())
        for item, content in zip(pack.items, media, strict=True):
            digest.update(
                b"".join(
                    f"{at - first},{n};{content}{'!' * item.is_target}".encode()
                    for at, n in item.spans
                    if first <= at < last
                )
            )
        keys.append(digest.hexdigest() if role else "")
        first = last
    return keys


def _starts(samples: Sequence[Sample]) -> list[int]:
    """Where each begins among the tokens of all."""
    lengths = [len(sample.ids) for sample in samples]
    return list(itertools.accumulate(lengths[:-1], initial=0))


def join_weights(parts: Sequence[Sample] | Sequence[FlatPack]) -> npt.NDArray[np.float32] | None:
    """The weights of samples or packs end to end; None if none of them has any."""
    if all(part.weights is None for part in parts):
        return None
    return np.concatenate([np.ones(len(p.ids), np.float32) if p.weights is None else p.weights for p in parts])


def join_extra(parts: Sequence[Sample] | Sequence[FlatPack]) -> dict[str, npt.NDArray[np.float64]]:
    """The further numbers of samples or packs end to end, by name; 0 where one has none of that name."""
    names = sorted({name for part in parts for name in part.extra})
    return {name: np.concatenate([p.extra.get(name, np.zeros(len(p.ids))) for p in parts]) for name in names}


def filler(index: int) -> FlatPack:
    """Keeps a rank in step with the others when there is no pack for it: computed, but counts nothing."""
    return FlatPack(index, np.zeros(2, np.int32), np.full(2, IGNORE, np.int32), [2], [])


@dataclass(frozen=True)
class Reader:
    """Everything that turns rows into packs."""

    config: Config
    sources: Sequence[RowSource]
    renderer: Renderer
    modalities: Mapping[str, Modality]
    most_positions: int | None = None  # that the model was made for, if it says so

    def prepare(self, item: Item) -> list[Item]:
        """Decode an item; a long one may become several. In a bf16 run, floats for an encoder travel as it will get
        them, in half the bytes; what a decoder makes targets of keeps every digit."""
        module = item.port.module(self.modalities)
        inputs = module.prepare(item.media)
        if not isinstance(module, Encoder):
            return [replace(item, raw=None, inputs=inputs | item.notes, notes={})]
        if self.config.parallel.precision == "bf16":
            inputs = {name: t.to(torch.bfloat16) if t.is_floating_point() else t for name, t in inputs.items()}
        parts = module.parts(item.size, inputs)
        return item.cut(parts) if len(parts) > 1 else [replace(item, raw=None, inputs=inputs)]

    def format_of(self, source: int) -> tuple[str, str]:
        """What the first good one of the first rows of a source is taken as, and why."""
        rows = self.sources[source]
        for number in range(min(LOOKED_AT, len(rows))):
            try:
                found = self.renderer.format_of(rows.read(number), source)
            except BadRow:
                continue
            if found[0]:
                return found
        return "", ""

    def lane(self, number: int, epochs: float | None = None, patience: int = 0, by_rows: bool = False) -> Lane:
        config = self.config
        some = (number, epochs, patience, by_rows, config.mismatched_answers, self.most_positions)
        return Lane(config.data, self.sources, self.renderer, config.train.seed, *some)


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


def start_worker(worker: int) -> None:
    """Interrupts are the training loop's to handle; a worker ends when its loader or its parent process does."""
    parent = os.getppid()
    faulthandler.enable(2)  # a worker that crashes in native code says where; `sys.stderr` of notebooks is no file
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


def worker_death(error: BaseException) -> str | None:
    """How a loader worker died, if that is what `error` is about: torch raises it wherever the main thread is then.

    torch 2.13 says it in a RuntimeError: "DataLoader worker (pid 7) is killed by signal: Killed. "; where it notices
    later, "DataLoader worker (pid(s) 7) exited unexpectedly", with the first one as its cause.
    """
    seen: BaseException | None = error
    found = None
    while seen is not None:
        if isinstance(seen, RuntimeError) and (match := WORKER_DEATH.match(str(seen))):
            found = match[1] or found or ""
        seen = seen.__cause__ or seen.__context__
    if found is None:
        return None
    lighter = "use fewer data.workers, or a smaller data.prefetch, data.look_ahead or data.pack_tokens"
    if found == "Killed":
        return f"a loader worker was killed (SIGKILL), as the kernel does when memory runs out; {lighter}"
    if found == "Bus error":
        return f"a loader worker was out of shared memory (SIGBUS); make /dev/shm larger, or {lighter}"
    how = f"was killed by a signal ({found})" if found else "ended"
    return f"a loader worker {how} without a word; data.workers: 0 shows where, and if memory ran out, {lighter}"


MOST_WORKERS, CORES_PER_WORKER = 4, 4  # of a rank, where nobody has said how many


def worker_count(asked: int | None) -> int:
    """Loader processes of a rank, where nobody has said how many: enough to stay ahead of most models, and none where
    they would take the cores that compute, or where Python lets this process have none."""
    if asked is not None:
        return asked
    if multiprocessing.current_process().daemon:
        return 0
    cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return min(MOST_WORKERS, cores // CORES_PER_WORKER)


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
        self.iterator: Iterator[LaneStep | Failure] | None = None

    def start(self) -> None:
        """Start the workers now, in this thread: they are forked, which is no good while other threads are at work."""
        if self.iterator is None:
            self.iterator = iter(self._reading())

    def next_step(self) -> Step:
        self.start()
        assert self.iterator is not None
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
        undecodable = [message for part in parts for message in part.undecodable]
        self.undecodable += len(undecodable)
        bad_rows = [message for part in parts for message in part.bad_rows] if self.share.counts else []
        return Step(packs, bad_rows + undecodable)

    def _reading(self) -> Iterable[LaneStep | Failure]:
        _ = self.fingerprint  # of the data as it is now, before the run
        steps = LaneSteps(self.reader, self.share, self.step, self.states)
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


def build_reader(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    modalities: Mapping[str, Modality] | None = None,
    positions: Positions | None = None,
    turns: Turns | None = None,
    reserved: Sequence[int] = (),
    most_positions: int | None = None,
    sources: Sequence[RowSource] | None = None,
) -> Reader:
    """What the model says about content other than text (`read_modalities`): `modalities`, `positions` and `turns`, and
    ids that are `reserved` for media which nobody feeds. `most_positions`: longer samples are counted. `sources` take
    the place of those of the config."""
    known = modalities or {}
    place = "data.eval_sources" if config.data.sources is config.data.eval_sources else "data.sources"
    if sources is None:
        some = (config.data.media_outside, known, config.data.cache_dir)
        keys = [f"{place}.{i}" for i in range(len(config.data.sources))]
        sources = [open_source(spec, *some, key) for spec, key in zip(config.data.sources, keys, strict=True)]
    data = config.data
    shapes = [Shape(f"{place}.{i}", spec.format, spec.json_columns) for i, spec in enumerate(data.sources)]
    how = (data.ignore, reserved, config.preference_pairs, config.single_answers, shapes, config.learns_answers)
    renderer = Renderer(tokenizer, data.append_eos, known, positions, config.train.seed, *how, turns=turns)
    return Reader(config, sources, renderer, known, most_positions)


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


def held_out_config(config: Config) -> Config:
    """For a reader of `data.eval_sources`: in file order, in one stream."""
    data = config.data.model_copy(update={"sources": config.data.eval_sources, "lanes": 1, "shuffle": False})
    return config.model_copy(update={"data": data})


def held_out_parts(reader: Reader) -> dict[str, Reader]:
    """Of a reader of held-out data, one for each source by its short name: packs are of one source each, so that losses
    can be told apart. Each has its share of `train.eval_packs`. Of one source, and where answers of several rows are
    looked at together, all of it by an empty name."""
    config, specs = reader.config, reader.config.data.sources
    if len(specs) == 1 or config.mismatched_answers:
        return {"": reader}
    weight = sum(spec.weight for spec in specs)
    parts = {}
    for number, (name, spec) in enumerate(zip(short_names(specs), specs, strict=True)):
        packs = max(1, round(config.train.eval_packs * spec.weight / weight))
        data = config.data.model_copy(update={"sources": [spec]})
        train = config.train.model_copy(update={"eval_packs": packs})
        own = config.model_copy(update={"data": data, "train": train})
        renderer = copy(reader.renderer)
        renderer.shapes = [reader.renderer.shape(number)]
        parts[name] = replace(reader, config=own, sources=[reader.sources[number]], renderer=renderer)
    return parts


def short_names(specs: Sequence[Source]) -> list[str]:
    """What sources are called in the names of metrics: files without folder and suffix; the second of two alike has a
    number."""
    seen: dict[str, int] = {}
    names = []
    for spec in specs:
        name = re.sub(r"[^\w.-]", "_", spec.name.rstrip("/").rpartition("/")[2].rpartition(":")[2].partition(".")[0])
        seen[name] = seen.get(name, 0) + 1
        names.append(name if seen[name] == 1 else f"{name}_{seen[name]}")
    return names


def read_held_out(reader: Reader, rank: int, world: int) -> list[FlatPack]:
    """This rank's part of the first `train.eval_packs` packs of a reader of held-out data, read once."""
    data, lane = reader.config.data, reader.lane(0, epochs=1)
    packs, bad, read = [], [], 0
    for pack in itertools.islice(iter(lane.next_pack, None), reader.config.train.eval_packs):
        assert pack is not None
        if read % world == rank:
            flat, undecodable = flatten(read, pack, reader)
            packs.append(flat)
            bad += undecodable
        read += 1
    if rank == 0:
        bad = lane.bad_rows + bad
    if bad and data.on_bad_row == "error":
        raise UserError(f"data.eval_sources: {bad[0]} (data.on_bad_row: skip goes on without such rows)")
    if bad:
        log.warning("skipped %d rows of data.eval_sources; the first: %s", len(bad), bad[0])
    if not read:
        lost = lane.counters.dropped_overlong + lane.counters.few_targets
        why = f"; {lost} lost to data.pack_tokens ({data.pack_tokens}) or data.min_targets" if lost else ""
        raise UserError(f"data.eval_sources ({', '.join(s.name for s in data.sources)}): no usable row{why}")
    return packs


def merge_states(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The loader states of all ranks as one that any number of ranks can load."""
    assert len({state["step"] for state in states}) == 1, "loader states of different steps"
    undecodable = sum(state["undecodable"] for state in states)
    return {
        **states[0],
        "undecodable": undecodable,
        "lanes": {lane: value for state in states for lane, value in state["lanes"].items()},
    }


def fingerprint(reader: Reader) -> dict[str, Any]:
    config, sources = reader.config, reader.sources
    keys = ("lanes", "pack_tokens", "look_ahead", "shuffle", "shuffle_rows", "append_eos", "min_targets")
    specs = [
        {
            "path": spec.name,
            **{key: getattr(spec, key) for key in ("weight", "split", "media_dir")},
            **{key: value for key in SHAPED if (value := getattr(spec, key))},
            "rows": len(source),
            **content_of(source),
        }
        for spec, source in zip(config.data.sources, sources, strict=True)
    ]
    values = {f"data.{key}": getattr(config.data, key) for key in keys}
    overlong = config.data.overlong
    return {
        **values,
        "data.overlong": overlong or "split",
        OF_CHATS: overlong or "truncate",
        "train.epochs": config.train.epochs,
        "model.modalities": _reading(config),
        "train.seed": config.train.seed,
        "train.global_batch": config.train.global_batch,
        "what train.losses makes of preference pairs": config.preference_pairs.replace("refused", ""),
        "what train.losses makes of single answers": _single_answers(config),
        "model.tokenizer": reading_of(reader.renderer.tokenizer, tokenizer_folder(config.model)),
        "sources": specs,
    }


def _single_answers(config: Config) -> str:
    if config.mismatched_answers:
        return "each is also tried with another row's prompt"
    return "read" if config.single_answers else ""


def _reading(config: Config) -> dict[str, Any]:
    """What the tokens of an item depend on: its length, and what is written around it."""
    keys = ("kind", "path", "config", "options", "begin", "placeholder", "end")
    return {
        f"{name}/{role}": {key: part[key] for key in keys if key in part}
        for name, modality in config.model.model_dump(mode="json")["modalities"].items()
        for role, part in modality.items()
        if role in ("encoder", "projector", "decoder", "marks") and part
    }


def check_fingerprint(saved: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuse to continue on other data: samples would be lost, repeated or changed without a word."""

    def refuse(what: str) -> None:
        raise UserError(
            f"{what}: the checkpoint's place in the data means nothing then; restore it as it was, or start a new run "
            "from its weights (checkpoint.resume: weights:CHECKPOINT, with a log.dir of its own)"
        )

    def refuse_value(key: str, before: Any, after: Any) -> None:
        refuse(f"{key} is {after!r}, but {before!r} in the checkpoint")

    if OF_CHATS not in saved:
        log.warning("chats longer than a pack were cut into pieces before this checkpoint; now: %s", now[OF_CHATS])
        now = {key: value for key, value in now.items() if key != OF_CHATS}
    for key in sorted((saved.keys() | now.keys()) - {"sources", "model.tokenizer"}):
        if (saved.get(key) or None) != (now.get(key) or None):
            refuse_value(key, saved.get(key), now.get(key))
    before, after = saved["model.tokenizer"], now["model.tokenizer"]
    changed = [name for name in after if name != "library" and after[name] != before.get(name)]
    if changed == ["its definition"] and before["library"] != after["library"]:
        log.warning(
            "the tokenizer is written in another way than in the checkpoint, by tokenizers %s and then %s; its "
            "vocabulary is the same, and it is taken to cut texts as before",
            *(before["library"], after["library"]),
        )
    elif changed:
        refuse(f"model.tokenizer is another one than in the checkpoint ({', '.join(changed)} changed)")
    if len(saved["sources"]) != len(now["sources"]):
        refuse_value("the number of data.sources", len(saved["sources"]), len(now["sources"]))
    for i, (before, after) in enumerate(zip(saved["sources"], now["sources"], strict=True)):
        source = f"data.sources[{i}]"
        for key in ("weight", "split", *SHAPED, "rows", "bytes"):
            if before.get(key) != after.get(key):
                refuse_value(f"{source}.{key} ({after['path']})", before.get(key), after.get(key))
        for key, what in (("shape", "the lengths of its rows"), ("content", "its rows")):
            if before[key] != after[key]:
                refuse(f"{source} ({after['path']}) has changed since the checkpoint: {what} are other ones")
        if before["path"] != after["path"]:
            log.warning("%s moved from %s to %s; its content is the same", source, before["path"], after["path"])
        if before["media_dir"] != after["media_dir"]:
            log.warning(
                "%s.media_dir is %s, but %s in the checkpoint; taken to hold the same media",
                *(source, after["media_dir"], before["media_dir"]),
            )
