"""Apply a function to the full matrices of sharded tensors.

Each matrix is gathered on one rank. This rank computes the result and sends every rank its shard.
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
    dim: int  # the dim that is split over the ranks, -2 or -1
    shape: tuple[int, int]  # (m, n) of a full matrix
    sizes: tuple[int, ...]  # size of `dim` on each rank
    parts: int = 1  # number of blocks of rows that are processed separately

    @property
    def cost(self) -> int:
        """Estimated cost of the job, in arbitrary units."""
        m, n = self.shape
        return (self.last - self.first) * m * n * min(m, n)

    def shape_on(self, rank: int) -> tuple[int, int, int]:
        """Return the shape `[matrices, m, n]` of the shards that `rank` holds. They are smaller in `dim`."""
        count = self.last - self.first
        m, n = self.shape
        size = self.sizes[rank]
        return (count, size, n) if self.dim == -2 else (count, m, size)

    def numel_on(self, rank: int) -> int:
        """Return the number of elements in the shards that `rank` holds."""
        count, m, n = self.shape_on(rank)
        return count * m * n


@torch.no_grad()
def on_full_matrices(
    tensors: Sequence[torch.Tensor], function: Function, parts: Sequence[int] | None = None
) -> list[torch.Tensor]:
    """Apply `function` to the matrices in the last two dims of each tensor. Collective: all ranks must call it.

    A rank that holds full matrices, such as whole experts, processes them locally. Other matrices are assigned to the
    ranks that share them, balanced by cost. One all-to-all sends the shards to these ranks and another returns the
    results. The communication and computation of a rank are therefore proportional to the size of its shards.

    Args:
        tensors: Tensors `[..., m, n]`, sharded or not.
        function: Maps `[matrices, m, n]` to `[matrices, m, n]` and treats each matrix independently.
        parts: For each tensor, the number of equal blocks of rows that `function` treats as matrices (default: 1).

    Returns:
        This rank's shards of the results.
    """
    results: dict[int, torch.Tensor] = {}
    shared: dict[tuple[dist.ProcessGroup, str, torch.dtype], list[int]] = defaultdict(list)
    num_parts = [1] * len(tensors) if parts is None else parts
    local = []
    dims = []
    shapes = []
    for i, tensor in enumerate(tensors):
        group, axis, dim = _split(tensor)
        shard = local_shard(tensor)
        local.append(shard.reshape(math.prod(shard.shape[:-2]), *shard.shape[-2:]))
        dims.append(dim)
        shapes.append(shard.shape)
        if group is None:
            results[i] = _by_parts(function, local[i], num_parts[i]).view(shard.shape) if shard.numel() else shard
        else:
            shared[group, axis, shard.dtype].append(i)

    for (group, axis, _), members in shared.items():
        jobs = [job for i in members for job in _jobs(i, tensors[i], local[i], dims[i], group, num_parts[i])]
        for i, result in _work(jobs, local, function, group, axis).items():
            results[i] = result.view(shapes[i])
    return [results[i] for i in range(len(tensors))]


def _by_parts(function: Function, matrices: torch.Tensor, parts: int) -> torch.Tensor:
    """Apply `function` to `parts` equal blocks of rows of each matrix of `matrices [count, m, n]`."""
    count, m, n = matrices.shape
    blocks = matrices.reshape(count * parts, m // parts, n)
    return function(blocks).reshape(count, m, n)


def _split(tensor: torch.Tensor) -> tuple[dist.ProcessGroup | None, str, int]:
    """Return the group of ranks that share each matrix of `tensor`, its mesh axis, and the split dim (-2 or -1).

    If matrices are not split, return (None, "", 0).
    """
    splits = [(group, axis, dim) for group, axis, dim in splits_of(tensor) if dim >= -2]
    assert len(splits) <= 1, "a matrix is split along two axes"
    return splits[0] if splits else (None, "", 0)


def _jobs(
    i: int, tensor: torch.Tensor, local: torch.Tensor, dim: int, group: dist.ProcessGroup, parts: int
) -> list[_Job]:
    """Divide the matrices of a tensor into one job per rank, or fewer if there are fewer matrices than ranks."""
    ranks = group.size()
    full_size = tensor.shape[dim]
    shard_size = -(-full_size // ranks)  # DTensor's split: equal parts, of which the last may be smaller or empty
    sizes = tuple(max(0, min(shard_size, full_size - rank * shard_size)) for rank in range(ranks))
    assert local.shape[dim] == sizes[group.rank()], "a shard does not have the size that DTensor gives it"

    shape = (int(tensor.shape[-2]), int(tensor.shape[-1]))
    bounds = [len(local) * k // ranks for k in range(ranks + 1)]
    jobs = []
    for first, last in pairwise(bounds):
        if last > first:
            jobs.append(_Job(tensor=i, first=first, last=last, dim=dim, shape=shape, sizes=sizes, parts=parts))
    return jobs


def _work(
    jobs: Sequence[_Job], local: Sequence[torch.Tensor], function: Function, group: dist.ProcessGroup, axis: str
) -> dict[int, torch.Tensor]:
    """Run the jobs on the ranks of `group`. Return this rank's shards of the results, keyed by tensor index."""
    rank = group.rank()
    ranks = range(group.size())
    jobs_by_owner = _assign_jobs(jobs, len(ranks))
    local_jobs = jobs_by_owner[rank]
    all_jobs = [job for owned in jobs_by_owner for job in owned]
    sent = [sum(job.numel_on(rank) for job in owned) for owned in jobs_by_owner]
    received = [sum(job.numel_on(source) for job in local_jobs) for source in ranks]

    shards = [local[job.tensor][job.first : job.last].flatten() for job in all_jobs]
    received_sizes = [job.numel_on(source) for source in ranks for job in local_jobs]
    received_shards = exchange_rows(torch.cat(shards), sent, received, group, axis).split(received_sizes)
    results_by_rank: list[list[torch.Tensor]] = [[] for _ in ranks]
    for k, job in enumerate(local_jobs):
        pieces = [received_shards[source * len(local_jobs) + k].view(job.shape_on(source)) for source in ranks]
        result = _by_parts(function, torch.cat(pieces, job.dim), job.parts)
        for destination, piece in zip(ranks, result.split(job.sizes, job.dim), strict=True):
            results_by_rank[destination].append(piece.flatten())

    empty = shards[0][:0]
    results_sent = torch.cat([empty, *(piece for pieces in results_by_rank for piece in pieces)])
    returned = exchange_rows(results_sent, received, sent, group, axis)

    results = {job.tensor: torch.empty_like(local[job.tensor]) for job in jobs}
    returned_sizes = [job.numel_on(rank) for job in all_jobs]
    for job, piece in zip(all_jobs, returned.split(returned_sizes), strict=True):
        results[job.tensor][job.first : job.last] = piece.view(job.shape_on(rank))
    return results


def _assign_jobs(jobs: Sequence[_Job], ranks: int) -> list[list[_Job]]:
    """Return the jobs of each rank, balanced by cost. The sort is stable, so all ranks compute the same assignment."""
    jobs_by_owner: list[list[_Job]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for job in sorted(jobs, key=lambda job: -job.cost):
        owner = loads.index(min(loads))
        jobs_by_owner[owner].append(job)
        loads[owner] += job.cost
    return jobs_by_owner
