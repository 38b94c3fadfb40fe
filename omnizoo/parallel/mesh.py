"""The mesh: every axis along which ranks are arranged, and the few collectives the training loop itself needs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from omnizoo.config.schema import Config
from omnizoo.parallel.layout import Layout, plan_layout
from omnizoo.parallel.process import Process


@dataclass(frozen=True)
class Mesh:
    """All ranks, seen as a grid. Any axis may be 1; one process is a 1 x 1 grid.

        axis          what differs along it                   collective
        dp_replicate  packs; copies of the sharded weights    all-reduce of gradients (HSDP)
        dp_shard      packs; shards of the weights            all-gather of weights, reduce-scatter of gradients (FSDP2)

    Ranks are laid out with dp_shard innermost, so that its traffic, the heavier, stays inside a node.
    """

    layout: Layout
    grid: DeviceMesh  # axes (dp_replicate, dp_shard)
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
        """Which share of the packs is this rank's."""
        return self.rank

    @property
    def dp_size(self) -> int:
        return self.layout.dp

    @property
    def fsdp(self) -> DeviceMesh:
        """What `fully_shard` gets: 2-D (replicate, shard) for HSDP, 1-D (shard) otherwise."""
        return self.grid if self.layout.dp_replicate > 1 else self.grid["dp_shard"]

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sum over all ranks, in float64 on the host: counts stay exact and no accelerator is waited for."""
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor)
        return [float(v) for v in tensor]

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

    def barrier(self) -> None:
        self.sum([0.0])


def build_mesh(config: Config, process: Process) -> Mesh:
    """Arrange all processes of the world as `config.parallel` says."""
    layout = plan_layout(config.parallel, process.world_size, config.train.global_batch, config.train.micro_batch)
    shape = (layout.dp_replicate, layout.dp_shard)
    grid = init_device_mesh(process.device.type, shape, mesh_dim_names=("dp_replicate", "dp_shard"))
    return Mesh(layout, grid, process.device)
