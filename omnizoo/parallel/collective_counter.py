"""Count the collectives and point-to-point messages of a block of code, and their bytes."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from omnizoo.ops.torch_private import TorchDispatchMode, tree_leaves
from omnizoo.parallel.fsdp.cpu_collectives import GATHERING, SCATTERING

# c10d operator -> common name. Receives are not listed, because the matching sends are counted.
NAMES = {
    "allreduce_": "all-reduce",
    "_allgather_base_": "all-gather",
    "allgather_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_": "reduce-scatter",
    "alltoall_base_": "all-to-all",
    "alltoall_": "all-to-all",
    "broadcast_": "broadcast",
    "send": "send",
}

DIRECT = {GATHERING: "all-gather", SCATTERING: "reduce-scatter"}  # message tag -> collective that it implements on CPUs


class CollectiveCounter(TorchDispatchMode):
    """Context manager that counts, for each kind of collective, the calls and the bytes of this rank's inputs.

    Collectives over a single rank are not counted, because they do not communicate.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[Any] = Counter()
        self.bytes: Counter[Any] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.count(func, args)
        return func(*args, **(kwargs or {}))

    def count(self, func: Any, args: tuple[Any, ...]) -> None:
        """Count an operator if it is a collective. Other dispatch modes can call this for the operators they handle."""
        if func.namespace != "c10d":
            return
        name = NAMES.get(func._schema.name.removeprefix("c10d::"))
        if name is None:
            return
        # Out-of-place collectives have the arguments (output, input), in-place collectives a single tensor argument.
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor | list)]
        boxed = [arg for arg in args if isinstance(arg, torch.ScriptObject)]
        group = dist.ProcessGroup.unbox(boxed[0]) if boxed else dist.group.WORLD
        assert group is not None
        if group.size() == 1:
            return
        if name == "send" and args[3] in DIRECT:
            self._count_direct(args[2], args[3], tensors[0], group)
            return
        is_out_of_place = len(tensors) > 1 and name not in ("all-reduce", "broadcast", "send")
        argument = tensors[1] if is_out_of_place else tensors[0]
        inputs = [t for t in tree_leaves(argument) if isinstance(t, torch.Tensor)]
        self.add(name, group, inputs[0].device, sum(t.nbytes for t in inputs))

    def _count_direct(self, destination: int, tag: int, message: Any, group: dist.ProcessGroup) -> None:
        """Count a collective that consists of point-to-point messages. Only its message to the next rank is counted."""
        if destination != (group.rank() + 1) % group.size():
            return
        messages_per_input = 1 if tag == GATHERING else group.size()
        self.add(DIRECT[tag], group, message[0].device, message[0].nbytes * messages_per_input)

    def add(self, name: str, group: dist.ProcessGroup, device: torch.device, size: int) -> None:
        """Count one collective over `group` with an input of `size` bytes on `device`."""
        self.calls[name] += 1
        self.bytes[name] += size
