"""The real training step of a config, for one rank of many, on a device that is not there."""

import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from omnizoo.assembly.entrance import read_modalities
from omnizoo.assembly.parallelize import parallelize, reshards
from omnizoo.assembly.parts import saved_bytes
from omnizoo.config.errors import UserError, named_line
from omnizoo.config.load import NO_DATA
from omnizoo.config.model_section import Model
from omnizoo.config.schema import Config
from omnizoo.config.section import Part
from omnizoo.data.deal import Batch
from omnizoo.data.flat_pack import IGNORE, FlatPack
from omnizoo.data.loader import Step, build_loader
from omnizoo.models.build import build_model, check_vocabulary, load_tokenizer
from omnizoo.models.initial import initial_weights
from omnizoo.parallel.mesh import build_mesh
from omnizoo.parallel.process import pretended_group
from omnizoo.parallel.shard import fill
from omnizoo.planning.backend import PretendedDevice, Sync, replaced, short_name
from omnizoo.planning.devices import Device
from omnizoo.planning.kernels import stand_ins
from omnizoo.planning.ledger import Ledger, Peak, Timeline
from omnizoo.planning.traffic import Collective, Traffic
from omnizoo.planning.work import Kernel
from omnizoo.training.losses import LossTerm, Objective
from omnizoo.training.optimizer import build_optimizer
from omnizoo.training.probe import FAILURES
from omnizoo.training.recompute_budget import settle
from omnizoo.training.run import on_device
from omnizoo.training.schedule import learning_rate
from omnizoo.training.step import next_step, train_step

LOOKED_AT = 16  # packs that are read to find the worst of
MOST_RUN = 3  # micro-batches: the first, the last, and one for all between them, which are alike


@dataclass(frozen=True)
class Place:
    """Which rank is looked at, of how many, on what."""

    world: int
    rank: int
    device: Device
    imbalance: float = 1.0  # rows that arrive at this rank's experts / its even share
    rounded: bool = True  # count memory in blocks, as allocators of accelerators do


@dataclass(frozen=True)
class Result:
    """One step of one rank."""

    layout: str
    recompute: str  # which blocks
    host: int  # bytes on the host at the most
    peak: Peak
    timeline: Timeline
    collectives: dict[Collective, tuple[int, int]]  # calls, bytes
    syncs: dict[Sync, int]
    kernels: dict[Kernel, tuple[int, int]]  # matmuls and attention of this rank: calls, FLOPs
    guessed: list[str]  # places that read a value which only a real device knows
    launched: int  # operators that the host starts on the device
    moved: int  # bytes that operators besides matmuls and attention read and write
    attention: float  # FLOPs of all ranks in attention, forward and backward
    flops: float  # of all ranks
    parameters: int
    checkpoint: int  # bytes that one takes on disk
    tokens: int  # of all ranks
    micro_batches: int
    data: str  # where the packs are from
    seconds: float


@dataclass(frozen=True)
class Drawn:
    """In the place of a loader: the packs of one step, again and again."""

    packs: Sequence[FlatPack]
    said: str

    def next_step(self) -> Step:
        return Step(list(self.packs), [])

    def counters(self) -> dict[str, int]:
        return {}


def simulate(config: Config, place: Place) -> Result:
    """Two steps of `config`, of which the second is reported: the first has no state of the optimizer yet."""
    started = time.perf_counter()
    # Graphs cannot be made of what is not there: blocks run without, and keep no less than graphs would.
    train = config.train.model_copy(update={"compile": False})
    config = config.without_cache().model_copy(update={"model": without_weights(config.model), "train": train})
    learning_rate(config.train, 1)
    pretended = PretendedDevice()
    ledger = Ledger(pretended.device, place.rounded)
    with ExitStack() as stack:
        process = stack.enter_context(pretended_group(place.rank, place.world, pretended.device))
        host = stack.enter_context(stand_ins(place.world, place.rank, place.imbalance))
        ledger.see_on_host = host.see
        config = on_device(config, pretended.device)
        mesh = build_mesh(config, process)
        model = build_model(config.model, config.parallel.precision)
        parameters = sum(p.numel() for p in model.parameters())
        checkpoint = saved_bytes(model, config)
        ledger.vocabulary = vocabulary_of(model)
        media = read_modalities(model, config.model)
        stack.enter_context(traced(pretended))
        stack.enter_context(pretended.running())
        stack.enter_context(ledger.watching())
        move_buffers(model, pretended.device)
        reshard = reshards(model, config, int(place.device.memory_gb * 2**30))
        parallel = config.parallel.model_copy(update={"reshard_after_forward": reshard})
        config = config.model_copy(update={"parallel": parallel})
        parallelize(model, mesh, config, load=False)
        fill_sizes(model, config)
        optimizer = build_optimizer(model, config)
        model.train()
        objective = Objective(model, mesh, config)
        drawn = draw(config, model, objective, media)
        data = next_step(drawn, objective)  # type: ignore[arg-type]  # all that is asked of a loader
        several = len(data.micro_batches)
        recompute = settle(objective, data, None, int(place.device.memory_gb * 2**30))
        stack.enter_context(ledger.following(model, optimizer))
        periods = Periods(several)
        for step, most in ((1, 1), (2, MOST_RUN)):
            pretended.syncs.clear()
            traffic = Traffic(mesh, place.device.per_node)
            ledger.begin_step(traffic)
            work = ledger.work
            counted = (traffic.count, traffic.sent, pretended.syncs, work.calls, work.flops, work.launched, work.moved)
            with periods.watching(objective, *counted):
                train_step(objective, optimizer, replace(data, micro_batches=data.micro_batches[:most]), step)
            ledger.end_step(model)
        count, sent, syncs, calls, flops, launched, moved = periods.totals()
        return Result(
            layout=str(mesh.layout),
            recompute=recompute,
            host=host.peak,
            peak=ledger.peak(),
            timeline=ledger.timeline(),
            collectives={one: (count[one], sent[one]) for one in count},
            syncs=dict(syncs),
            kernels={kernel: (calls[kernel], flops[kernel]) for kernel in calls},
            guessed=sorted(pretended.guessed),
            launched=launched.total(),
            moved=moved.total(),
            attention=attention_of(objective, drawn.packs),
            flops=data.totals.flops,
            parameters=parameters,
            checkpoint=checkpoint,
            tokens=data.tokens,
            micro_batches=several,
            data=drawn.said,
            seconds=time.perf_counter() - started,
        )


class Periods:
    """Counts of a step of which only the first micro-batches are run: the one before the last is for all left out."""

    def __init__(self, micro_batches: int) -> None:
        self.left_out = max(0, micro_batches - MOST_RUN)
        self._counters: tuple[Counter[Any], ...] = ()
        self._starts: list[list[Counter[Any]]] = []

    @contextmanager
    def watching(self, objective: Objective, *counters: Counter[Any]) -> Iterator[None]:
        """A loss may have the model run several times in a micro-batch, so it is not the model that is watched."""
        self._counters, self._starts, terms = counters, [], objective.terms

        def watched(batch: Batch) -> list[LossTerm]:
            self._starts.append([Counter(c) for c in self._counters])
            return terms(batch)

        with replaced((objective, "terms", watched)):
            yield

    def totals(self) -> list[Counter[Any]]:
        if not self.left_out:
            return list(self._counters)
        *_, before, after = self._starts
        return [
            Counter({key: total[key] + self.left_out * (b[key] - a[key]) for key in total})
            for total, a, b in zip(self._counters, before, after, strict=True)
        ]


def without_weights(model: Model) -> Model:
    """The same model, of which only config.json is read."""

    def changed(part: Part | Model) -> dict[str, Any]:
        return {"path": None, "config": part.path} if part.path else {}

    updates = changed(model)
    if model.foundation is not None:
        updates["foundation"] = model.foundation.model_copy(update=changed(model.foundation))
    updates["modalities"] = {
        name: modality.model_copy(
            update={
                role: part.model_copy(update=changed(part))
                for role, part in (("encoder", modality.encoder), ("decoder", modality.decoder))
                if part is not None
            }
        )
        for name, modality in model.modalities.items()
    }
    return model.model_copy(update=updates)


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Those that a constructor computed on the host: FSDP would move them in place, which fake tensors do not take."""
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            if not buffer.is_meta:
                setattr(module, name, buffer.to(device))


def fill_sizes(model: nn.Module, config: Config) -> None:
    """Whole numbers that a model keeps as buffers, such as strides, are sizes: they get their values."""
    saved = set(model.state_dict())
    sizes = {name for name, buffer in model.named_buffers() if name in saved and not buffer.is_floating_point()}
    construct = partial(build_model, config.model, config.parallel.precision)
    fill(model, initial_weights(construct, config.train.seed, sizes))


def vocabulary_of(model: nn.Module) -> int:
    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    weight = getattr(head, "weight", None)
    return 0 if weight is None else int(weight.shape[0])


def draw(config: Config, model: nn.Module, objective: Objective, media: dict[str, Any]) -> Drawn:
    """The packs of a step: the costliest of the first ones that the config's data give, or text of `pack_tokens`."""
    count = config.train.global_batch
    each = count // objective.mesh.layout.dp
    try:
        if config.data.sources[0].path == NO_DATA:
            raise UserError("the config has no data.sources")
        packs = read_packs(config, model, media)
        packs.sort(key=lambda pack: -cost_of(pack, objective))
        worst = packs[:each]
        said = f"the {len(worst)} costliest of the first {len(packs)} packs of data.sources"
    except UserError as error:
        tokens = config.data.pack_tokens
        ids = np.zeros(tokens, np.int32)
        worst = [FlatPack(0, ids, ids, [tokens], ["text"])]
        said = f"one text of {tokens:,} tokens per pack, since no data can be read: {error}"
    filled = [replace(pack, index=i) for i, pack in enumerate(islice(cycle(worst), count))]
    return Drawn(filled, said)


def read_packs(config: Config, model: nn.Module, media: dict[str, Any]) -> list[FlatPack]:
    tokenizer = load_tokenizer(config.model)
    check_vocabulary(model, tokenizer)
    train = config.train.model_copy(update={"global_batch": LOOKED_AT, "epochs": None})
    data = config.data.model_copy(update={"workers": 0, "lanes": 1})
    loader = build_loader(config.model_copy(update={"train": train, "data": data}), tokenizer, 0, 1, **media)
    try:
        return [pack for pack in loader.next_step().packs if pack.sample_ids]
    finally:
        loader.close()


def cost_of(pack: FlatPack, objective: Objective) -> float:
    labels = int((pack.labels != IGNORE).sum())
    ahead = objective.ahead(pack.items)
    return objective.flops.of(pack.lengths, labels, {}, {}, ahead) + sum(item.size.cost for item in pack.items)


def attention_of(objective: Objective, packs: Sequence[FlatPack]) -> float:
    """FLOPs of the language model's attention on these packs, and of nothing else."""
    pairs = replace(objective.flops, per_token=0.0, per_target=0.0)
    return sum(pairs.of(pack.lengths, 0, {}, {}, objective.ahead(pack.items)) for pack in packs)


@contextmanager
def traced(device: PretendedDevice) -> Iterator[None]:
    """An operator that cannot run without values is the user's to know, by its name and the line that calls it."""
    try:
        yield
    except UserError:
        raise
    except FAILURES as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_users(frame.filename)]
        at = short_name(frames[-1].filename, frames[-1].lineno or 0) if frames else "an unknown line"
        raise UserError(f"model: cannot be traced: {device.operator} at {at}: {named_line(error)}") from error


def is_users(file: str) -> bool:
    return not any(part in file for part in ("/torch/", "/omnizoo/planning/", "/parallel/collectives.py", "<"))
