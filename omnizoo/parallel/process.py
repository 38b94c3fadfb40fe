"""Starting and ending this process's part in the run: rank, device, store and process group.

One process is a world of one: the same code path, with an in-memory store and no network.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from omnizoo.ops.device import backend_for, is_host, pick_device
from omnizoo.ops.host_memory import keep_freed_memory
from omnizoo.ops.torch_private import abort_groups, register_fake_collectives
from omnizoo.parallel.rendezvous import meeting_point, place_in_world


@dataclass(frozen=True)
class Process:
    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    grids: dict[tuple[tuple[str, int], ...], DeviceMesh] = field(default_factory=dict)  # made so far, by axes and sizes


@contextmanager
def process_group(
    place: tuple[int, int, int] | None = None,
    store: dist.Store | None = None,
    on_failure: Callable[[int, BaseException], None] | None = None,
    device: str | None = None,
) -> Iterator[Process]:
    """Join the world for the length of the block: as (rank, world size, local rank), or as the environment says; on a
    `device` of that kind, or on what there is.

    `on_failure(rank, error)` is told what ended the block before any other rank can notice that this one is gone.
    """
    rank, world_size, local_rank = place or place_in_world() or (0, 1, 0)
    own = pick_device(local_rank, device)
    if is_host(own):
        keep_freed_memory()
    store = store or _store(rank, world_size)
    # Bound to its device, a group connects at once, and those made of it share its connections.
    bound = None if is_host(own) else own
    dist.init_process_group(backend_for(own), store=store, rank=rank, world_size=world_size, device_id=bound)
    failed = False
    try:
        yield Process(rank, world_size, local_rank, own)
    except BaseException as error:
        failed = True
        if world_size > 1:
            error.add_note(f"on rank {rank} of {world_size}")  # the last line of a traceback
        if on_failure is not None:
            on_failure(rank, error)
        raise
    finally:
        if failed and not is_host(own):
            # An orderly end would wait, up to ten minutes, for collectives that other ranks will never join.
            abort_groups()
        else:
            dist.destroy_process_group()


@contextmanager
def pretended_group(rank: int, world_size: int, device: torch.device) -> Iterator[Process]:
    """For the length of the block, one process that takes itself for rank `rank` of `world_size`, on `device`.

    Nothing is sent: collectives return at once. What they give is of the right shape, and means nothing.
    """
    register_fake_collectives()
    backend = f"cpu:fake,{device.type}:fake"
    dist.init_process_group(backend, store=dist.HashStore(), rank=rank, world_size=world_size)
    try:
        yield Process(rank, world_size, 0, device)
    finally:
        dist.destroy_process_group()


def _store(rank: int, world_size: int) -> dist.Store:
    if world_size == 1:
        return dist.HashStore()
    host, port = meeting_point(world_size)
    if (fd := os.environ.get("OMNIZOO_STORE_FD")) is not None:
        store = dist.TCPStore(host, port, world_size, is_master=True, master_listen_fd=int(fd))
    else:
        hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # by torchrun's agent
        store = dist.TCPStore(host, port, world_size, is_master=rank == 0 and not hosted)
    # After a restart by torchrun the store still holds the keys of the killed attempt; a prefix per attempt hides them.
    return dist.PrefixStore(f"attempt{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
