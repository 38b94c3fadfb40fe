"""Run the real training step of a config as one rank of a simulated world, on a simulated device (a dry run)."""

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

from omnizoo.balancing.balancer import Balancer
from omnizoo.balancing.batch import Batch
from omnizoo.balancing.prefetch import next_step
from omnizoo.balancing.step_data import StepData
from omnizoo.checkpoint.resume import StartingPoint
from omnizoo.config.errors import UserError, named_line
from omnizoo.config.load import NO_DATA
from omnizoo.config.schema import Config
from omnizoo.config.sections.base import SubmoduleSettings
from omnizoo.config.sections.model import ModelSection
from omnizoo.data.loading.lane_stream import LoadedStep
from omnizoo.data.loading.loader import build_loader
from omnizoo.data.packing.pack import Pack
from omnizoo.data.token_fields import IGNORE_INDEX, make_columns
from omnizoo.modalities.build import BUILDING_ERRORS
from omnizoo.modalities.denoised import LATENTS
from omnizoo.modalities.item import Inputs, MediaItem, MediaSize, Port
from omnizoo.models.build import build_model, check_vocabulary
from omnizoo.models.chat_tokenizer import load_chat_tokenizer
from omnizoo.models.diffusion.samples import SampleSizes
from omnizoo.models.weights.random_init import initial_weights
from omnizoo.ops.torch_private import replaced
from omnizoo.parallel.fsdp.fill import fill
from omnizoo.parallel.mesh import build_mesh
from omnizoo.parallel.process import fake_process_group
from omnizoo.parallelize.memory import reshards, saved_bytes
from omnizoo.planning.devices import Device
from omnizoo.planning.fake_device import FakeDevice
from omnizoo.planning.host_syncs import Sync, passes_on, short_name
from omnizoo.planning.memory_tracker import MemoryTracker, Peak, Timeline
from omnizoo.planning.op_counter import Kernel
from omnizoo.planning.stand_ins import stand_ins
from omnizoo.planning.traffic import Collective, Traffic
from omnizoo.reporting.plural import plural
from omnizoo.training.denoising.objective import DenoiseObjective
from omnizoo.training.objective import LossTerm
from omnizoo.training.optimizers.schedule import learning_rate
from omnizoo.training.recompute_budget import apply_recompute_budget
from omnizoo.training.setup import TrainingSetup, build_bundle, resolve_precision, set_up_training
from omnizoo.training.step import train_step

NUM_READ_PACKS = 16  # number of packs that are read to find the costliest ones
MAX_MICRO_BATCHES = 3  # number of micro-batches to run at most: the first, the last, and one in place of all others


@dataclass(frozen=True)
class Place:
    """The simulated rank, world and device of a dry run."""

    world: int  # world size
    rank: int
    device: Device
    imbalance: float = 1.0  # rows received by this rank's experts / rows received with balanced routing
    rounded: bool = True  # whether sizes are rounded up, as allocators of accelerators do


@dataclass(frozen=True)
class Result:
    """Measurements of one step on one rank."""

    layout: str  # sizes of the mesh axes
    recompute: str  # description of the recomputed blocks
    host: int  # peak host memory of offloaded tensors, in bytes
    peak: Peak
    timeline: Timeline
    collectives: dict[Collective, tuple[int, int]]  # number of calls and bytes
    syncs: dict[Sync, int]  # number of host syncs
    kernels: dict[Kernel, tuple[int, int]]  # matmuls and attention of this rank: number of calls and FLOPs
    guessed: list[str]  # lines of code that read a value that only a real device could provide
    launched: int  # number of operators launched on the device
    moved: int  # bytes that operators other than matmuls and attention read and write
    attention: float  # FLOPs of attention on all ranks, forward and backward
    flops: float  # total FLOPs of all ranks
    parameters: int
    checkpoint: int  # size of a checkpoint on disk, in bytes
    tokens: int  # total number of tokens of all ranks
    micro_batches: int  # number of micro-batches of this rank
    data: str  # description of the packs
    seconds: float  # duration of the dry run


@dataclass(frozen=True)
class FixedPacks:
    """Replacement for the data loader that returns the same packs in every step."""

    packs: Sequence[Pack]
    description: str  # description of the packs, for the user

    def next_step(self) -> LoadedStep:
        """Return the packs of a step."""
        return LoadedStep(list(self.packs))

    def counters(self) -> dict[str, int]:
        """Return an empty dict, because no rows are skipped or split."""
        return {}


def simulate(config: Config, place: Place) -> Result:
    """Run two steps of `config` on a simulated device, and return the measurements of the second.

    The first step is not measured, because it starts without optimizer state.

    Args:
        config: The user's config.
        place: The simulated rank, world and device.

    Raises:
        UserError: If the config cannot be trained, or the model cannot run on the simulated device.
    """
    start_time = time.perf_counter()
    # Fake tensors cannot be compiled. Eager blocks keep at least as many activations as compiled ones.
    config = config.without_cache().changed(train={"compile": False})
    config = config.model_copy(update={"model": without_weights(config.model)})
    learning_rate(config.train, 1)
    fake_device = FakeDevice()
    tracker = MemoryTracker(fake_device.device, place.rounded)
    memory_bytes = int(place.device.memory_gb * 2**30)
    with ExitStack() as stack:
        process = stack.enter_context(fake_process_group(place.rank, place.world, fake_device.device))
        host = stack.enter_context(stand_ins(place.world, place.rank, place.imbalance))
        tracker.see_on_host = host.see
        config = resolve_precision(config, fake_device.device)
        mesh = build_mesh(config, process)
        bundle = replace(build_bundle(config, tokenizer_required=False), simulated="full")
        model = bundle.model
        parameters = sum(p.numel() for p in model.parameters())
        checkpoint = saved_bytes(model, config)
        tracker.vocabulary = vocabulary_of(model)
        media = bundle.media

        stack.enter_context(traced(fake_device))
        stack.enter_context(fake_device.running())
        stack.enter_context(tracker.watching())
        move_buffers(model, fake_device.device)
        reshard = reshards(model, config, memory_bytes)
        config = config.changed(parallel={"reshard_after_forward": reshard})
        bundle = replace(bundle, config=config)
        new_run = StartingPoint(run="", checkpoint=None)
        setup = set_up_training(bundle, mesh, new_run, fill=lambda sharded: fill_sizes(sharded, config))
        assert setup.optimizer is not None

        loader = choose_packs(config, model, setup.balancer, media)
        if isinstance(setup.objective, DenoiseObjective):
            stack.enter_context(simulated_samples(setup.objective))
        data = next_step(loader, setup.balancer)  # type: ignore[arg-type]  # it has all loader methods that are used
        recompute = apply_recompute_budget(setup.objective, data, None, memory_bytes)
        stack.enter_context(tracker.following(model, setup.optimizer))
        counters = run_steps(setup, data, fake_device, tracker, place.device.per_node)
        num_collectives, sent_bytes, syncs, calls, flops, launched, moved = counters
        return Result(
            layout=str(mesh.layout),
            recompute=recompute,
            host=host.peak,
            peak=tracker.peak(),
            timeline=tracker.timeline(),
            collectives={key: (num_collectives[key], sent_bytes[key]) for key in num_collectives},
            syncs=dict(syncs),
            kernels={kernel: (calls[kernel], flops[kernel]) for kernel in calls},
            guessed=sorted(fake_device.guessed),
            launched=launched.total(),
            moved=moved.total(),
            attention=sum(setup.balancer.pack_cost.attention(pack) for pack in loader.packs),
            flops=data.totals.flops,
            parameters=parameters,
            checkpoint=checkpoint,
            tokens=data.tokens,
            micro_batches=len(data.micro_batches),
            data=loader.description,
            seconds=time.perf_counter() - start_time,
        )


def run_steps(
    setup: TrainingSetup, data: StepData, device: FakeDevice, tracker: MemoryTracker, ranks_per_node: int
) -> list[Counter[Any]]:
    """Train two steps, and return the counters of the second one.

    At most `MAX_MICRO_BATCHES` micro-batches are run. The other micro-batches are omitted. For each of them, the counts
    of the second-to-last micro-batch that was run are added.

    Args:
        setup: The model, the optimizer and the losses.
        data: The packs of a step.
        device: Counts host syncs.
        tracker: Tracks memory, and counts operators and collectives.
        ranks_per_node: Number of ranks on a node.
    """
    assert setup.optimizer is not None
    terms = setup.objective.terms
    counters: list[Counter[Any]] = []  # counters of the current step
    snapshots: list[list[Counter[Any]]] = []  # copies of the counters before each micro-batch

    def terms_with_snapshot(batch: Batch) -> list[LossTerm]:
        """Copy the counters, then compute the losses.

        Hooks on the model would not work, because a loss may run the model several times in a micro-batch.
        """
        snapshots.append([Counter(counter) for counter in counters])
        return terms(batch)

    for step, num_micro_batches in ((1, 1), (2, MAX_MICRO_BATCHES)):
        device.syncs.clear()
        traffic = Traffic(setup.mesh, ranks_per_node)
        tracker.begin_step(traffic)
        work = tracker.work
        counters = [traffic.calls, traffic.bytes, device.syncs, work.calls, work.flops, work.launched, work.moved]
        with replaced((setup.objective, "terms", terms_with_snapshot)):
            first_micro_batches = replace(data, micro_batches=data.micro_batches[:num_micro_batches])
            train_step(setup.objective, setup.optimizer, first_micro_batches, step)
        tracker.end_step(setup.model)

    num_omitted = len(data.micro_batches) - MAX_MICRO_BATCHES
    if num_omitted <= 0:
        return counters
    *_, second_to_last, last = snapshots
    totals: list[Counter[Any]] = []
    for counter, before, after in zip(counters, second_to_last, last, strict=True):
        totals.append(Counter({key: counter[key] + num_omitted * (after[key] - before[key]) for key in counter}))
    return totals


def without_weights(model: ModelSection) -> ModelSection:
    """Return a copy of the model section that makes the build read only config.json, without weights."""

    def path_to_config(section: SubmoduleSettings | ModelSection) -> dict[str, Any]:
        return {"path": None, "config": section.path} if section.path else {}

    modalities = {}
    for name, modality in model.modalities.items():
        modules = {}
        for role, module in (("encoder", modality.encoder), ("decoder", modality.decoder)):
            if module is not None:
                modules[role] = module.model_copy(update=path_to_config(module))
        modalities[name] = modality.model_copy(update=modules)

    updates = path_to_config(model)
    updates["modalities"] = modalities
    if model.foundation is not None:
        updates["foundation"] = model.foundation.model_copy(update=path_to_config(model.foundation))
    return model.model_copy(update=updates)


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Move the buffers that a constructor computed on the host to `device`.

    FSDP would move them in place, but fake tensors do not support this.
    """
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            if not buffer.is_meta:
                setattr(module, name, buffer.to(device))


def fill_sizes(model: nn.Module, config: Config) -> None:
    """Fill saved integer buffers, such as strides, with their initial values, because shapes depend on them."""
    saved_names = set(model.state_dict())
    sizes = {name for name, buffer in model.named_buffers() if name in saved_names and not buffer.is_floating_point()}
    construct = partial(build_model, config.model, config.train.precision)
    fill(model, initial_weights(construct, config.train.seed, sizes))


def vocabulary_of(model: nn.Module) -> int:
    """Return the size of the vocabulary (the width of the logits); 0 if the model has no output embeddings."""
    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    weight = getattr(head, "weight", None)
    return 0 if weight is None else int(weight.shape[0])


def choose_packs(config: Config, model: nn.Module, balancer: Balancer, media: dict[str, Any]) -> FixedPacks:
    """Return the packs of a step: the costliest of the first packs of the data.

    They are repeated if the step has more packs. If no data can be read, each pack is `assumed_pack`.

    Args:
        config: The user's config.
        model: The model. It determines the vocabulary.
        balancer: Provides the cost of a pack and the number of ranks that load packs.
        media: Settings of the model for the data loader.
    """
    train, dp = config.train, balancer.mesh.layout.dp
    num_packs = train.samples_per_step or train.packs_per_step
    try:
        if config.data.sources[0].path == NO_DATA:
            raise UserError("data.sources is not set")
        packs = read_packs(config, model, media)
        packs.sort(key=lambda pack: -balancer.pack_cost.with_media(pack))
        if train.samples_per_step is not None:
            num_packs = -(-train.samples_per_step * len(packs) // sum(len(pack.lengths) for pack in packs))
        costliest = packs[: max(1, num_packs // dp)]
        description = f"the {len(costliest)} costliest of the first {len(packs)} packs of data.sources"
    except UserError as error:
        pack, content = assumed_pack(config, media)
        costliest = [pack]
        description = f"{content} per pack, because no data can be read: {error}"
    num_packs += -num_packs % (dp * train.micro_batch)  # only if steps are defined by samples
    step_packs = islice(cycle(costliest), num_packs)
    return FixedPacks([replace(pack, index=i) for i, pack in enumerate(step_packs)], description)


def assumed_pack(config: Config, media: dict[str, Any]) -> tuple[Pack, str]:
    """Return a pack to plan with if no data can be read, and its description.

    It consists of one text with `data.pack_tokens` tokens. For a diffusion transformer, it consists of samples of the
    largest shape in `data.shapes`.
    """
    tokens = config.data.pack_tokens
    sizes: SampleSizes | None = media.get("prompts")
    if sizes is None or not sizes.shapes:
        columns = make_columns(input_ids=np.zeros(tokens), labels=np.zeros(tokens))
        return Pack(0, columns, [tokens], ["text"]), f"one text of {tokens:,} tokens"

    latent_shape = max(sizes.shapes.values(), key=sizes.latent_tokens)
    num_latents = sizes.latent_tokens(latent_shape)
    text_tokens = sizes.text_tokens("")
    length = num_latents + text_tokens
    num_samples = tokens // length
    if not num_samples:
        raise UserError(f"data.pack_tokens: {tokens} is less than the {length} tokens of the largest shape. Raise it.")
    size = MediaSize(num_placeholders=num_latents, cost=1.0, targets=1, shape=latent_shape)
    item = MediaItem(Port(LATENTS, "decoder"), size, spans=((text_tokens, num_latents),), is_target=True, inputs={})
    lengths = [length] * num_samples
    columns = make_columns(input_ids=np.zeros(sum(lengths)), labels=np.full(sum(lengths), IGNORE_INDEX))
    pack = Pack(
        index=0,
        columns=columns,
        lengths=lengths,
        sample_ids=["sample"] * num_samples,
        items=tuple(item.moved(i * length) for i in range(num_samples)),
        batch_shape=(*latent_shape, text_tokens),
    )
    return pack, f"{plural(num_samples, 'sample')} of {length:,} tokens (the largest of data.shapes)"


@contextmanager
def simulated_samples(objective: DenoiseObjective) -> Iterator[None]:
    """Context manager: samples are zeros with the shapes of their pack, because one rank has only a part of them."""

    def zero_samples(batches: Sequence[Batch]) -> list[dict[int, Inputs]]:
        samples = []
        for batch in batches:
            indices = range(len(batch.sample_ids))
            samples.append({i: objective.sizes.zero_sample(batch.batch_shape) for i in indices})
        return samples

    with replaced((objective, "encode_samples", zero_samples)):
        yield


def read_packs(config: Config, model: nn.Module, media: dict[str, Any]) -> list[Pack]:
    """Return at most `NUM_READ_PACKS` packs from the start of the data, without dummy packs."""
    tokenizer: Any = None
    if "prompts" not in media:  # a diffusion transformer has no tokenizer of its own
        tokenizer = load_chat_tokenizer(config)
        check_vocabulary(model, tokenizer)
    one_step = config.with_packs_per_step(NUM_READ_PACKS).changed(
        train={"epochs": None}, data={"workers": 0, "lanes": 1}
    )
    loader = build_loader(one_step, tokenizer, 0, 1, **media)
    try:
        return [pack for pack in loader.next_step().packs if not pack.is_dummy]
    finally:
        loader.close()


@contextmanager
def traced(device: FakeDevice) -> Iterator[None]:
    """Context manager: turn an error on the simulated device into a `UserError` with the operator and the line."""
    try:
        yield
    except UserError:
        raise
    except BUILDING_ERRORS as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not passes_on(frame.filename)]
        line = short_name(frames[-1].filename, frames[-1].lineno or 0) if frames else "an unknown line"
        raise UserError(
            f"model: cannot be traced, because {device.operator} failed at {line}: {named_line(error)}"
        ) from error
