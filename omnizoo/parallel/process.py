"""Join and leave the distributed run. It assigns a rank, a device and a process group to this process.

A single process runs the same code with world size 1, an in-memory store and no network.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from omnizoo.ops.device import backend_for, is_host, pick_device
from omnizoo.ops.memory.host_allocator import keep_freed_memory
from omnizoo.ops.torch_private import abort_groups, register_fake_collectives
from omnizoo.parallel.parent_death import end_with_torchrun
from omnizoo.parallel.rendezvous import place_in_world
from omnizoo.parallel.store import JOIN_TIMEOUT, open_store


@dataclass(frozen=True)
class Process:
    """Rank, world size and device of this process."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    # Caches of device meshes, keyed by the names and sizes of their axes, and of process groups, keyed by whether their
    # collectives run inside blocks, and by the sets of ranks.
    meshes: dict[tuple[tuple[str, int], ...], DeviceMesh] = field(default_factory=dict)
    groups: dict[tuple[bool, tuple[tuple[int, ...], ...]], dist.ProcessGroup] = field(default_factory=dict)


@contextmanager
def process_group(
    place: tuple[int, int, int] | None = None,
    store: dist.Store | None = None,
    on_failure: Callable[[int, BaseException], None] | None = None,
    device: str | None = None,
    join_timeout: float = JOIN_TIMEOUT,
    stop_requested: Callable[[], bool] = lambda: False,
) -> Iterator[Process]:
    """Context manager: join the default process group on entry and leave it on exit.

    Collective: all ranks must call it.

    Args:
        place: (rank, world size, local rank). Default: the values in the environment, as set by our launcher, torchrun
            or Slurm; without them, a single process.
        store: Store that the ranks connect through. Default: a TCP store at `MASTER_ADDR` and `MASTER_PORT`.
        on_failure: Called with the rank and the error if the block raises, before this rank leaves the group and other
            ranks fail as a consequence.
        device: Device type, such as "cpu" or "cuda". Default: the accelerator if there is one, otherwise the CPU.
        join_timeout: Seconds to wait for the other ranks.
        stop_requested: Returns whether to stop waiting for the other ranks.

    Yields:
        Rank, world size and device of this process.

    Raises:
        UserError: If the environment variables for rank, world size or address are missing or invalid.
        TrainingError: If a rank does not join in time.
    """
    end_with_torchrun()
    rank, world_size, local_rank = place or place_in_world() or (0, 1, 0)
    process_device = pick_device(local_rank, device)
    if is_host(process_device):
        keep_freed_memory()
    store = store or open_store(rank, world_size, join_timeout, stop_requested)
    # A group that is bound to its device connects eagerly, and its subgroups share the connections.
    bound_device = None if is_host(process_device) else process_device
    dist.init_process_group(
        backend_for(process_device), store=store, rank=rank, world_size=world_size, device_id=bound_device
    )
    failed = False
    try:
        yield Process(rank=rank, world_size=world_size, local_rank=local_rank, device=process_device)
    except BaseException as error:
        failed = True
        if world_size > 1:
            error.add_note(f"on rank {rank} of {world_size}")  # becomes the last line of the traceback
        if on_failure is not None:
            on_failure(rank, error)
        raise
    finally:
        if failed and not is_host(process_device):
            # A regular shutdown would wait up to ten minutes for collectives that other ranks will never join.
            abort_groups()
        else:
            dist.destroy_process_group()


@contextmanager
def fake_process_group(rank: int, world_size: int, device: torch.device) -> Iterator[Process]:
    """Context manager: simulate rank `rank` of `world_size` on `device` in a single process.

    Collectives send nothing and return immediately. Their outputs have the right shapes and arbitrary values.
    """
    register_fake_collectives()
    backend = f"cpu:fake,{device.type}:fake"
    dist.init_process_group(backend, store=dist.HashStore(), rank=rank, world_size=world_size)
    try:
        yield Process(rank=rank, world_size=world_size, local_rank=0, device=device)
    finally:
        dist.destroy_process_group()
