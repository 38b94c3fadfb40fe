"""Helpers for tensors that may be sharded (DTensor), such as local shards, offsets and sums over shards."""

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import zeros as sharded_zeros

from omnizoo.parallel.traffic_tag import sent_along


def local_bytes(model: nn.Module) -> int:
    """Return the number of bytes of this rank's local shards of the parameters."""
    return sum(local_shard(p).nbytes for p in model.parameters())


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is a DTensor."""
    return isinstance(tensor, DTensor)


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local shard of `tensor`, or `tensor` if it is not sharded. Do not backpropagate through it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def splits_of(tensor: torch.Tensor) -> Iterator[tuple[dist.ProcessGroup, str, int]]:
    """Yield (process group, mesh axis, dim) for each sharded dim of `tensor`. Dims are counted from the end (-1)."""
    if not isinstance(tensor, DTensor):
        return
    mesh = tensor.device_mesh
    assert mesh.mesh_dim_names is not None, "all meshes of OmniZoo have named axes"
    for axis, placement in zip(mesh.mesh_dim_names, tensor.placements, strict=True):
        assert isinstance(placement, Shard | Replicate), f"{placement} is neither Shard nor Replicate"
        group = mesh.get_group(axis)
        if isinstance(placement, Shard) and group.size() > 1:
            yield group, axis, placement.dim - tensor.ndim


def offsets_of(tensor: torch.Tensor) -> list[int]:
    """Return the offset of the local shard in the full tensor, for each dim."""
    offsets = [0] * tensor.ndim
    for group, _, dim in splits_of(tensor):
        assert not offsets[dim], "a dim is split twice"
        size = tensor.shape[dim]
        shard_size = -(-size // group.size())
        offsets[dim] = min(size, shard_size * group.rank())
    return offsets


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full tensor on every rank. Collective: all ranks must call it."""
    if isinstance(tensor, DTensor):
        # Collectives need the tensor on the device of the mesh. With CPU offload, the tensor is in host memory.
        on_device = tensor.detach().to(tensor.device_mesh.device_type)
        assert isinstance(on_device, DTensor)
        tensor = on_device.full_tensor()
    return tensor.detach()


def with_local(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return a tensor that is sharded like `tensor`, with `local` as this rank's shard."""
    if not isinstance(tensor, DTensor):
        return local
    return DTensor.from_local(
        local,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def resized(tensor: torch.Tensor, dim: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a meta tensor that is sharded like `tensor`, but has `size` in `dim`. This dim must not be split."""
    shape = [*tensor.shape[:dim], size, *tensor.shape[dim + 1 :]]
    full = torch.empty(shape, dtype=dtype, device="meta")
    if not isinstance(tensor, DTensor):
        return full
    return distribute_tensor(full, tensor.device_mesh, tensor.placements, src_data_rank=None)


def sum_over_shards(
    values: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor], dims: Sequence[Collection[int] | None]
) -> list[torch.Tensor]:
    """Sum each value over all ranks with a shard of its parameter. Collective: all ranks must call it.

    Values that are summed over the same ranks share one all-reduce.

    Args:
        values: For each parameter, a tensor that this rank has computed from its local shard.
        parameters: The parameters that the values belong to.
        dims: For each parameter, the dims to sum over if they are split (the last dim is -1); None for all dims.
    """
    members_by_groups: dict[tuple[tuple[dist.ProcessGroup, str], ...], list[int]] = defaultdict(list)
    for i, (parameter, summed_dims) in enumerate(zip(parameters, dims, strict=True)):
        groups = []
        for group, axis, dim in splits_of(parameter):
            if summed_dims is None or dim in summed_dims:
                groups.append((group, axis))
        members_by_groups[tuple(groups)].append(i)

    results = list(values)
    for groups_and_axes, members in members_by_groups.items():
        if not groups_and_axes:
            continue
        flat = torch.cat([values[i].flatten() for i in members])
        for group, axis in groups_and_axes:
            with sent_along(axis):
                dist.all_reduce(flat, group=group)
        for i, total in zip(members, flat.split([values[i].numel() for i in members]), strict=True):
            results[i] = total.view(values[i].shape)
    return results


def zeros_reduced(parameter: torch.Tensor, dim: int) -> torch.Tensor:
    """Return zeros in the shape of `parameter` with `dim` reduced to 1.

    The result is sharded like `parameter`, but replicated along mesh axes that split `dim`.
    """
    shape = list(parameter.shape)
    shape[dim] = 1
    if not isinstance(parameter, DTensor):
        return parameter.new_zeros(shape)
    reduced_dim = dim % parameter.ndim
    placements: list[Placement] = []
    for placement in parameter.placements:
        splits_reduced_dim = isinstance(placement, Shard) and placement.dim == reduced_dim
        placements.append(Replicate() if splits_reduced_dim else placement)
    return sharded_zeros(*shape, dtype=parameter.dtype, device_mesh=parameter.device_mesh, placements=placements)
