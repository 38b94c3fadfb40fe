"""Which blocks compute their activations again in backward, instead of keeping them; it can be changed block by block
while a model trains, and what each way costs can be measured."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from omnizoo.ops.block_costs import Meter
from omnizoo.ops.graphs import Compiled
from omnizoo.ops.offload import Offload
from omnizoo.ops.precision import exact
from omnizoo.ops.torch_private import Recomputation, both, tree_leaves, tree_map_only

MODES = ("none", "selective", "full")  # the less is kept, the more is computed again
EXPENSIVE = ("mm", "attention", "attn")


class Switch:
    """The forward of a block. On the instance, inside the module's hooks: FSDP gathers the weights before the
    recomputation needs them."""

    def __init__(
        self, block: nn.Module, mode: str, precision: str, recomputation: Recomputation, offload: Offload | None = None
    ) -> None:
        self.mode, self.is_chosen = mode, False  # chosen: it is for a budget to say
        self.kind = (type(block).__name__, tuple((name, tuple(p.shape)) for name, p in block.named_parameters()))
        self.measured: dict[str, Meter] | None = None  # while costs are measured: by mode
        self._forward, self._precision, self._recomputation = block.forward, precision, recomputation
        self._eager = self._forward.eager if isinstance(self._forward, Compiled) else self._forward
        self._moving = nullcontext if offload is None else partial(offload.moving, block)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.measured is not None and not self.measured:
            with torch.compiler.set_stance("force_eager"):  # a graph keeps no more, and shows nothing
                self._measure(self.measured, args, kwargs)
        forward = self._forward.chosen() if isinstance(self._forward, Compiled) else self._forward
        # The compiler of a graph keeps matmuls, and computes what lies between them again by itself: torch has no
        # selective recomputation around a graph, and none inside of one that ends at edges.
        by_compiler = forward is not self._eager and self.mode == "selective"
        return self._run("none" if by_compiler else self.mode, forward, args, kwargs)

    def _run(self, mode: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if mode == "none":
            with self._moving():
                return forward(*args, **kwargs)

        def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
            first, again = self._recomputation.contexts(_keep_expensive if mode == "selective" else None)
            # Autograd leaves the mode that the forward pass ran under.
            return first, both(again, exact(self._precision))

        with self._moving():
            return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    def _measure(self, found: dict[str, Meter], args: Any, kwargs: Any) -> None:
        def entering(x: torch.Tensor) -> torch.Tensor:  # as what comes from the block before does
            return x.detach().requires_grad_() if x.is_floating_point() else x

        args, kwargs = tree_map_only(torch.Tensor, entering, (args, kwargs))
        device = next(x.device for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor))
        with torch.no_grad():
            self._eager(*args, **kwargs)  # weights inside are gathered, and kernels are ready
        for mode in MODES:
            if mode == "selective" and self._forward is not self._eager:
                found[mode] = found["none"]
                continue
            meter = Meter(device, is_expensive, lambda: self._recomputation.is_aside)
            with torch.enable_grad(), meter:
                out = self._run(mode, self._eager, args, kwargs)
            meter.settle()
            found[mode] = meter
            del out


def recompute(
    block: nn.Module,
    mode: str | None,
    precision: str,
    recomputation: Recomputation,
    offload: Offload | None = None,
) -> None:
    """Recompute the block's activations in backward: all of them, or (selective) all but matmuls, attention and what
    all-to-alls brought. None: a budget says which; until it does, all of them. What autograd keeps goes to the host if
    there is an `offload`."""
    if mode == "none" and offload is None:
        return
    switch = Switch(block, mode or "full", precision, recomputation, offload)
    switch.is_chosen = mode is None
    block.forward = switch


def switches(model: nn.Module) -> dict[str, Switch]:
    """Of the blocks that a budget chooses for, by name, in order of execution."""
    found = {name: vars(module).get("forward") for name, module in model.named_modules()}
    return {name: switch for name, switch in found.items() if isinstance(switch, Switch) and switch.is_chosen}


def set_modes(model: nn.Module, modes: Mapping[str, str]) -> None:
    for name, switch in switches(model).items():
        switch.mode = modes[name]


@contextmanager
def measuring(model: nn.Module) -> Iterator[dict[Any, dict[str, Meter]]]:
    """While forward passes run inside: costs of the first block of each kind, by mode."""
    found: dict[Any, dict[str, Meter]] = {}
    first: dict[Any, Switch] = {}
    for switch in switches(model).values():
        first.setdefault(switch.kind, switch)
    for kind, switch in first.items():
        switch.measured = found[kind] = {}
    try:
        yield found
    finally:
        for switch in first.values():
            switch.measured = None


def gather_aside(unit: nn.Module, recomputation: Recomputation) -> None:
    """For a unit of FSDP inside of a block: it does not do the same before and after each of its forward passes, the
    one of the recomputation included, and selective recomputation would miss what it did not do."""

    def begin(*_: Any) -> None:
        recomputation.is_aside = True

    def end(*_: Any) -> None:
        recomputation.is_aside = False

    unit.register_forward_pre_hook(begin, prepend=True)  # before FSDP's own hook
    unit.register_forward_pre_hook(end)
    unit.register_forward_hook(begin, prepend=True)
    unit.register_forward_hook(end)


def is_expensive(op: torch._ops.OpOverload) -> bool:
    """Whether selective recomputation keeps what the operator gives."""
    return any(part in op.name() for part in EXPENSIVE) or op is torch.ops.c10d.alltoall_base_.default


def _keep_expensive(_: object, op: torch._ops.OpOverload, *args: object, **kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if is_expensive(op) else CheckpointPolicy.PREFER_RECOMPUTE
