"""Count the collectives of a step and their bytes, by operation and mesh axis, within a node or across nodes."""

from collections import Counter
from dataclasses import dataclass

import torch
import torch.distributed as dist

from omnizoo.config.errors import UserError
from omnizoo.parallel.collective_counter import CollectiveCounter
from omnizoo.parallel.mesh import Mesh
from omnizoo.parallel.traffic_tag import tagged_axes


@dataclass(frozen=True)
class Collective:
    """A kind of collective. The counts of collectives of the same kind are added."""

    op: str  # such as "all-gather"
    axis: str  # mesh axis
    inside_node: bool  # whether all participating ranks are on one node
    host: bool  # whether the tensors are on the CPU
    ranks: int = 1  # number of participating ranks
    in_a_node: int = 1  # number of participating ranks on the node of this rank


class Traffic(CollectiveCounter):
    """Counts the calls of each kind of collective, and the bytes of this rank's inputs."""

    def __init__(self, mesh: Mesh, per_node: int) -> None:
        super().__init__()
        self.mesh, self.per_node = mesh, per_node

    def add(self, name: str, group: dist.ProcessGroup, device: torch.device, size: int) -> None:
        """Count one collective with an input of `size` bytes."""
        ranks_by_node = Counter(rank // self.per_node for rank in dist.get_process_group_ranks(group))
        this_node = self.mesh.rank // self.per_node
        collective = Collective(
            op=name,
            axis=self._axis(name, group, device),
            inside_node=len(ranks_by_node) == 1,
            host=device.type == "cpu",
            ranks=ranks_by_node.total(),
            in_a_node=ranks_by_node[this_node],
        )
        self.calls[collective] += 1
        self.bytes[collective] += size

    def _axis(self, name: str, group: dist.ProcessGroup, device: torch.device) -> str:
        """Return the mesh axis of a collective.

        If several axes consist of the ranks of `group`, this is the axis in the enclosing `sent_along` block.

        Raises:
            UserError: If several axes are possible, and no tag selects one of them.
        """
        possible_axes = self.mesh.axes_of(group)
        if "world" in possible_axes and device.type == "cpu" != self.mesh.device.type:
            return "world"  # the only group with a CPU backend
        tagged = [axis for axis in tagged_axes() if axis in possible_axes]
        if len(possible_axes) > 1 and len(tagged) != 1:
            raise UserError(
                f"plan: {name} has no tag, so its axis is unknown: {', '.join(possible_axes)} have the same ranks. "
                "Call it inside `with omnizoo.parallel.traffic_tag.sent_along(AXIS)`."
            )
        axis = tagged[0] if tagged else possible_axes[0]
        # If ep is 1, experts are sharded over the same ranks as dense weights.
        is_like_dense = axis == "ep_shard" and "shard" in possible_axes
        return "shard" if is_like_dense else axis
