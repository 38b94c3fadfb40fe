"""What a step computes: kernels that were chosen, in which precision, where, and how many FLOPs its matmuls have; and
the bytes that all other operators read and write."""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from omnizoo.ops.torch_private import tree_leaves, written_arguments

MATMULS = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "_scaled_mm")
ATTENTION = ("attention", "attn")
NOTHING_DONE = (
    "empty",
    "set_",
    "resize_",
    "record_stream",
    "lift",
    "device",
    "_unsafe_view",
)  # they take no time on a device
FEW = ("scatter_", "scatter_add_", "index_add_", "index_put_", "index_copy_")  # they write as much as they are given to
OVERWRITING = ("copy_", "fill_", "zero_")  # they do not read what they write to
PICKING = (
    "embedding",
    "index",
    "index_select",
    "gather",
)  # they read as much as they write, not all that they are given


@dataclass(frozen=True)
class Kernel:
    name: str
    dtype: str
    module: str  # the part of a layer it is in, layers of one kind together
    phase: str  # forward, backward (with what is computed again) or update


class Work:
    """Calls and FLOPs by kernel. Of attention the calls only: how much it has to do depends on lengths of samples."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device  # what runs elsewhere, such as on the host, does not count; None: all of it
        self.calls: Counter[Kernel] = Counter()
        self.flops: Counter[Kernel] = Counter()
        self.launched: Counter[str] = Counter()  # by phase: operators that the host starts on the device
        self.moved: Counter[str] = Counter()  # by phase: bytes that those besides matmuls and attention read and write

    def see(
        self,
        func: Any,
        args: tuple[Any, ...],
        module: str,
        phase: str,
        result: Any = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        name: str = func.overloadpacket.__name__
        if is_idle(func):
            return
        is_matmul = name in MATMULS
        written, read = tensors_of(func, args, result, kwargs or {})
        if self.device is None or any(x.device == self.device for x in (*written, *read)):
            self.launched[phase] += 1
            if not is_matmul and not any(part in name for part in ATTENTION):
                self.moved[phase] += moved_by(name, written, read)
        if not is_matmul and not any(part in name for part in ATTENTION):
            return
        tensors = [x for x in tree_leaves(args) if isinstance(x, torch.Tensor) and x.is_floating_point()]
        if not tensors:
            return
        kernel = Kernel(name, str(tensors[0].dtype).removeprefix("torch."), part_of(module), phase)
        self.calls[kernel] += 1
        if is_matmul:
            a, b = tensors[-2:] if name in ("addmm", "baddbmm") else tensors[:2]
            self.flops[kernel] += flops_of(name, a, b)


@cache
def is_idle(func: Any) -> bool:
    """Views, and memory that is taken without being written."""
    name: str = func.overloadpacket.__name__
    return func.namespace in ("c10d", "prim") or bool(func.is_view) or any(part in name for part in NOTHING_DONE)


def tensors_of(
    func: Any, args: tuple[Any, ...], result: Any, kwargs: Mapping[str, Any]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What an operator writes, and what it reads."""
    written = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
    if not written:  # it changes what it is given
        written = written_arguments(func, args, kwargs)
    name: str = func.overloadpacket.__name__
    read = args[1:] if name in OVERWRITING or name.endswith("_like") else args
    return written, [x for x in tree_leaves(read) if isinstance(x, torch.Tensor)]


def moved_by(name: str, written: Sequence[torch.Tensor], read: Sequence[torch.Tensor]) -> int:
    """Bytes that an operator reads and writes, as a kernel of its own."""
    out, given = sum(map(size_of, written)), list(map(size_of, read))
    if name == "all_gather_copy_in":  # FSDP's: of the buffer for all ranks it writes its own part
        return 2 * sum(given[:-1])
    if name in FEW:
        return 3 * sum(given[1:])
    return out + sum(min(size, out) if name in PICKING else size for size in given)


def size_of(tensor: torch.Tensor) -> int:
    """Bytes in memory: a row that is expanded is there once."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


def part_of(module: str) -> str:
    """`model.layers.*.mlp` for what is inside of it."""
    found = re.match(r".*\*\.[^.]+", module)
    return found[0] if found else module


def flops_of(name: str, a: torch.Tensor, b: torch.Tensor) -> int:
    """Of `a @ b`; where groups of rows have a matrix each, all rows together are as many as `a` has."""
    if name == "_grouped_mm" and a.ndim == b.ndim == 2:  # gradients of weights: groups of the inner dimension
        return 2 * a.shape[0] * a.shape[1] * b.shape[1]
    return 2 * math.prod(a.shape) * b.shape[-1]
