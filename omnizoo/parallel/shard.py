"""FSDP2 and HSDP from outside: wraps blocks and root of any module with torch's `fully_shard`, and fills the shards.

Gradients are *summed* over ranks, never averaged: the loss is already divided by the global count of targets, so the
sum is the gradient of the one-process run, whatever the layout.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import zeros as sharded_zeros

from omnizoo.ops.device import is_host
from omnizoo.ops.torch_private import change_tensors, use_in_place
from omnizoo.parallel.direct import set_collectives
from omnizoo.parallel.mesh import Mesh

RESIDENT = OffloadPolicy()  # shards are on the device


def precision_policy(precision: str) -> MixedPrecisionPolicy:
    """bf16 computes on bf16 copies of fp32 weights and reduces gradients in fp32; fp32 and fp64 are so throughout.

    FSDP2 would cast every float that enters a unit, positions and targets included: `cast_activations` does it instead.
    """
    if precision == "bf16":
        return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    return MixedPrecisionPolicy()


def offload_policy(device: torch.device, on_host: bool) -> OffloadPolicy:
    """`on_host`: shards are in the host's memory, come to `device` to be gathered, and their gradients go there."""
    return CPUOffloadPolicy(pin_memory=not is_host(device)) if on_host else OffloadPolicy()


@dataclass(frozen=True)
class Units:
    """The modules of a model that FSDP2 gathers one at a time. What is in none of them is gathered with the root."""

    blocks: Sequence[nn.Module]
    embedding: nn.Module | None = None
    head: nn.Module | None = None
    whole: Sequence[nn.Parameter] = ()  # parameters that stay as they are on every rank, in their own precision
    idle: Sequence[nn.Module] = ()  # modules that training never runs: units of their own, which nobody gathers


def shard(
    model: nn.Module,
    units: Units,
    mesh: Mesh,
    reshard: bool,
    policy: MixedPrecisionPolicy,
    offload: OffloadPolicy = RESIDENT,
) -> None:
    """Make each of `units`, and what is left at the root, a unit of FSDP2 over `mesh`, in place."""
    kept = set(units.whole)
    how: dict[str, Any] = {"mesh": mesh.fsdp, "mp_policy": policy, "offload_policy": offload}
    for block in units.blocks:
        if policy.param_dtype is not None:
            cast_activations(block, policy.param_dtype)
        own = kept.intersection(block.parameters())
        unit = fully_shard(block, reshard_after_forward=reshard, ignored_params=own, **how)
        set_communication(unit, mesh.fsdp)
    for module in units.idle:
        set_communication(fully_shard(module, **how), mesh.fsdp)
    if units.embedding is not None:
        unit = fully_shard(units.embedding, reshard_after_forward=reshard, **how)
        set_communication(unit, mesh.fsdp)
        unit.set_unshard_in_backward(False)  # its gradient is made of ids and of what comes back, without the weights
    # Head and root are needed again at once when backward starts: resharding them would only add all-gathers.
    if units.head is not None:
        if policy.param_dtype is not None:
            cast_activations(units.head, policy.param_dtype)  # some models cast to what its weights are before gathered
        unit = fully_shard(units.head, reshard_after_forward=False, **how)
        set_communication(unit, mesh.fsdp)
    root = fully_shard(model, reshard_after_forward=False, ignored_params=kept, **how)
    set_communication(root, mesh.fsdp)


def prefetch(blocks: Sequence[Sequence[nn.Module]]) -> None:
    """Let each block ask for the weights of the next one when it begins, in forward and in backward.

    `blocks` run one after the other; each comes with the units inside of it. Without this FSDP2 asks for weights when
    the host arrives at them: too late where the host waits for the device inside of a block, as experts make it do.
    """
    setters = (FSDPModule.set_modules_to_forward_prefetch, FSDPModule.set_modules_to_backward_prefetch)
    for setter, order in zip(setters, (blocks, blocks[::-1]), strict=True):
        for i, (block, *inside) in enumerate(order):
            following = order[i + 1] if i + 1 < len(order) else ()
            assert isinstance(block, FSDPModule)
            setter(block, [*(inside if i == 0 else ()), *following])  # type: ignore[list-item]  # all of them are units


def cast_activations(block: nn.Module, dtype: torch.dtype) -> None:
    """Let `block` take its hidden states, the first of its arguments, in `dtype`; whatever else it is given stays.

    Most models hand them over so; one that adds an fp32 buffer to them does not.
    """

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (_cast(args[0], dtype), *args[1:]), kwargs
        first = next(iter(kwargs), "")
        return args, {key: _cast(value, dtype) if key == first else value for key, value in kwargs.items()}

    block.register_forward_pre_hook(enter, with_kwargs=True)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def set_communication(unit: FSDPModule, mesh: DeviceMesh) -> None:
    """How one unit talks to other ranks: gradients are summed over its mesh, and CPUs send directly. No setter reaches
    the units inside of it."""
    set_collectives(unit, mesh.get_group(mesh.ndim - 1))
    if mesh.size() == 1:
        use_in_place(unit)
    else:  # one rank has nothing to sum, and torch 2.13 would copy every gradient to divide it by one
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum, and a plain one is meant


def local_bytes(model: nn.Module) -> int:
    """Bytes of the weights this rank holds."""
    return sum(local_of(p).nbytes for p in model.parameters())


def is_sharded(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, DTensor)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The part of `tensor` that this rank holds, which is the whole if it is not sharded. Not for autograd."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def offsets_of(tensor: torch.Tensor) -> list[int]:
    """Where the part of `tensor` that this rank holds begins in the whole, by dim."""
    offsets = [0] * tensor.ndim
    if isinstance(tensor, DTensor):
        coordinate = tensor.device_mesh.get_coordinate()
        assert coordinate is not None
        for axis, placement in enumerate(tensor.placements):
            if isinstance(placement, Shard) and tensor.device_mesh.size(axis) > 1:
                assert not offsets[placement.dim], "a dim is split once"
                size = tensor.shape[placement.dim]
                each = -(-size // tensor.device_mesh.size(axis))
                offsets[placement.dim] = min(size, each * coordinate[axis])
    return offsets


def whole_of(tensor: torch.Tensor) -> torch.Tensor:
    """All of `tensor`, on every rank: all of them must call."""
    if isinstance(tensor, DTensor):
        # Its ranks talk by way of their devices, where it may not be.
        there = tensor.detach().to(tensor.device_mesh.device_type)
        assert isinstance(there, DTensor)
        tensor = there.full_tensor()
    return tensor.detach()


def release(model: nn.Module) -> None:
    """Free gathered weights that a forward pass without a backward pass has left behind."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def with_local(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """`local` as this rank's part of a tensor that is sharded as `tensor` is."""
    if not isinstance(tensor, DTensor):
        return local
    placed = {"shape": tensor.shape, "stride": tensor.stride(), "run_check": False}
    return DTensor.from_local(local, tensor.device_mesh, tensor.placements, **placed)  # type: ignore[arg-type]


def resized(tensor: torch.Tensor, dim: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor on meta that is sharded as `tensor` is, but with another size of `dim`, which is whole on every rank."""

    def shape_of(shape: torch.Size) -> list[int]:
        return [*shape[:dim], size, *shape[dim + 1 :]]

    local = torch.empty(shape_of(local_of(tensor).shape), dtype=dtype, device="meta")
    if not isinstance(tensor, DTensor):
        return local
    stride = torch.empty(shape_of(tensor.shape), device="meta").stride()
    shape = torch.Size(shape_of(tensor.shape))
    return DTensor.from_local(local, tensor.device_mesh, tensor.placements, run_check=False, shape=shape, stride=stride)


def sum_over_shards(
    values: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor], dims: Sequence[Collection[int] | None]
) -> list[torch.Tensor]:
    """Each value, which this rank has for its part of a parameter, summed over the ranks that split one of `dims` of it
    (counted from the last, -1; None: any). One all-reduce for all values with the same ranks. All ranks must call it.
    """
    together: dict[tuple[dist.ProcessGroup, ...], list[int]] = defaultdict(list)
    for i, (parameter, wanted) in enumerate(zip(parameters, dims, strict=True)):
        ranks: list[dist.ProcessGroup] = []
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            for axis, placement in enumerate(parameter.placements):
                split = isinstance(placement, Shard) and (wanted is None or placement.dim - parameter.ndim in wanted)
                if split and mesh.size(axis) > 1:
                    ranks.append(mesh.get_group(axis))
        together[tuple(ranks)].append(i)
    results = list(values)
    for groups, members in together.items():
        if groups:
            flat = torch.cat([values[i].flatten() for i in members])
            for group in groups:
                dist.all_reduce(flat, group=group)
            for i, total in zip(members, flat.split([values[i].numel() for i in members]), strict=True):
                results[i] = total.view(values[i].shape)
    return results


def zeros_reduced(parameter: torch.Tensor, dim: int) -> torch.Tensor:
    """Zeros of the shape of `parameter` with `dim` reduced to one, sharded alike but whole where `dim` was split."""
    shape = list(parameter.shape)
    shape[dim] = 1
    if not isinstance(parameter, DTensor):
        return parameter.new_zeros(shape)
    gone = dim % parameter.ndim
    placements = [
        Replicate() if isinstance(placement, Shard) and placement.dim == gone else placement
        for placement in parameter.placements
    ]
    return sharded_zeros(*shape, dtype=parameter.dtype, device_mesh=parameter.device_mesh, placements=placements)


def set_gradient_sync(model: nn.Module, last: bool, reduce_each: bool) -> None:
    """Before a micro-batch: communicate gradients now, or keep them local until the last micro-batch of the step.

    With `reduce_each`, gradients are reduce-scattered every time (shard-sized memory) and HSDP still all-reduces once.
    """
    assert isinstance(model, FSDPModule)
    model.set_is_last_backward(last)
    if reduce_each:
        model.set_requires_all_reduce(last)
    else:
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last)


def allocate(model: nn.Module, device: torch.device, of_shards: torch.device | None = None) -> None:
    """Give every parameter and buffer that is still on meta real (uninitialised) memory; tied weights stay tied.
    `of_shards`: where those that are sharded are, if elsewhere."""
    made: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            if not tensor.is_meta:
                continue
            if id(tensor) not in made:
                own = of_shards if of_shards is not None and is_sharded(tensor) else device
                empty = torch.empty_like(tensor, device=own)
                is_parameter = isinstance(tensor, nn.Parameter)
                made[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
            setattr(module, name, made[id(tensor)])


def move(model: nn.Module, device: torch.device, of_shards: torch.device | None = None) -> None:
    """Bring all tensors of `model` there, and let FSDP see what they have become since they were sharded: it re-reads
    them whenever a module is moved, and pins those that are on the host."""

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        there = tensor.to(of_shards if of_shards is not None and is_sharded(tensor) else device)
        # Shards that were read from files on the host are views of the whole tensor there.
        is_view = local_of(there).untyped_storage().nbytes() > local_of(there).nbytes
        return there.clone() if is_view and is_sharded(there) else there

    change_tensors(model, moved)


def sent_by_first(tensors: Mapping[str, torch.Tensor], mesh: Mesh) -> Iterator[tuple[str, torch.Tensor]]:
    """Whole tensors as the first rank has them, one at a time; others need to have the same names, shapes and types."""
    for name, own in tensors.items():
        source = own.detach() if mesh.is_first else torch.empty(own.shape, dtype=own.dtype)
        whole = source.to(mesh.device).contiguous()
        dist.broadcast(whole, src=0)
        yield name, whole


@torch.no_grad()
def fill(model: nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Copy whole tensors, one at a time, into this rank's shards (no communication: every rank has the same stream)."""
    targets = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, whole in weights:
        target = targets[name]
        if isinstance(target, DTensor):
            part = distribute_tensor(whole.to(target.dtype), target.device_mesh, target.placements, src_data_rank=None)
            target.to_local().copy_(part.to_local())
        else:
            target.copy_(whole)
