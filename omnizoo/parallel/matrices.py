"""A function of whole matrices, where matrices are sharded: each is put together on one rank, which does the work and
sends everyone their part of the result."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from omnizoo.parallel.exchange import exchange_rows
from omnizoo.parallel.shard import local_of

Function = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class _Job:
    """Matrices `first` to `last` of one tensor, `[..., m, n]` with dim `dim` split over the ranks as `sizes` says."""

    tensor: int
    first: int
    last: int
    dim: int
    shape: tuple[int, int]  # of a whole matrix
    sizes: tuple[int, ...]

    @property
    def cost(self) -> int:
        m, n = self.shape
        return (self.last - self.first) * m * n * min(m, n)

    def shape_on(self, rank: int) -> tuple[int, int, int]:
        m, n = self.shape
        here = self.sizes[rank]
        return self.last - self.first, *((here, n) if self.dim == -2 else (m, here))

    def numel_on(self, rank: int) -> int:
        count, m, n = self.shape_on(rank)
        return count * m * n


@torch.no_grad()
def on_whole_matrices(tensors: Sequence[torch.Tensor], function: Function) -> list[torch.Tensor]:
    """`function`, `[B, m, n] -> [B, m, n]`, of the matrices in the last two dims of each tensor; returns this rank's
    parts of the results.

    Where a rank holds whole matrices (experts spread by number), it works on its own. The others are dealt out, evenly
    by cost, to the ranks that share them: one all-to-all brings the parts there and one brings the results back, so a
    rank sends and computes what is its share, however many ranks there are. All ranks must call it.
    """
    results: dict[int, torch.Tensor] = {}
    shared: dict[tuple[dist.ProcessGroup, torch.dtype], list[int]] = defaultdict(list)
    local, dims, shapes = [], [], []
    for i, tensor in enumerate(tensors):
        group, dim = _split(tensor)
        here = local_of(tensor)
        local.append(here.reshape(math.prod(here.shape[:-2]), *here.shape[-2:]))
        dims.append(dim)
        shapes.append(here.shape)
        if group is None:
            results[i] = function(local[i]).view(here.shape) if here.numel() else here
        else:
            shared[group, here.dtype].append(i)
    for (group, _), members in shared.items():
        jobs = [job for i in members for job in _jobs(i, tensors[i], local[i], dims[i], group)]
        for i, result in _work(jobs, local, function, group).items():
            results[i] = result.view(shapes[i])
    return [results[i] for i in range(len(tensors))]


def _split(tensor: torch.Tensor) -> tuple[dist.ProcessGroup | None, int]:
    """The ranks that share each matrix of `tensor`, and the dim (-2 or -1) that is split; (None, 0): whole here."""
    found: list[tuple[dist.ProcessGroup, int]] = []
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        for axis, placement in enumerate(tensor.placements):
            assert isinstance(placement, Shard | Replicate), f"{placement} is no plain shard"
            if isinstance(placement, Shard) and mesh.size(axis) > 1 and placement.dim >= tensor.ndim - 2:
                found.append((mesh.get_group(axis), placement.dim - tensor.ndim))
    assert len(found) <= 1, "no layout splits a matrix along two axes"
    return found[0] if found else (None, 0)


def _jobs(i: int, tensor: torch.Tensor, local: torch.Tensor, dim: int, group: dist.ProcessGroup) -> list[_Job]:
    """The matrices of a tensor in as many runs as there are ranks, as far as there are that many."""
    ranks, whole = group.size(), tensor.shape[dim]
    full = -(-whole // ranks)  # as DTensor splits: equal parts, the last ones smaller or empty
    sizes = tuple(max(0, min(full, whole - rank * full)) for rank in range(ranks))
    assert local.shape[dim] == sizes[group.rank()], "a shard has another size than DTensor gives it"
    cuts = [len(local) * k // ranks for k in range(ranks + 1)]
    shape = (int(tensor.shape[-2]), int(tensor.shape[-1]))
    return [_Job(i, first, last, dim, shape, sizes) for first, last in pairwise(cuts) if last > first]


def _work(
    jobs: Sequence[_Job], local: Sequence[torch.Tensor], function: Function, group: dist.ProcessGroup
) -> dict[int, torch.Tensor]:
    """This rank's part of the results, by tensor."""
    me, ranks = group.rank(), range(group.size())
    by_owner: list[list[_Job]] = [[] for _ in ranks]
    load = [0] * len(ranks)
    for job in sorted(jobs, key=lambda job: -job.cost):  # stable: all ranks deal alike
        owner = load.index(min(load))
        by_owner[owner].append(job)
        load[owner] += job.cost
    sent = [sum(job.numel_on(me) for job in owned) for owned in by_owner]
    received = [sum(job.numel_on(rank) for job in by_owner[me]) for rank in ranks]

    parts = [local[job.tensor][job.first : job.last].flatten() for owned in by_owner for job in owned]
    arrived = exchange_rows(torch.cat(parts), sent, received, group).split(
        [job.numel_on(rank) for rank in ranks for job in by_owner[me]]
    )
    done: list[list[torch.Tensor]] = [[] for _ in ranks]
    for k, job in enumerate(by_owner[me]):
        pieces = [arrived[rank * len(by_owner[me]) + k].view(job.shape_on(rank)) for rank in ranks]
        result = function(torch.cat(pieces, job.dim))
        for rank, piece in zip(ranks, result.split(job.sizes, job.dim), strict=True):
            done[rank].append(piece.flatten())
    empty = parts[0][:0]
    back = exchange_rows(torch.cat([empty, *(piece for rank in done for piece in rank)]), received, sent, group)

    results = {job.tensor: torch.empty_like(local[job.tensor]) for job in jobs}
    own = [job for owned in by_owner for job in owned]
    for job, piece in zip(own, back.split([job.numel_on(me) for job in own]), strict=True):
        results[job.tensor][job.first : job.last] = piece.view(job.shape_on(me))
    return results
