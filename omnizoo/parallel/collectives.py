"""Counts what is sent: every collective and point-to-point message of a block of code, with its bytes."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch

from omnizoo.ops.torch_private import TorchDispatchMode, tree_leaves

# c10d operator -> the name people use. Receives are the other end of sends, and not counted again.
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


class CollectiveCounter(TorchDispatchMode):
    """`with CollectiveCounter() as counter`: `calls` and `bytes` (of what this rank puts in) by name of collective.

    Collectives over one rank are not communication and not counted.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.namespace == "c10d":
            name = NAMES.get(func._schema.name.removeprefix("c10d::"))
            if name is not None:
                self._count(name, func, args)
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, func: Callable[..., Any], args: tuple[Any, ...]) -> None:
        # The input of an out-of-place collective is its second tensor argument; in-place ones have one.
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor | list)]
        groups = [arg for arg in args if isinstance(arg, torch.ScriptObject)]
        if groups and torch.distributed.ProcessGroup.unbox(groups[0]).size() == 1:
            return
        given = tensors[1] if len(tensors) > 1 and name not in ("all-reduce", "broadcast", "send") else tensors[0]
        self.calls[name] += 1
        self.bytes[name] += sum(t.nbytes for t in tree_leaves(given) if isinstance(t, torch.Tensor))
