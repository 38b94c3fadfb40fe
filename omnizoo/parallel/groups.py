"""Process groups of the mesh axes.

Each set of ranks that communicates has one group. Axes of size 1 share one group per rank, and an axis without
collectives has none, because a communicator needs memory and connections.
"""

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from omnizoo.ops.device import BACKENDS
from omnizoo.ops.torch_private import can_split
from omnizoo.parallel.process import Process

# Axes whose collectives run inside blocks, on tokens. They never share a group with FSDP, because they would wait for
# the all-gather that prefetches the weights of the next block.
AXES_INSIDE_BLOCKS = ("ulysses", "ring", "sp", "ep")

AxisSizes = Mapping[str, int]  # name of an axis -> its size; the outermost axis is first


def ranks_along(axis: str, sizes: AxisSizes) -> list[list[int]]:
    """Return the sets of ranks that differ only along `axis`. Each rank is in one of them.

    Args:
        axis: Name of the axis.
        sizes: Sizes of all axes of a view of the mesh.
    """
    grid = torch.arange(math.prod(sizes.values())).view(*sizes.values())
    dim = list(sizes).index(axis)
    ranks: list[list[int]] = grid.movedim(dim, -1).reshape(-1, sizes[axis]).tolist()
    return ranks


def group_along(axis: str, sizes: AxisSizes, process: Process) -> dist.ProcessGroup:
    """Return the group of the ranks that differ from this one only along `axis`.

    Groups are cached in `process`, because they use threads and sockets. Collective: all ranks must call it.

    Args:
        axis: Name of the axis.
        sizes: Sizes of all axes of a view of the mesh.
        process: This process.
    """
    world = dist.group.WORLD
    assert world is not None
    is_inside_block = axis in AXES_INSIDE_BLOCKS and sizes[axis] > 1
    if sizes[axis] == process.world_size and not is_inside_block:
        return world
    ranks = ranks_along(axis, sizes)
    key = (is_inside_block, tuple(map(tuple, ranks)))
    if key not in process.groups:
        process.groups[key] = _new_group(ranks, axis, process)
    return process.groups[key]


def mesh_of_groups(sizes: AxisSizes, process: Process) -> DeviceMesh:
    """Return a device mesh of all ranks with these axes. Collective: all ranks must call it.

    DTensor's caches keep meshes alive, so meshes with equal axes are reused.
    """
    key = tuple(sizes.items())
    if key not in process.meshes:
        process.meshes[key] = DeviceMesh.from_group(
            [group_along(axis, sizes, process) for axis in sizes],
            process.device.type,
            mesh=torch.arange(process.world_size).view(*sizes.values()),
            mesh_dim_names=tuple(sizes),
        )
    return process.meshes[key]


def _new_group(ranks: Sequence[list[int]], axis: str, process: Process) -> dist.ProcessGroup:
    """Create one group for each set of ranks, and return the group of this rank."""
    description = f"mesh_{axis}"
    backend = BACKENDS.get(process.device.type)
    if can_split(dist.group.WORLD, process.device):
        # One call per axis, without a rendezvous. Without `backend`, every group would also get a CPU backend, which
        # needs one.
        device_backend = f"{process.device.type}:{backend}"
        split: dist.ProcessGroup | None = dist.split_group(
            split_ranks=list(ranks), group_desc=description, backend=device_backend
        )
        assert split is not None, "each rank is in one of the groups"
        return split

    local_group: dist.ProcessGroup | None = None
    for members in ranks:
        group = dist.new_group(members, backend=backend, group_desc=description)
        if process.rank in members:
            local_group = group
    assert local_group is not None, "each rank is in one of the groups"
    return local_group
