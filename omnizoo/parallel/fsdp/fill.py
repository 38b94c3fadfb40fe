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
    """Replace every parameter and buffer on the meta device by uninitialized memory. Tied weights stay tied.

    Args:
        model: Changed in place.
        device: Device of the tensors.
        of_shards: Device of sharded tensors, if it is a different one, as with CPU offload.
    """
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
    """Move all tensors of `model` to `device`, and sharded ones to `of_shards` if it is set.

    FSDP2 re-reads its parameters whenever a module is moved, so this also registers tensors that were replaced after
    sharding. With CPU offload, FSDP2 pins the shards in host memory.
    """

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        there = tensor.to(of_shards if of_shards is not None and is_sharded(tensor) else device)
        # Shards that were read from files on the host are views of the full tensor, which a clone lets go.
        is_view = local_shard(there).untyped_storage().nbytes() > local_shard(there).nbytes
        return there.clone() if is_view and is_sharded(there) else there

    change_tensors(model, moved)


def broadcast_tensors(tensors: Mapping[str, torch.Tensor], mesh: Mesh) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the full tensors of rank 0 on every rank, one at a time. Collective: all ranks must iterate to the end.

    On all ranks, `tensors` must have the same names, shapes and dtypes.
    """
    for name, own in tensors.items():
        source = own.detach() if mesh.is_first else torch.empty(own.shape, dtype=own.dtype)
        whole = source.to(mesh.device).contiguous()
        dist.broadcast(whole, src=0)
        yield name, whole


@torch.no_grad()
def fill(model: nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Copy full tensors, one at a time, into this rank's shards.

    All ranks must pass the same `weights`. There is no communication.
    """
    targets = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, whole in weights:
        target = targets[name]
        if isinstance(target, DTensor):
            part = distribute_tensor(whole.to(target.dtype), target.device_mesh, target.placements, src_data_rank=None)
            target.to_local().copy_(part.to_local())
        else:
            target.copy_(whole)
