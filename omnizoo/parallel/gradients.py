"""One gradient norm over all parameters, however they are sharded."""

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard


def gradient_norm(parameters: Iterable[nn.Parameter]) -> torch.Tensor:
    """L2 norm of all gradients, as in one process: local squares, one all-reduce per group of equal placement."""
    groups: dict[tuple[DeviceMesh, tuple[Placement, ...]], list[torch.Tensor]] = defaultdict(list)
    for parameter in parameters:
        grad = parameter.grad
        if grad is None:
            continue
        assert isinstance(grad, DTensor), "every parameter is sharded, also in a world of one"
        groups[grad.device_mesh, grad.placements].append(grad.to_local())
    total: torch.Tensor | None = None
    for (mesh, placements), local in groups.items():
        square = torch.nn.utils.get_total_norm(local).square()
        for axis, placement in enumerate(placements):
            # Replicated axes hold the same gradient already (HSDP reduces it in backward).
            if isinstance(placement, Shard) and mesh.size(axis) > 1:
                dist.all_reduce(square, group=mesh.get_group(axis))
        total = square if total is None else total + square
    assert total is not None, "no gradients"
    return total.sqrt()
