"""Apply a function to full matrices of sharded tensors.

Each matrix is gathered on one rank, which computes the result and sends every rank its shard of it.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist

from omnizoo.parallel.exchange import exchange_rows
from omnizoo.parallel.fsdp.sharded_tensors import local_shard, splits_of

Function = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class _Job:
    """Matrices `first` to `last` (exclusive) of one tensor `[..., m, n]`, to be processed by one rank."""

    tensor: int  # index of the tensor
    first: int
    last: int
    dim: int  # dim that is split over the ranks: -2 or -1
    shape: tuple[int, int]  # (m, n) of a full matrix
    sizes: tuple[int, ...]  # size of `dim` on each rank

    @property
    def cost(self) -> int:
        """Estimated cost of the job, in arbitrary units."""
        m, n = self.shape
        return (self.last - self.first) * m * n * min(m, n)

    def shape_on(self, rank: int) -> tuple[int, int, int]:
        """Return the shape of the shards that `rank` holds, `[matrices, m, n]` with `dim` reduced."""
        m, n = self.shape
        here = self.sizes[rank]
        return self.last - self.first, *((here, n) if self.dim == -2 else (m, here))

    def numel_on(self, rank: int) -> int:
        """Return the number of elements that `rank` holds."""
        count, m, n = self.shape_on(rank)
        return count * m * n


@torch.no_grad()
def on_whole_matrices(tensors: Sequence[torch.Tensor], function: Function) -> list[torch.Tensor]:
    """Apply `function` to the matrices in the last two dims of each tensor. Collective: all ranks must call it.

    A rank that holds full matrices, such as whole experts, processes them locally. Other matrices are assigned to the
    ranks that share them, balanced by cost. One all-to-all sends the shards there and another returns the results, so
    the communication and computation of a rank are in proportion to its shards.

    Args:
        tensors: Tensors `[..., m, n]`, sharded or not.
        function: Maps `[B, m, n]` to `[B, m, n]`, each matrix independently.

    Returns:
        This rank's shards of the results.
    """
    results: dict[int, torch.Tensor] = {}
    shared: dict[tuple[dist.ProcessGroup, str, torch.dtype], list[int]] = defaultdict(list)
    local, dims, shapes = [], [], []
    for i, tensor in enumerate(tensors):
        group, axis, dim = _split(tensor)
        here = local_shard(tensor)
        local.append(here.reshape(math.prod(here.shape[:-2]), *here.shape[-2:]))
        dims.append(dim)
        shapes.append(here.shape)
        if group is None:
            results[i] = function(local[i]).view(here.shape) if here.numel() else here
        else:
            shared[group, axis, here.dtype].append(i)
    for (group, axis, _), members in shared.items():
        jobs = [job for i in members for job in _jobs(i, tensors[i], local[i], dims[i], group)]
        for i, result in _work(jobs, local, function, group, axis).items():
            results[i] = result.view(shapes[i])
    return [results[i] for i in range(len(tensors))]


def _split(tensor: torch.Tensor) -> tuple[dist.ProcessGroup | None, str, int]:
    """Return the group of ranks that share each matrix of `tensor`, its mesh axis, and the split dim (-2 or -1).

    If matrices are not split, return (None, "", 0).
    """
    found = [(group, axis, dim) for group, axis, dim in splits_of(tensor) if dim >= -2]
    assert len(found) <= 1, "no layout splits a matrix along two axes"
    return found[0] if found else (None, "", 0)


def _jobs(i: int, tensor: torch.Tensor, local: torch.Tensor, dim: int, group: dist.ProcessGroup) -> list[_Job]:
    """Divide the matrices of a tensor into one job per rank, or fewer if there are fewer matrices than ranks."""
    ranks, whole = group.size(), tensor.shape[dim]
    full = -(-whole // ranks)  # DTensor's split: equal parts, of which the last may be smaller or empty
    sizes = tuple(max(0, min(full, whole - rank * full)) for rank in range(ranks))
    assert local.shape[dim] == sizes[group.rank()], "a shard has another size than DTensor gives it"
    cuts = [len(local) * k // ranks for k in range(ranks + 1)]
    shape = (int(tensor.shape[-2]), int(tensor.shape[-1]))
    return [_Job(i, first, last, dim, shape, sizes) for first, last in pairwise(cuts) if last > first]


def _work(
    jobs: Sequence[_Job], local: Sequence[torch.Tensor], function: Function, group: dist.ProcessGroup, axis: str
) -> dict[int, torch.Tensor]:
    """Run the jobs on the ranks of `group`. Return this rank's shards of the results, by index of the tensor."""
    me, ranks = group.rank(), range(group.size())
    by_owner: list[list[_Job]] = [[] for _ in ranks]
    load = [0] * len(ranks)
    for job in sorted(jobs, key=lambda job: -job.cost):  # stable, so all ranks compute the same assignment
        owner = load.index(min(load))
        by_owner[owner].append(job)
        load[owner] += job.cost
    sent = [sum(job.numel_on(me) for job in owned) for owned in by_owner]
    received = [sum(job.numel_on(rank) for job in by_owner[me]) for rank in ranks]

    parts = [local[job.tensor][job.first : job.last].flatten() for owned in by_owner for job in owned]
    arrived = exchange_rows(torch.cat(parts), sent, received, group, axis).split(
        [job.numel_on(rank) for rank in ranks for job in by_owner[me]]
    )
    done: list[list[torch.Tensor]] = [[] for _ in ranks]
    for k, job in enumerate(by_owner[me]):
        pieces = [arrived[rank * len(by_owner[me]) + k].view(job.shape_on(rank)) for rank in ranks]
        result = function(torch.cat(pieces, job.dim))
        for rank, piece in zip(ranks, result.split(job.sizes, job.dim), strict=True):
            done[rank].append(piece.flatten())
    empty = parts[0][:0]
    results_sent = torch.cat([empty, *(piece for rank in done for piece in rank)])
    back = exchange_rows(results_sent, received, sent, group, axis)

    results = {job.tensor: torch.empty_like(local[job.tensor]) for job in jobs}
    own = [job for owned in by_owner for job in owned]
    for job, piece in zip(own, back.split([job.numel_on(me) for job in own]), strict=True):
        results[job.tensor][job.first : job.last] = piece.view(job.shape_on(me))
    return results
