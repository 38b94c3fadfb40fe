"""Compute the gradient norm over all parameters, independently of how they are sharded, and clip gradients."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from omnizoo.ops.device import has_float64, to_device
from omnizoo.parallel.fsdp.sharded_tensors import local_shard
from omnizoo.parallel.traffic_tag import sent_along

ROW = 1024  # how many elements `sum_of_squares` adds in the dtype of the tensor
# The key None is for unsharded parameters.
GradientGroups = dict[tuple[DeviceMesh, tuple[Placement, ...]] | None, list[nn.Parameter]]


@torch.no_grad()
def sum_replicated_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Sum the gradients of unsharded parameters over all ranks, with one all-reduce. FSDP does not reduce them.

    Call this after the last backward pass of a step. Collective: all ranks must call it.
    """
    unsharded = [p for p in parameters if p.requires_grad and not isinstance(p, DTensor)]
    if not unsharded or dist.get_world_size() == 1:
        return
    for parameter in unsharded:
        if parameter.grad is None:  # this rank did not use the parameter, but other ranks may have used it
            parameter.grad = torch.zeros_like(parameter)
    grads = [p.grad for p in unsharded if p.grad is not None]
    flat = torch.cat([grad.flatten() for grad in grads])
    with sent_along("world"):
        dist.all_reduce(flat)
    for grad, total in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(total.view_as(grad))


def squared_norm(parameters: Iterable[nn.Parameter], device: torch.device) -> torch.Tensor:
    """Return this rank's part of the squared L2 norm of all gradients, on `device`.

    The sum over all ranks is the squared norm that one process would compute. Under HSDP, several ranks hold copies of
    a shard and have the same gradient, because backward all-reduces it. Each of these ranks contributes an equal
    fraction of the square.
    """
    squares = []
    for mesh_and_placements, group in _by_placement(parameters).items():
        num_shards = 1
        if mesh_and_placements is not None:
            mesh, placements = mesh_and_placements
            num_shards = math.prod(mesh.size(i) for i, split in enumerate(placements) if isinstance(split, Shard))
        square = sum_of_squares([local_shard(p.grad) for p in group if p.grad is not None])
        squares.append(to_device(square * (num_shards / dist.get_world_size()), device))
    assert squares, "no gradients"
    return torch.stack(squares).sum()


def sum_of_squares(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of squares of all elements, precisely enough not to depend on the sharding.

    A single fp32 sum over ten million elements varies by 2e-5 if the order of the additions changes. Therefore rows of
    `ROW` elements are summed in the dtype of the tensor, with one kernel per tensor, and the sums of the rows are added
    in fp64 if the device supports it.
    """
    norms = []
    for tensor in tensors:
        flat = tensor.reshape(-1)
        in_full_rows = len(flat) // ROW * ROW
        norms.append(torch.linalg.vector_norm(flat[:in_full_rows].view(-1, ROW), dim=1))
        norms.append(torch.linalg.vector_norm(flat[in_full_rows:], dim=0, keepdim=True))
    row_norms = torch.cat(norms)
    dtype = torch.float64 if has_float64(row_norms.device) else row_norms.dtype
    return row_norms.to(dtype).square().sum()


def clip_divisor(norm: torch.Tensor, limit: float) -> torch.Tensor:
    """Return the number by which gradients with norm `norm` are divided to clip them to `limit`, as in torch."""
    return ((norm + 1e-6) / limit).clamp(min=1.0)


def clip_gradients(parameters: Iterable[nn.Parameter], limit: float, norm: torch.Tensor) -> None:
    """Scale gradients in place so that their norm, currently `norm`, becomes at most `limit`."""
    for group in _by_placement(parameters).values():  # torch does not accept tensors of different meshes in one call
        torch.nn.utils.clip_grads_with_norm_(group, limit, norm)


def _by_placement(parameters: Iterable[nn.Parameter]) -> GradientGroups:
    """Group the parameters that have a gradient by the mesh and placements of the gradient."""
    groups: GradientGroups = defaultdict(list)
    for parameter in parameters:
        grad = parameter.grad
        if grad is None:
            continue
        key = (grad.device_mesh, grad.placements) if isinstance(grad, DTensor) else None
        groups[key].append(parameter)
    return groups
