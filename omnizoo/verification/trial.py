"""A trial of one layout: run three optimizer steps of a scaled-down config, and record all values to compare."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
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
    losses: list[float]  # one per step
    grad_norms: list[float]  # one per step
    tokens: list[int]  # one per step, over all ranks
    gradients: dict[str, torch.Tensor]  # full gradients of the first step; rank 0 only
    activations: dict[str, torch.Tensor]  # [T, width] for the run's first pack, in order of execution; rank 0 only
    executed: list[str]  # modules in the order in which their forward passes finish
    calls: dict[str, int]  # collectives of the last step, by kind
    bytes: dict[str, int]  # bytes that this rank puts into them, by kind
    rounded: list[str] = field(default_factory=list)  # messages about inputs that lose precision; rank 0 only


def run_trial(config: Config, layout: Layout, process: Process) -> Trial:
    """Train the steps of `config` on `layout`, whose size must be the world size of `process`.

    Collective: all ranks must call it.
    """
    config = config.changed(parallel=asdict(layout))
    mesh = build_mesh(config, process)
    bundle = build_bundle(config)
    loader = bundle.loader(mesh)
    setup = set_up_training(bundle, mesh, StartingPoint(run="", checkpoint=None))
    model, optimizer, objective = setup.model, setup.optimizer, setup.objective
    assert optimizer is not None
    # Cover all recompute modes, because a memory budget may choose any of them.
    set_modes(model, dict(zip(switches(model), cycle(MODES), strict=False)))

    losses, norms, tokens = [], [], []
    counter = CollectiveCounter()
    for step in range(1, config.train.steps + 1):
        data = next_step(loader, setup.balancer)
        if step == 1:
            rounded: list[str] = []
            with watching(model, rounded):
                activations, executed = first_pack_activations(objective, data.micro_batches)
            rounded = list(dict.fromkeys(note for notes in mesh.gather(rounded) for note in notes))
            result = train_step(objective, optimizer, data, step)
            # Undo clipping: with a wrong norm, every clipped gradient would differ, which hides the cause.
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
    """Return the full gradients on the CPU if `keep` is set, else an empty dict. Collective: all ranks must call it."""
    gradients = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
        if keep and whole is not None:
            gradients[name] = whole.to("cpu", copy=True)
    return gradients


@torch.no_grad()
def first_pack_activations(objective: Objective, batches: Sequence[Batch]) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Return the output of every module for the run's first pack, and the modules in the order in which they finish.

    Rank 0 concatenates the outputs of the ranks that share the pack. Collective: all ranks must call it.
    """
    mesh = objective.mesh
    held = [0 in batch.packs for batch in batches]
    number = int(max(range(len(held)), key=mesh.sum([float(here) for here in held]).__getitem__))
    batch = batches[number]
    own: dict[str, torch.Tensor] = {}
    # Run in eager mode, because hooks would be compiled into the graphs of the blocks.
    with (
        torch.compiler.set_stance("force_eager"),
        _recording(objective.model, own),
        keep_precision(objective.config.train.precision),
    ):
        objective.terms(batch)
    objective.router_stats.reset()
    layout = mesh.layout
    index = slice_tokens(batch.cu_seqlens.diff().tolist(), layout.ring, layout.ulysses)[mesh.sp_rank]
    parts = mesh.gather((index, own, batch.tokens) if held[number] else None)
    parts = [part for part in parts if part is not None]
    whole: dict[str, torch.Tensor] = {}
    for name in own if parts else ():
        tokens = parts[0][2]
        # Modules that turn items into codes may run on some ranks only, and are skipped.
        rows = [(index, kept[name]) for index, kept, _ in parts if len(kept.get(name, ())) == len(index) > 0]
        if sum(len(index) for index, _ in rows) == tokens:
            whole[name] = torch.empty(tokens, rows[0][1].shape[1], dtype=rows[0][1].dtype)
            for index, tensor in rows:
                whole[name][torch.as_tensor(index)] = tensor
    return whole, list(own)


@contextmanager
def _recording(model: nn.Module, into: dict[str, torch.Tensor]) -> Iterator[None]:
    """Context manager: store the first output of every submodule in `into`, as rows `[n, width]` on the CPU."""

    def keep(name: str, module: nn.Module, inputs: object, output: object) -> None:
        output = output[0] if isinstance(output, tuple) else output
        if isinstance(output, torch.Tensor) and output.ndim >= 2 and output.is_floating_point():
            into.setdefault(name, output.detach().reshape(-1, output.shape[-1]).to("cpu", copy=True))

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if name:
                hooks.enter_context(module.register_forward_hook(partial(keep, name)))
        yield
