"""The mesh: every axis along which ranks are arranged, and the few collectives the training loop itself needs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from omnizoo.config.schema import Config
from omnizoo.ops.device import BACKENDS
from omnizoo.parallel.layout import Layout, micro_batches, plan_layout
from omnizoo.parallel.process import Process

BUSY = ("ulysses", "ring", "ep")  # axes that tokens travel along


@dataclass(frozen=True)
class Mesh:
    """All ranks, seen as grids. Any axis may be 1; one process is a grid of ones.

        view     axes, outermost first                  what differs along an axis
        data     dp_replicate, dp_shard, ring, ulysses  dp_*: packs; ring, ulysses: the tokens of one pack
        packs    dp, sp                                 the same, with dp = dp_replicate x dp_shard, sp = ring x ulysses
        dense    replicate, shard                       shards of dense weights; shard = dp_shard x sp
        experts  replicate, ep_shard, ep                ep: whole experts; ep_shard: shards of them

        collective                                      along
        all-gather of weights, reduce-scatter of grads  shard (dense), ep_shard (experts)          FSDP2
        all-reduce of gradients                         replicate                                  HSDP
        all-to-all of heads against tokens              ulysses
        keys and values passed on                       ring
        all-to-all of tokens to their experts           ep

    The busiest axes are innermost, so that their traffic stays inside a node.
    """

    layout: Layout
    data: DeviceMesh
    packs: DeviceMesh
    dense: DeviceMesh
    experts: DeviceMesh
    device: torch.device

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def is_first(self) -> bool:
        """True on the one rank that talks to the user and writes shared files."""
        return self.rank == 0

    @property
    def dp_rank(self) -> int:
        """Which share of the packs is this rank's; the same for all ranks that share a pack."""
        return self.rank // self.layout.sp

    @property
    def dp_size(self) -> int:
        return self.layout.dp

    @property
    def sp_rank(self) -> int:
        """This rank's place among those that share a pack: ring_rank x ulysses + ulysses_rank."""
        return self.rank % self.layout.sp

    @property
    def fsdp(self) -> DeviceMesh:
        """What `fully_shard` gets for dense weights: 2-D (replicate, shard) for HSDP, 1-D otherwise."""
        return self.dense if self.layout.dp_replicate > 1 else self.dense["shard"]

    @property
    def expert_fsdp(self) -> DeviceMesh:
        """What `fully_shard` gets for experts: 2-D (replicate, ep_shard) for HSDP, 1-D otherwise."""
        return self.experts["replicate", "ep_shard"] if self.layout.dp_replicate > 1 else self.experts["ep_shard"]

    def group(self, axis: str) -> dist.ProcessGroup:
        """The ranks that differ from this one along `axis` (ring, ulysses, sp or ep) only."""
        view = {"ep": self.experts, "sp": self.packs}.get(axis, self.data)
        return view.get_group(axis)

    @property
    def world_group(self) -> dist.ProcessGroup:
        """All ranks."""
        group = dist.group.WORLD
        assert group is not None
        return group

    def axes_of(self, group: dist.ProcessGroup) -> list[str]:
        """The axes that `group` is along: several if they have the same ranks, `world` if it is none of them."""
        views = (self.dense, self.experts, self.data, self.packs)
        named = {axis: view.get_group(axis) for view in views for axis in view.mesh_dim_names or ()}
        wanted = dist.get_process_group_ranks(group)
        found = [axis for axis, known in named.items() if dist.get_process_group_ranks(known) == wanted]
        return found + ["world"] * (len(wanted) == self.layout.world)

    @staticmethod
    def ranks_of(group: dist.ProcessGroup) -> list[int]:
        return dist.get_process_group_ranks(group)

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sum over all ranks, in float64 on the host: counts stay exact and no accelerator is waited for."""
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor)
        return [float(v) for v in tensor]

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` summed over all ranks, in place and where it is: the host does not wait."""
        dist.all_reduce(tensor)
        return tensor

    def sum_along(self, axis: str, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` summed, in place and without gradients, over the ranks along `axis`."""
        group = self.group(axis)
        if group.size() > 1:
            dist.all_reduce(tensor, group=group)
        return tensor

    def gather(self, value: Any) -> list[Any]:
        """Each rank's value, on rank 0; an empty list elsewhere. For small, plain objects between our own ranks."""
        gathered: list[Any] = [None] * dist.get_world_size() if self.is_first else []
        dist.gather_object(value, gathered if self.is_first else None)
        return gathered

    def from_first(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        box = [value]
        dist.broadcast_object_list(box)
        return box[0]


def build_mesh(config: Config, process: Process) -> Mesh:
    """Arrange all processes of the world as `config.parallel` says."""
    layout = plan_layout(config.parallel, process.world_size)
    micro_batches(layout, config.train.global_batch, config.train.micro_batch)

    def grid(**axes: int) -> DeviceMesh:
        # Groups cost threads and sockets, and cannot be ended while DTensor's caches know them: meshes share grids.
        if tuple(axes.items()) not in process.grids:
            sizes, names = tuple(axes.values()), tuple(axes)
            # torch lets an axis of the whole world use the default group, FSDP's too; what is sent in the middle of a
            # block would wait there for weights that are on their way for the next.
            own: dict[int | str, Any] = {
                name: dist.get_backend() for name in BUSY if 1 < axes.get(name, 1) == process.world_size
            }
            if device_backend := BACKENDS.get(process.device.type):
                own = dict.fromkeys(names, device_backend)  # and no second one for the host, which only the world has
            made = init_device_mesh(process.device.type, sizes, mesh_dim_names=names, backend_override=own)
            process.grids[tuple(axes.items())] = made
        return process.grids[tuple(axes.items())]

    replicate = layout.dp_replicate
    mesh = Mesh(
        layout,
        grid(dp_replicate=replicate, dp_shard=layout.dp_shard, ring=layout.ring, ulysses=layout.ulysses),
        grid(dp=layout.dp, sp=layout.sp),
        grid(replicate=replicate, shard=layout.fsdp),
        grid(replicate=replicate, ep_shard=layout.ep_shard, ep=layout.ep),
        process.device,
    )
    if layout.ring > 1 and process.device.type in BACKENDS:
        # NCCL connects at the first message, which all ranks of a group must take part in; ours skip empty ones. Not a
        # barrier: where a group has a backend for the host, too, that would be the one to wait.
        dist.all_reduce(torch.zeros(1, device=process.device), group=mesh.group("ring"))
    return mesh
