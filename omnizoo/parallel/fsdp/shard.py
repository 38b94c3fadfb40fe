"""Shard the blocks and the root of a model with torch's `fully_shard` (FSDP2, HSDP), without changes to the model.

Gradients are *summed* over ranks, never averaged. The loss is already divided by the global number of targets, so the
sum equals the gradient of a one-process run for every layout.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from omnizoo.ops.device import is_host
from omnizoo.ops.torch_private import use_in_place
from omnizoo.parallel.fsdp.cpu_collectives import set_collectives
from omnizoo.parallel.mesh import Mesh

RESIDENT = OffloadPolicy()  # no offload: shards stay on the device


def precision_policy(precision: str) -> MixedPrecisionPolicy:
    """Return the mixed-precision policy for `precision`.

    bf16 computes with bf16 copies of fp32 weights and reduces gradients in fp32. fp32 and fp64 use a single dtype.
    Input casting by FSDP2 is turned off, because it would also cast positions and targets. `cast_activations` casts the
    activations instead.
    """
    if precision == "bf16":
        return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    return MixedPrecisionPolicy()


def offload_policy(device: torch.device, on_host: bool) -> OffloadPolicy:
    """Return the offload policy. With `on_host`, shards and their gradients are kept in host memory (CPU offload)."""
    if on_host:
        return CPUOffloadPolicy(pin_memory=not is_host(device))
    return OffloadPolicy()


@dataclass(frozen=True)
class Units:
    """The modules of a model that FSDP2 gathers one at a time. All other parameters are gathered with the root."""

    blocks: Sequence[nn.Module]
    embedding: nn.Module | None = None
    head: nn.Module | None = None
    replicated: Sequence[nn.Parameter] = ()  # parameters that are not sharded and keep their dtype
    idle: Sequence[nn.Module] = ()  # modules that training never runs; as separate units, they are never gathered


def shard(
    model: nn.Module,
    units: Units,
    mesh: Mesh,
    reshard: bool,
    policy: MixedPrecisionPolicy,
    offload: OffloadPolicy = RESIDENT,
) -> None:
    """Make each of `units`, and then the root of the model, an FSDP2 unit over `mesh`, in place."""
    replicated = set(units.replicated)
    options: dict[str, Any] = {"mp_policy": policy, "offload_policy": offload}
    for block in units.blocks:
        cast_activations(block, policy.param_dtype)
        ignored = replicated.intersection(block.parameters())
        make_unit(block, mesh.fsdp, reshard_after_forward=reshard, ignored_params=ignored, **options)
    for module in units.idle:
        make_unit(module, mesh.fsdp, **options)
    if units.embedding is not None:
        unit = make_unit(units.embedding, mesh.fsdp, reshard_after_forward=reshard, **options)
        unit.set_unshard_in_backward(False)  # the gradient of an embedding does not depend on its weights
    # Backward needs the weights of the head and the root immediately, so resharding them would only add all-gathers.
    if units.head is not None:
        cast_activations(units.head, policy.param_dtype)  # some models cast to the dtype of the sharded weights
        make_unit(units.head, mesh.fsdp, reshard_after_forward=False, **options)
    make_unit(model, mesh.fsdp, reshard_after_forward=False, ignored_params=replicated, **options)


def prefetch(blocks: Sequence[Sequence[nn.Module]]) -> None:
    """When a block starts, also start the all-gather of the next block's weights, in forward and in backward.

    Without this, FSDP2 starts the all-gather when the host reaches the next block. That is too late if a block contains
    a host sync, as MoE blocks do. `blocks` lists the blocks in order of execution, each followed by its inner units.
    """
    setters = (FSDPModule.set_modules_to_forward_prefetch, FSDPModule.set_modules_to_backward_prefetch)
    for setter, order in zip(setters, (blocks, blocks[::-1]), strict=True):
        for i, (block, *inner_units) in enumerate(order):
            prefetched: list[nn.Module] = []
            if i == 0:  # no earlier block prefetches the inner units of the first block
                prefetched += inner_units
            if i + 1 < len(order):
                prefetched += order[i + 1]
            assert isinstance(block, FSDPModule)
            setter(block, prefetched)  # type: ignore[arg-type]  # all are FSDPModules


def cast_activations(block: nn.Module, dtype: torch.dtype | None) -> None:
    """Cast the first argument of `block`, the hidden states, to `dtype`. Other arguments keep their dtype.

    Most models already pass hidden states in this dtype, but some first add an fp32 buffer. If `dtype` is None, nothing
    is cast.
    """
    if dtype is None:
        return

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (_cast(args[0], dtype), *args[1:]), kwargs
        first = next(iter(kwargs), None)
        if first is not None:
            kwargs = kwargs | {first: _cast(kwargs[first], dtype)}
        return args, kwargs

    block.register_forward_pre_hook(enter, with_kwargs=True)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Cast a floating-point tensor to `dtype`, and return other values unchanged."""
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.to(dtype)
    return value


def make_unit(module: nn.Module, mesh: DeviceMesh, **options: Any) -> FSDPModule:
    """Shard `module` over `mesh` in place with `fully_shard` and `options`.

    Gradients are summed over the mesh, and on CPU point-to-point messages replace gloo's collectives. These settings
    apply to this unit only, not to nested units.
    """
    unit = fully_shard(module, mesh=mesh, **options)
    set_collectives(unit, mesh.get_group(mesh.ndim - 1))
    # With a single rank, do not set a divide factor, because torch 2.13 would copy every gradient to divide it by 1.
    if mesh.size() == 1:
        use_in_place(unit)
    else:
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)  # a plain sum, because gloo cannot sum scaled values
    return unit


def release(model: nn.Module) -> None:
    """Reshard all units, to free the weights that remain gathered after a forward pass without a backward pass."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def set_gradient_sync(model: nn.Module, last: bool, reduce_each: bool) -> None:
    """Set, before a micro-batch, whether its backward pass reduces gradients over the ranks.

    Args:
        model: The root FSDP2 unit.
        last: Whether this is the last micro-batch of the step. By default, only the last micro-batch reduces gradients.
        reduce_each: Whether to reduce-scatter the gradients of every micro-batch, so that only the gradients of local
            shards are kept. HSDP still all-reduces gradients once per step.
    """
    assert isinstance(model, FSDPModule)
    model.set_is_last_backward(last)
    if reduce_each:
        model.set_requires_all_reduce(last)
    else:
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last)
