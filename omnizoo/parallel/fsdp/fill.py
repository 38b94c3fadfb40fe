"""Allocate, move and fill the tensors of a sharded model."""

from collections.abc import Iterable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from omnizoo.ops.torch_private import change_tensors
from omnizoo.parallel.fsdp.sharded_tensors import is_sharded, local_shard
from omnizoo.parallel.mesh import Mesh


def allocate(model: nn.Module, device: torch.device, of_shards: torch.device | None = None) -> None:
    """Replace every parameter and buffer on the meta device with uninitialized memory. Tied weights stay tied.

    Args:
        model: The model. It is changed in place.
        device: Device of the tensors.
        of_shards: Device of sharded tensors, if it differs from `device`, as with CPU offload.
    """
    allocated: dict[int, torch.Tensor] = {}  # keyed by the id of the tensor on meta
    for module in model.modules():
        for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            if not tensor.is_meta:
                continue
            if id(tensor) not in allocated:
                tensor_device = of_shards if of_shards is not None and is_sharded(tensor) else device
                empty = torch.empty_like(tensor, device=tensor_device)
                is_parameter = isinstance(tensor, nn.Parameter)
                allocated[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
            setattr(module, name, allocated[id(tensor)])


def move(model: nn.Module, device: torch.device, of_shards: torch.device | None = None) -> None:
    """Move all tensors of `model` to `device`. If `of_shards` is set, move sharded tensors there instead.

    FSDP2 re-reads its parameters whenever a module is moved, so this also registers tensors that were replaced after
    sharding. With CPU offload, FSDP2 pins the shards in host memory.
    """

    def move_tensor(tensor: torch.Tensor) -> torch.Tensor:
        tensor_device = of_shards if of_shards is not None and is_sharded(tensor) else device
        result = tensor.to(tensor_device)
        # Shards that were read from files on the host are views of the full tensor. A clone frees the full tensor.
        local = local_shard(result)
        is_view = local.untyped_storage().nbytes() > local.nbytes
        return result.clone() if is_view and is_sharded(result) else result

    change_tensors(model, move_tensor)


def broadcast_tensors(tensors: Mapping[str, torch.Tensor], mesh: Mesh) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the full tensors of rank 0 on every rank, one at a time. Collective: all ranks must iterate to the end.

    On all ranks, `tensors` must have the same names, shapes and dtypes.
    """
    for name, tensor in tensors.items():
        source = tensor.detach() if mesh.is_first else torch.empty(tensor.shape, dtype=tensor.dtype)
        full = source.to(mesh.device).contiguous()
        dist.broadcast(full, src=0)
        yield name, full


@torch.no_grad()
def fill(model: nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Copy full tensors, one at a time, into this rank's shards.

    The ranks do not communicate, so all of them must pass the same `weights`.
    """
    targets = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, full in weights:
        target = targets[name]
        if isinstance(target, DTensor):
            full = full.to(target.dtype)
            shards = distribute_tensor(full, target.device_mesh, target.placements, src_data_rank=None)
            target.to_local().copy_(shards.to_local())
        else:
            target.copy_(full)
