"""Helpers for tensors that may be sharded (DTensor): local shard, offsets, sums over shards."""

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import zeros as sharded_zeros

from omnizoo.parallel.traffic_tag import sent_along


def local_bytes(model: nn.Module) -> int:
    """Return the number of bytes of this rank's local shards of the parameters."""
    return sum(local_shard(p).nbytes for p in model.parameters())


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is a DTensor."""
    return isinstance(tensor, DTensor)


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local shard of `tensor`, or `tensor` if it is not sharded. Not differentiable."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def splits_of(tensor: torch.Tensor) -> Iterator[tuple[dist.ProcessGroup, str, int]]:
    """Yield (group of ranks, mesh axis, dim) for each dim of `tensor` that is split. The last dim is -1."""
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        assert mesh.mesh_dim_names is not None, "all meshes of OmniZoo have named axes"
        for axis, placement in zip(mesh.mesh_dim_names, tensor.placements, strict=True):
            assert isinstance(placement, Shard | Replicate), f"{placement} is no plain shard"
            group = mesh.get_group(axis)
            if isinstance(placement, Shard) and group.size() > 1:
                yield group, axis, placement.dim - tensor.ndim


def offsets_of(tensor: torch.Tensor) -> list[int]:
    """Return the offset of the local shard in the full tensor, for each dim."""
    offsets = [0] * tensor.ndim
    for group, _, dim in splits_of(tensor):
        assert not offsets[dim], "a dim is split once"
        size = tensor.shape[dim]
        offsets[dim] = min(size, -(-size // group.size()) * group.rank())
    return offsets


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full tensor on every rank. Collective: all ranks must call it."""
    if isinstance(tensor, DTensor):
        # Collectives need the tensor on the device of the mesh. With CPU offload, it is in host memory.
        there = tensor.detach().to(tensor.device_mesh.device_type)
        assert isinstance(there, DTensor)
        tensor = there.full_tensor()
    return tensor.detach()


def with_local(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return a tensor that is sharded like `tensor`, with `local` as this rank's shard."""
    if not isinstance(tensor, DTensor):
        return local
    placed = {"shape": tensor.shape, "stride": tensor.stride(), "run_check": False}
    return DTensor.from_local(local, tensor.device_mesh, tensor.placements, **placed)  # type: ignore[arg-type]


def resized(tensor: torch.Tensor, dim: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a meta tensor that is sharded like `tensor`, but has `size` in `dim`, which must not be split."""
    shape = [*tensor.shape[:dim], size, *tensor.shape[dim + 1 :]]
    whole = torch.empty(shape, dtype=dtype, device="meta")
    if not isinstance(tensor, DTensor):
        return whole
    return distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None)


def sum_over_shards(
    values: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor], dims: Sequence[Collection[int] | None]
) -> list[torch.Tensor]:
    """Sum each value over the ranks that split its parameter. Collective: all ranks must call it.

    Values that are summed over the same ranks share one all-reduce.

    Args:
        values: For each parameter, a tensor that this rank has computed from its local shard.
        parameters: The parameters that the values belong to.
        dims: For each parameter, the dims whose splits are summed over (the last dim is -1); None for all dims.
    """
    together: dict[tuple[tuple[dist.ProcessGroup, str], ...], list[int]] = defaultdict(list)
    for i, (parameter, wanted) in enumerate(zip(parameters, dims, strict=True)):
        splits = splits_of(parameter)
        together[tuple((group, axis) for group, axis, dim in splits if wanted is None or dim in wanted)].append(i)
    results = list(values)
    for groups, members in together.items():
        if groups:
            flat = torch.cat([values[i].flatten() for i in members])
            for group, axis in groups:
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
    gone = dim % parameter.ndim
    placements = [
        Replicate() if isinstance(placement, Shard) and placement.dim == gone else placement
        for placement in parameter.placements
    ]
    return sharded_zeros(*shape, dtype=parameter.dtype, device_mesh=parameter.device_mesh, placements=placements)
