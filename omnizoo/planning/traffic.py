"""What a step sends: each kind of collective along each axis of the mesh, with bytes, and how far it goes."""

import sys
from collections import Counter
from dataclasses import dataclass
from types import FrameType

import torch

from omnizoo.parallel.collectives import CollectiveCounter
from omnizoo.parallel.mesh import Mesh

# Axes may have the same ranks: then what sends tells them apart.
SENDERS = {
    "/parallel/ulysses.py": "ulysses",
    "/parallel/ring.py": "ring",
    "/parallel/route.py": "world",
    "/parallel/exchange.py": "ep",
    "/parallel/experts.py": "ep",
}


@dataclass(frozen=True)
class Collective:
    op: str
    axis: str
    inside_node: bool
    host: bool  # between hosts, of values that never were on a device
    ranks: int = 1  # that take part
    in_a_node: int = 1  # of them, in the node of this rank


class Traffic(CollectiveCounter):
    """Calls and bytes (of what this rank puts in) by collective."""

    def __init__(self, mesh: Mesh, per_node: int) -> None:
        super().__init__()
        self.mesh, self.per_node = mesh, per_node
        self.count: Counter[Collective] = Counter()
        self.sent: Counter[Collective] = Counter()

    def add(self, name: str, group: torch.distributed.ProcessGroup, device: torch.device, size: int) -> None:
        super().add(name, group, device, size)
        nodes = Counter(rank // self.per_node for rank in self.mesh.ranks_of(group))
        axis, near = self._axis(name, group, device), nodes[self.mesh.rank // self.per_node]
        collective = Collective(name, axis, len(nodes) == 1, device.type == "cpu", nodes.total(), near)
        self.count[collective] += 1
        self.sent[collective] += size

    def _axis(self, name: str, group: torch.distributed.ProcessGroup, device: torch.device) -> str:
        possible = self.mesh.axes_of(group)
        if device.type == "cpu" and "world" in possible:
            return "world"
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and len(possible) > 1:
            for file, axis in SENDERS.items():
                if frame.f_code.co_filename.endswith(file) and axis in possible:
                    return axis
            frame = frame.f_back
        return "world" if name == "all-to-all" and "world" in possible else possible[0]
