"""One layout on trial: three optimizer steps of a shrunken config, and all that can be compared about them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from omnizoo.assembly.assemble import assemble
from omnizoo.assembly.parallelize import parallelize
from omnizoo.assembly.recompute import MODES, set_modes, switches
from omnizoo.config.schema import Config
from omnizoo.data.deal import Batch
from omnizoo.ops.precision import exact
from omnizoo.parallel.collectives import CollectiveCounter
from omnizoo.parallel.layout import Layout
from omnizoo.parallel.mesh import build_mesh
from omnizoo.parallel.process import Process
from omnizoo.parallel.sequence import slice_tokens
from omnizoo.training.losses import Objective
from omnizoo.training.optimizer import build_optimizer
from omnizoo.training.step import next_step, train_step
from omnizoo.verification.rounding import watching


@dataclass(frozen=True)
class Trial:
    losses: list[float]
    grad_norms: list[float]
    tokens: list[int]
    gradients: dict[str, torch.Tensor]  # whole, of the first step; on the first rank only
    activations: dict[str, torch.Tensor]  # [T, width] of the run's first pack, in order of execution; first rank only
    executed: list[str]  # modules in the order they finish
    calls: dict[str, int]  # collectives of the last step on the first rank
    bytes: dict[str, int]
    rounded: list[str] = field(default_factory=list)  # floats that lose digits on their way into the model; first rank


def run_trial(config: Config, layout: Layout, process: Process) -> Trial:
    """Train three steps of `config` on `layout`, which must fill the world of `process`."""
    axes = {axis: getattr(layout, axis) for axis in ("dp_replicate", "dp_shard", "ulysses", "ring", "ep")}
    config = config.model_copy(update={"parallel": config.parallel.model_copy(update=axes)})
    mesh = build_mesh(config, process)
    assembled = assemble(config)
    model, loader = assembled.model, assembled.loader(mesh)
    parallelize(model, mesh, config)
    set_modes(model, dict(zip(switches(model), cycle(MODES), strict=False)))  # a budget may choose any of them
    optimizer = build_optimizer(model, config)
    objective = Objective(model, mesh, config)
    model.train()

    losses, norms, tokens = [], [], []
    counter = CollectiveCounter()
    for step in range(1, config.train.steps + 1):
        data = next_step(loader, objective)
        if step == 1:
            rounded: list[str] = []
            with watching(model, rounded):
                activations, executed = first_pack_activations(objective, data.micro_batches)
            rounded = list(dict.fromkeys(note for notes in mesh.gather(rounded) for note in notes))
            result = train_step(objective, optimizer, data, step)
            # Clipping is undone: a norm that is off would show in every gradient, and hide where it comes from.
            clipped = min(1.0, config.train.grad_clip / (result.grad_norm + 1e-6)) if config.train.grad_clip else 1.0
            gradients = {name: grad / clipped for name, grad in whole_gradients(model, mesh.is_first).items()}
        else:
            with CollectiveCounter() as counter:
                result = train_step(objective, optimizer, data, step)
        losses.append(result.loss)
        norms.append(result.grad_norm)
        tokens.append(data.tokens)
    sent = dict(counter.calls), dict(counter.bytes)
    return Trial(losses, norms, tokens, gradients, activations, executed, *sent, rounded)


def whole_gradients(model: nn.Module, keep: bool) -> dict[str, torch.Tensor]:
    """Gradients as one process would have them; every rank must call."""
    gradients = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
        if keep and whole is not None:
            gradients[name] = whole.to("cpu", copy=True)
    return gradients


@torch.no_grad()
def first_pack_activations(objective: Objective, batches: Sequence[Batch]) -> tuple[dict[str, torch.Tensor], list[str]]:
    """What every module gives for the run's first pack, put together from the ranks that share it; and their order."""
    mesh = objective.mesh
    held = [0 in batch.packs for batch in batches]
    number = int(max(range(len(held)), key=mesh.sum([float(here) for here in held]).__getitem__))
    batch = batches[number]
    own: dict[str, torch.Tensor] = {}
    # Hooks would be compiled into the graphs: what blocks compute is looked at without them.
    with (
        torch.compiler.set_stance("force_eager"),
        _recording(objective.model, own),
        exact(objective.config.parallel.precision),
    ):
        objective.terms(batch)
    objective.take_statistics()
    layout = mesh.layout
    index = slice_tokens(batch.cu_seqlens.diff().tolist(), layout.ring, layout.ulysses)[mesh.sp_rank]
    parts = mesh.gather((index, own, batch.tokens) if held[number] else None)
    parts = [part for part in parts if part is not None]
    whole: dict[str, torch.Tensor] = {}
    for name in own if parts else ():
        tokens = parts[0][2]
        # What makes codes of items may run on some ranks only.
        rows = [(index, kept[name]) for index, kept, _ in parts if len(kept.get(name, ())) == len(index) > 0]
        if sum(len(index) for index, _ in rows) == tokens:
            whole[name] = torch.empty(tokens, rows[0][1].shape[1], dtype=rows[0][1].dtype)
            for index, tensor in rows:
                whole[name][torch.as_tensor(index)] = tensor
    return whole, list(own)


@contextmanager
def _recording(model: nn.Module, into: dict[str, torch.Tensor]) -> Iterator[None]:
    """Keep the output of every module that gives one row per token."""

    def keep(name: str) -> object:
        def hook(module: nn.Module, inputs: object, output: object) -> None:
            output = output[0] if isinstance(output, tuple) else output
            if isinstance(output, torch.Tensor) and output.ndim >= 2 and output.is_floating_point():
                into.setdefault(name, output.detach().reshape(-1, output.shape[-1]).to("cpu", copy=True))

        return hook

    handles = [module.register_forward_hook(keep(name)) for name, module in model.named_modules() if name]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
