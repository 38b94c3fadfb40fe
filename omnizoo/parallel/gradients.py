"""One gradient norm over all parameters, however they are sharded, and clipping by it."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from omnizoo.ops.device import has_float64, to_device
from omnizoo.parallel.shard import local_of

ROW = 1024
Groups = dict[tuple[DeviceMesh, tuple[Placement, ...]] | None, list[nn.Parameter]]  # None: whole on every rank


@torch.no_grad()
def sum_of_whole(parameters: Iterable[nn.Parameter]) -> None:
    """Sum, over all ranks, the gradients of parameters that every rank has whole: FSDP leaves them as they are. One
    all-reduce for all; every rank must call, after the last backward of a step."""
    whole = [p for p in parameters if p.requires_grad and not isinstance(p, DTensor)]
    if not whole or dist.get_world_size() == 1:
        return
    for parameter in whole:
        if parameter.grad is None:  # nothing went through it here
            parameter.grad = torch.zeros_like(parameter)
    grads = [p.grad for p in whole if p.grad is not None]
    flat = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(flat)
    for grad, total in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(total.view_as(grad))


def squared_norm(parameters: Iterable[nn.Parameter], device: torch.device) -> torch.Tensor:
    """This rank's part of the squared L2 norm of all gradients, on `device`, wherever they are: over all ranks, parts
    add up to that of one process.

    Ranks that hold the same shard hold the same gradient (HSDP reduces it in backward), so each counts its share of it.
    """
    parts = []
    for placed, group in _by_placement(parameters).items():
        mesh, placements = placed or (None, ())
        shards = math.prod(mesh.size(i) for i, split in enumerate(placements) if mesh and isinstance(split, Shard))
        square = sum_of_squares([local_of(p.grad) for p in group if p.grad is not None])
        parts.append(to_device(square * (shards / dist.get_world_size()), device))
    assert parts, "no gradients"
    return torch.stack(parts).sum()


def sum_of_squares(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Of all elements, exact enough not to depend on how they are spread over ranks.

    One fp32 sum over ten million elements differs by 2e-5 with the order of additions. Rows of a thousand are summed in
    the tensors' own precision, by one kernel per tensor, and the rows' sums in fp64 where the device has it.
    """
    norms = []
    for tensor in tensors:
        flat = tensor.reshape(-1)
        whole = len(flat) // ROW * ROW
        norms.append(torch.linalg.vector_norm(flat[:whole].view(-1, ROW), dim=1))
        norms.append(torch.linalg.vector_norm(flat[whole:], dim=0, keepdim=True))
    rows = torch.cat(norms)
    return rows.to(torch.float64 if has_float64(rows.device) else rows.dtype).square().sum()


def excess_of(norm: torch.Tensor, limit: float) -> torch.Tensor:
    """By what gradients of that norm are divided so that it becomes at most `limit`: as torch's clipping has it."""
    return ((norm + 1e-6) / limit).clamp(min=1.0)


def clip_gradients(parameters: Iterable[nn.Parameter], limit: float, norm: torch.Tensor) -> None:
    """Scale gradients down so that their norm, which is `norm`, becomes at most `limit`."""
    for group in _by_placement(parameters).values():  # torch refuses tensors of different meshes in one call
        torch.nn.utils.clip_grads_with_norm_(group, limit, norm)


def _by_placement(parameters: Iterable[nn.Parameter]) -> Groups:
    groups: Groups = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None:
            grad = parameter.grad
            groups[(grad.device_mesh, grad.placements) if isinstance(grad, DTensor) else None].append(parameter)
    return groups
