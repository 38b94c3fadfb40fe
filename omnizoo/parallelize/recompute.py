"""Activation recomputation per block.

The mode can change during training, and the cost of each mode can be measured.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from omnizoo.config.schema import Config
from omnizoo.models.component_settings import ComponentSettings
from omnizoo.models.recipe import ModelFacts
from omnizoo.ops.compiled_blocks import Compiled
from omnizoo.ops.device import is_host
from omnizoo.ops.memory.block_costs import Meter
from omnizoo.ops.memory.offload import Offload
from omnizoo.ops.precision import keep_precision
from omnizoo.ops.torch_private import Recomputation, both, tree_leaves, tree_map_only
from omnizoo.parallel.mesh import Mesh
from omnizoo.parallel.rendezvous import ranks_on_node

log = logging.getLogger(__name__)

MODES = ("none", "selective", "full")  # sorted from most to least memory for activations
EXPENSIVE = ("mm", "attention", "attn")  # fragments of the names of expensive operators


class Switch:
    """Replacement for the `forward` of a block that applies a recompute mode.

    It is set on the instance, so it runs inside the module's hooks. FSDP therefore gathers weights before recomputation
    needs them.
    """

    def __init__(
        self, block: nn.Module, mode: str | None, precision: str, recomputation: Recomputation, offload: Offload | None
    ) -> None:
        self.mode = mode or "full"
        self.is_chosen = mode is None  # whether a memory budget chooses the mode
        shapes = tuple((name, tuple(p.shape)) for name, p in block.named_parameters())
        self.kind = (type(block).__name__, shapes)  # blocks of a kind have the same costs
        self.measured: dict[str, Meter] | None = None  # keyed by mode; None while costs are not being measured
        self._forward = block.forward
        self._precision = precision
        self._recomputation = recomputation
        self._eager = self._forward.eager if isinstance(self._forward, Compiled) else self._forward
        self._offloading = nullcontext if offload is None else partial(offload.offload_saved, block)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.measured is not None and not self.measured:
            # Measure eager code, because a graph hides its operators. A graph saves no more tensors than eager code.
            with torch.compiler.set_stance("force_eager"):
                self._measure(self.measured, args, kwargs)
        forward = self._forward.current() if isinstance(self._forward, Compiled) else self._forward
        # In a compiled graph, the compiler keeps matmuls and recomputes the operators between them. torch does not
        # support selective recomputation around a graph, nor inside a graph with breaks.
        by_compiler = forward is not self._eager and self.mode == "selective"
        return self._run("none" if by_compiler else self.mode, forward, args, kwargs)

    def _run(self, mode: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call `forward` with this recompute mode."""
        if mode == "none":
            with self._offloading():
                return forward(*args, **kwargs)

        def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
            policy = _keep_expensive if mode == "selective" else None
            forward_context, recompute_context = self._recomputation.contexts(policy)
            # Backward does not run under the precision mode of the forward pass, so recomputation enters it again.
            return forward_context, both(recompute_context, keep_precision(self._precision))

        with self._offloading():
            return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    def _measure(self, meters: dict[str, Meter], args: Any, kwargs: Any) -> None:
        """Run the block once in each mode, and set `meters[mode]`."""

        def as_leaf(x: torch.Tensor) -> torch.Tensor:
            """Return a leaf tensor that requires a gradient, like the output of the previous block."""
            return x.detach().requires_grad_() if x.is_floating_point() else x

        args, kwargs = tree_map_only(torch.Tensor, as_leaf, (args, kwargs))
        device = next(x.device for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor))
        with torch.no_grad():
            self._eager(*args, **kwargs)  # warm-up: gathers weights inside the block and loads kernels
        for mode in MODES:
            if mode == "selective" and self._forward is not self._eager:
                meters[mode] = meters["none"]
                continue
            meter = Meter(device, is_expensive, lambda: self._recomputation.is_aside)
            with torch.enable_grad(), meter:
                out = self._run(mode, self._eager, args, kwargs)
            meter.measure_kept_bytes()
            meters[mode] = meter
            del out


def recompute(
    block: nn.Module,
    mode: str | None,
    precision: str,
    recomputation: Recomputation,
    offload: Offload | None = None,
) -> None:
    """Recompute the block's activations in backward, and offload saved activations to the CPU if `offload` is set.

    Args:
        block: The block; its forward is replaced.
        mode: `full` recomputes all activations. `selective` keeps the results of matmuls, attention and all-to-alls.
            `none` keeps all activations. If None, a memory budget chooses the mode later. Until then, it is `full`.
        precision: The precision of the run.
        recomputation: State that the blocks of the model share.
        offload: CPU offload of activations.
    """
    if mode != "none" or offload is not None:
        block.forward = Switch(block, mode, precision, recomputation, offload)


def switches(model: nn.Module) -> dict[str, Switch]:
    """Return the switches whose mode a memory budget chooses, keyed by block name, in order of execution."""
    result = {}
    for name, module in model.named_modules():
        forward = vars(module).get("forward")
        if isinstance(forward, Switch) and forward.is_chosen:
            result[name] = forward
    return result


def set_modes(model: nn.Module, modes: Mapping[str, str]) -> None:
    """Set the recompute mode of each block. The keys of `modes` are block names."""
    for name, switch in switches(model).items():
        switch.mode = modes[name]


@contextmanager
def measuring(model: nn.Module) -> Iterator[dict[Any, dict[str, Meter]]]:
    """Context manager: measure the first block of each kind during forward passes.

    The context manager yields the costs, keyed by kind and mode.
    """
    first_switches: dict[Any, Switch] = {}
    for switch in switches(model).values():
        first_switches.setdefault(switch.kind, switch)

    meters: dict[Any, dict[str, Meter]] = {}
    for kind, switch in first_switches.items():
        meters[kind] = {}
        switch.measured = meters[kind]
    try:
        yield meters
    finally:
        for switch in first_switches.values():
            switch.measured = None


def gather_aside(unit: nn.Module, recomputation: Recomputation) -> None:
    """Exclude the FSDP hooks of `unit` from selective recomputation. `unit` is inside a block.

    The hooks run different operators in the forward pass and in recomputation, so their operators cannot be matched.
    """

    def begin(*_: Any) -> None:
        recomputation.is_aside = True

    def end(*_: Any) -> None:
        recomputation.is_aside = False

    unit.register_forward_pre_hook(begin, prepend=True)  # before FSDP's hook
    unit.register_forward_pre_hook(end)
    unit.register_forward_hook(begin, prepend=True)
    unit.register_forward_hook(end)


def is_expensive(op: torch._ops.OpOverload) -> bool:
    """Whether selective recomputation keeps the result of the operator."""
    if op is torch.ops.c10d.alltoall_base_.default:
        return True
    return any(fragment in op.name() for fragment in EXPENSIVE)


def _keep_expensive(_: object, op: torch._ops.OpOverload, *args: object, **kwargs: object) -> CheckpointPolicy:
    """Policy of selective recomputation: save the results of expensive operators."""
    return CheckpointPolicy.MUST_SAVE if is_expensive(op) else CheckpointPolicy.PREFER_RECOMPUTE


def recompute_blocks(
    model: nn.Module,
    facts: ModelFacts,
    components: ComponentSettings,
    mesh: Mesh,
    config: Config,
    recomputation: Recomputation,
) -> None:
    """Set the recompute mode of every block, and offload activations if `parallel.offload` requests it."""
    parallel = config.parallel
    offload = None
    if "activations" in parallel.offload:
        offload = Offload(mesh.device, len(facts.blocks), ranks_on_node())
    if parallel.offload and is_host(mesh.device):
        log.warning("parallel.offload has no effect on CPU")
    default = parallel.recompute if isinstance(parallel.recompute, str) else None
    for name in facts.blocks:
        mode = components.of(name).recompute or default
        recompute(model.get_submodule(name), mode, config.train.precision, recomputation, offload)
