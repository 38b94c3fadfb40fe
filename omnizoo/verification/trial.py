"""Run a trial of one layout: train three steps of a scaled-down config, and record the values to compare."""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import cycle

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from omnizoo.balancing.batch import Batch
from omnizoo.balancing.prefetch import next_step
from omnizoo.checkpoint.resume import StartingPoint
from omnizoo.config.schema import Config
from omnizoo.ops.precision import keep_precision
from omnizoo.parallel.collective_counter import CollectiveCounter
from omnizoo.parallel.layout import Layout
from omnizoo.parallel.mesh import build_mesh
from omnizoo.parallel.process import Process
from omnizoo.parallel.sequence.slicing import slice_tokens
from omnizoo.parallelize.recompute import MODES, set_modes, switches
from omnizoo.training.objective import Objective
from omnizoo.training.setup import build_bundle, set_up_training
from omnizoo.training.step import train_step
from omnizoo.verification.bf16_check import watching


@dataclass(frozen=True)
class Trial:
    """Values of three steps that are compared between layouts."""

    losses: list[float]  # one per step
    losses_by_source: list[dict[str, float]]  # one per step; empty if there is only one source
    grad_norms: list[float]  # one per step
    tokens: list[int]  # one per step, over all ranks
    gradients: dict[str, torch.Tensor]  # full gradients of the first step; rank 0 only
    activations: dict[str, torch.Tensor]  # [tokens, width] for the run's first pack, in order of execution; rank 0 only
    executed: list[str]  # modules in the order in which their forward passes finish
    calls: dict[str, int]  # collectives of the last step, by kind
    bytes: dict[str, int]  # bytes of this rank's inputs to these collectives, by kind
    rounded: list[str] = field(default_factory=list)  # messages about inputs that lose precision; rank 0 only


def run_trial(config: Config, layout: Layout, process: Process) -> Trial:
    """Train the steps of `config` on `layout`, and record the values to compare.

    Collective: all ranks must call it.

    Args:
        config: The scaled-down config.
        layout: The layout. Its size must be the world size of `process`.
        process: This rank.
    """
    config = config.changed(parallel=asdict(layout))
    mesh = build_mesh(config, process)
    bundle = replace(build_bundle(config), simulated="small")
    loader = bundle.loader(mesh)
    setup = set_up_training(bundle, mesh, StartingPoint(run="", checkpoint=None))
    model, optimizer, objective = setup.model, setup.optimizer, setup.objective
    assert optimizer is not None
    # Cover all recompute modes, because a memory budget may choose any of them.
    set_modes(model, dict(zip(switches(model), cycle(MODES), strict=False)))

    losses: list[float] = []
    losses_by_source: list[dict[str, float]] = []
    grad_norms: list[float] = []
    tokens: list[int] = []
    counter = CollectiveCounter()
    for step in range(1, config.train.steps + 1):
        data = next_step(loader, setup.balancer)
        if step == 1:
            rounded: list[str] = []
            with watching(model, rounded):
                activations, executed = first_pack_activations(objective, data.micro_batches)
            all_rounded = itertools.chain.from_iterable(mesh.gather(rounded))
            rounded = list(dict.fromkeys(all_rounded))  # remove duplicates
            result = train_step(objective, optimizer, data, step)
            # Undo clipping. If the norm were wrong, every clipped gradient would differ and hide the cause.
            clip_factor = 1.0
            if config.train.grad_clip:
                clip_factor = min(1.0, config.train.grad_clip / (result.grad_norm + 1e-6))
            gradients = full_gradients(model, mesh.is_first)
            gradients = {name: grad / clip_factor for name, grad in gradients.items()}
        else:
            with CollectiveCounter() as counter:
                result = train_step(objective, optimizer, data, step)
        losses.append(result.loss)
        losses_by_source.append(result.by_source)
        grad_norms.append(result.grad_norm)
        tokens.append(data.tokens)
    return Trial(
        losses=losses,
        losses_by_source=losses_by_source,
        grad_norms=grad_norms,
        tokens=tokens,
        gradients=gradients,
        activations=activations,
        executed=executed,
        calls=dict(counter.calls),
        bytes=dict(counter.bytes),
        rounded=rounded,
    )


def full_gradients(model: nn.Module, keep: bool) -> dict[str, torch.Tensor]:
    """Return the full gradients on the CPU; an empty dict unless `keep`. Collective: all ranks must call it."""
    gradients = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        full_grad = grad.full_tensor() if isinstance(grad, DTensor) else grad
        if keep and full_grad is not None:
            gradients[name] = full_grad.to("cpu", copy=True)
    return gradients


@torch.no_grad()
def first_pack_activations(objective: Objective, batches: Sequence[Batch]) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Return the output of every module for the run's first pack, and the modules in the order in which they finish.

    Rank 0 concatenates the outputs of the ranks that share the pack. Collective: all ranks must call it.
    """
    mesh = objective.mesh
    has_first_pack = [0 in batch.packs for batch in batches]
    ranks_with_pack = mesh.sum([float(flag) for flag in has_first_pack])  # one count per micro-batch
    batch_index = int(max(range(len(batches)), key=ranks_with_pack.__getitem__))
    batch = batches[batch_index]
    local_outputs: dict[str, torch.Tensor] = {}
    # Run in eager mode, because hooks would be compiled into the graphs of the blocks.
    with (
        torch.compiler.set_stance("force_eager"),
        _recording(objective.model, local_outputs),
        keep_precision(objective.config.train.precision),
    ):
        objective.terms(batch)
    objective.router_stats.reset()

    layout = mesh.layout
    token_index = slice_tokens(batch.cu_seqlens.diff().tolist(), layout.ring, layout.ulysses)[mesh.sp_rank]
    message = (token_index, local_outputs, batch.tokens) if has_first_pack[batch_index] else None
    messages = [message for message in mesh.gather(message) if message is not None]
    outputs: dict[str, torch.Tensor] = {}
    if messages:
        num_tokens = messages[0][2]
        for name in local_outputs:
            shards = [(index, tensors[name]) for index, tensors, _ in messages if name in tensors]
            output = _merge_shards(shards, num_tokens)
            if output is not None:
                outputs[name] = output
    return outputs, list(local_outputs)


def _merge_shards(shards: Sequence[tuple[Sequence[int], torch.Tensor]], num_tokens: int) -> torch.Tensor | None:
    """Merge the outputs of a module on several ranks.

    Args:
        shards: For each rank, the positions of its tokens in the pack, and the output for these tokens.
        num_tokens: Number of tokens in the pack.

    Returns:
        The output `[num_tokens, width]`; None if the shards do not cover the pack. This happens for modules that turn
        media items into codes, because they run on some ranks only.
    """
    shards = [(index, tensor) for index, tensor in shards if len(tensor) == len(index) > 0]
    if sum(len(index) for index, _ in shards) != num_tokens:
        return None
    first = shards[0][1]
    output = torch.empty(num_tokens, first.shape[1], dtype=first.dtype)
    for index, tensor in shards:
        output[torch.as_tensor(index)] = tensor
    return output


@contextmanager
def _recording(model: nn.Module, outputs: dict[str, torch.Tensor]) -> Iterator[None]:
    """Context manager: store the first output of every submodule in `outputs`, as `[rows, width]` on the CPU."""

    def record(name: str, module: nn.Module, inputs: object, output: object) -> None:
        output = output[0] if isinstance(output, tuple) else output
        if isinstance(output, torch.Tensor) and output.ndim >= 2 and output.is_floating_point():
            rows = output.detach().reshape(-1, output.shape[-1])
            outputs.setdefault(name, rows.to("cpu", copy=True))

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if name:
                hooks.enter_context(module.register_forward_hook(partial(record, name)))
        yield
