"""Compare the cost of FSDP2's collectives on CPUs: gloo's own, and those of omnizoo/parallel/fsdp/cpu_collectives.py.

torchrun --standalone --nproc-per-node 2 benchmarks/gloo.py
"""

import resource
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from omnizoo.parallel.fsdp.cpu_collectives import DirectAllGather, DirectReduceScatter

NUMBERS, ROUNDS = 6_300_000, 8  # 25 MB: two blocks of width 512


def cpu_seconds() -> float:
    """Return the CPU seconds of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def measure(name: str, run: Callable[[], object]) -> None:
    """Print CPU and wall milliseconds per call on rank 0. Collective: all ranks must call it."""
    for _ in range(2):
        run()
    dist.barrier()
    cpu, wall = cpu_seconds(), time.perf_counter()
    for _ in range(ROUNDS):
        run()
    cpu, wall = cpu_seconds() - cpu, time.perf_counter() - wall
    if dist.get_rank() == 0:
        print(f"{name:24} {1000 * cpu / ROUNDS:6.1f} ms of CPU {1000 * wall / ROUNDS:7.1f} ms", flush=True)


def main() -> None:
    dist.init_process_group("gloo")
    group, ranks = dist.group.WORLD, dist.get_world_size()
    assert group is not None
    size = NUMBERS // ranks
    full, shard = torch.randn(size * ranks), torch.randn(size)
    gather, scatter = DirectAllGather(), DirectReduceScatter()
    measure("all-gather, gloo", lambda: dist.all_gather_single(full, shard))
    measure("all-gather, messages", lambda: gather(full, shard, group))
    measure("reduce-scatter, gloo", lambda: dist.reduce_scatter_single(shard, full))
    measure("reduce-scatter, messages", lambda: scatter(shard, full, group, dist.ReduceOp.SUM))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
