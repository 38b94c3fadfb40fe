"""The device mesh: all axes along which ranks are arranged, and the collectives that the training loop itself uses."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from omnizoo.config.schema import Config
from omnizoo.ops.device import BACKENDS
from omnizoo.parallel.groups import AXES_INSIDE_BLOCKS, group_along, mesh_of_groups, ranks_along
from omnizoo.parallel.layout import Layout, check_step, plan_layout
from omnizoo.parallel.process import Process
from omnizoo.parallel.traffic_tag import sent_along


@dataclass(frozen=True)
class Mesh:
    """All ranks, arranged as several device meshes ("views"). Axes may have size 1. With one process, all axes do.

        view     axes, outermost first                  contents that differ along an axis
        data     dp_replicate, dp_shard, ring, ulysses  dp_*: packs; ring, ulysses: the tokens of one pack
        packs    dp, sp                                 the same, with dp = dp_replicate x dp_shard, sp = ring x ulysses
        dense    replicate, shard                       shards of dense weights; shard = dp_shard x sp
        experts  replicate, ep_shard, ep                ep: whole experts; ep_shard: shards of them

        collective                                      along
        all-gather of weights, reduce-scatter of grads  shard (dense), ep_shard (experts)          FSDP2
        all-reduce of gradients                         replicate                                  HSDP
        all-to-all of heads and tokens                  ulysses
        send and receive of keys and values             ring
        all-to-all of tokens to their experts           ep

    The axes with the most communication are innermost, so that their collectives stay within a node.
    """

    layout: Layout
    dense: DeviceMesh
    experts: DeviceMesh
    groups: Mapping[str, dist.ProcessGroup]  # of the axes inside blocks: ulysses, ring, sp and ep
    device: torch.device

    @property
    def rank(self) -> int:
        """Global rank of this process."""
        return dist.get_rank()

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which logs and writes shared files."""
        return self.rank == 0

    @property
    def dp_rank(self) -> int:
        """Data-parallel rank. It determines the packs of this rank. Ranks that share a pack have the same value."""
        return self.rank // self.layout.sp

    @property
    def sp_rank(self) -> int:
        """Rank among the ranks that share a pack: ring_rank x ulysses + ulysses_rank."""
        return self.rank % self.layout.sp

    @property
    def fsdp(self) -> DeviceMesh:
        """Device mesh for `fully_shard` of dense weights: 2-D (replicate, shard) for HSDP, 1-D otherwise."""
        return self.dense if self.layout.dp_replicate > 1 else self.dense["shard"]

    @property
    def expert_fsdp(self) -> DeviceMesh:
        """Device mesh for `fully_shard` of experts: 2-D (replicate, ep_shard) for HSDP, 1-D otherwise."""
        if self.layout.dp_replicate > 1:
            return self.experts["replicate", "ep_shard"]
        return self.experts["ep_shard"]

    def group(self, axis: str) -> dist.ProcessGroup:
        """Return the process group of the ranks that differ from this one only along `axis` (ring, ulysses, sp, ep)."""
        return self.groups[axis]

    @property
    def world_group(self) -> dist.ProcessGroup:
        """Process group of all ranks."""
        group = dist.group.WORLD
        assert group is not None
        return group

    def axes_of(self, group: dist.ProcessGroup) -> list[str]:
        """Return the axes whose group has the same ranks as `group`, and also `world` if `group` has all ranks."""
        ranks = dist.get_process_group_ranks(group)
        axes = [axis for axis, axis_ranks in self._ranks_by_axis.items() if axis_ranks == ranks]
        if len(ranks) == self.layout.world:
            axes.append("world")
        return axes

    @cached_property
    def _ranks_by_axis(self) -> dict[str, list[int]]:
        """The ranks that differ from this one only along an axis, keyed by axis."""
        ranks_by_axis = {}
        for sizes in views_of(self.layout).values():
            for axis in sizes:
                ranks_by_axis[axis] = next(ranks for ranks in ranks_along(axis, sizes) if self.rank in ranks)
        return ranks_by_axis

    @sent_along("world")
    def sum(self, values: Sequence[float]) -> list[float]:
        """Return the sums of `values` over all ranks, computed in float64 on the host.

        Counts stay exact, and no host sync is needed. Collective: all ranks must call it.
        """
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor)
        return [float(v) for v in tensor]

    @sent_along("world")
    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum `tensor` over all ranks, in place, on its device and without a host sync.

        Collective: all ranks must call it.
        """
        dist.all_reduce(tensor)
        return tensor

    def sum_along(self, axis: str, tensor: torch.Tensor) -> torch.Tensor:
        """Sum `tensor` over the ranks along `axis`, in place and without autograd.

        Collective: all ranks along `axis` must call it.
        """
        group = self.group(axis)
        if group.size() > 1:
            with sent_along(axis):
                dist.all_reduce(tensor, group=group)
        return tensor

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks on rank 0, and an empty list elsewhere. Collective: all ranks must call it.

        The values are pickled, so they should be small, plain objects.
        """
        gathered: list[Any] = [None] * dist.get_world_size() if self.is_first else []
        dist.gather_object(value, gathered if self.is_first else None)
        return gathered

    def from_first(self, value: Any) -> Any:
        """Return the value of rank 0 on all ranks. Collective: all ranks must call it."""
        values = [value]
        dist.broadcast_object_list(values)
        return values[0]


def build_mesh(config: Config, process: Process) -> Mesh:
    """Build the mesh of all ranks for the layout in `config.parallel`. Collective: all ranks must call it.

    Args:
        config: Its `parallel` section sets the layout. `train.packs_per_step` and `train.micro_batch` must fit it.
        process: This process, from `process_group`.

    Returns:
        The mesh. Device meshes with equal axes are reused by later calls in the same process.

    Raises:
        UserError: If the layout does not fit the world size, the packs per step or the micro-batch.
    """
    layout = plan_layout(config.parallel, process.world_size)
    check_step(layout, config.train)
    views = views_of(layout)
    groups = {}
    for sizes in views.values():
        for axis in sizes:
            if axis in AXES_INSIDE_BLOCKS:
                groups[axis] = group_along(axis, sizes, process)
    mesh = Mesh(
        layout=layout,
        dense=mesh_of_groups(views["dense"], process),
        experts=mesh_of_groups(views["experts"], process),
        groups=groups,
        device=process.device,
    )
    if layout.ring > 1 and process.device.type in BACKENDS:
        # NCCL connects a group at its first operation. All ranks of the group must join this operation. The ring cannot
        # be this operation, because it skips empty messages.
        dist.all_reduce(torch.zeros(1, device=process.device), group=mesh.group("ring"))
    return mesh


def views_of(layout: Layout) -> dict[str, dict[str, int]]:
    """Return the sizes of the axes of each view of the mesh, outermost first."""
    return {
        "data": {
            "dp_replicate": layout.dp_replicate,
            "dp_shard": layout.dp_shard,
            "ring": layout.ring,
            "ulysses": layout.ulysses,
        },
        "packs": {"dp": layout.dp, "sp": layout.sp},
        "dense": {"replicate": layout.dp_replicate, "shard": layout.fsdp},
        "experts": {"replicate": layout.dp_replicate, "ep_shard": layout.ep_shard, "ep": layout.ep},
    }
