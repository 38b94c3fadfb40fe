"""Cost of FSDP2's collectives between CPUs: gloo's own against omnizoo/parallel/fsdp/cpu_collectives.py.

torchrun --standalone --nproc-per-node 2 benchmarks/gloo.py
"""

import resource
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from omnizoo.parallel.fsdp.cpu_collectives import DirectAllGather, DirectReduceScatter

NUMBERS, ROUNDS = 6_300_000, 8  # 25 MB: two blocks of width 512


def seconds_of_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def measure(name: str, run: Callable[[], object]) -> None:
    for _ in range(2):
        run()
    dist.barrier()
    cpu, wall = seconds_of_cpu(), time.perf_counter()
    for _ in range(ROUNDS):
        run()
    cpu, wall = seconds_of_cpu() - cpu, time.perf_counter() - wall
    if dist.get_rank() == 0:
        print(f"{name:24} {1000 * cpu / ROUNDS:6.1f} ms of CPU {1000 * wall / ROUNDS:7.1f} ms", flush=True)


def main() -> None:
    dist.init_process_group("gloo")
    group, ranks = dist.group.WORLD, dist.get_world_size()
    assert group is not None
    size = NUMBERS // ranks
    whole, part = torch.randn(size * ranks), torch.randn(size)
    gather, scatter = DirectAllGather(), DirectReduceScatter()
    measure("all-gather, gloo", lambda: dist.all_gather_single(whole, part))
    measure("all-gather, messages", lambda: gather(whole, part, group))
    measure("reduce-scatter, gloo", lambda: dist.reduce_scatter_single(part, whole))
    measure("reduce-scatter, messages", lambda: scatter(part, whole, group, dist.ReduceOp.SUM))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
