"""Count the kernels of a step by dtype and module, the FLOPs of matmuls, and the bytes that other kernels move."""

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
# Parts of the names of attention operators, and of operators that take no time on a device.
ATTENTION = ("attention", "attn")
IDLE = ("empty", "set_", "resize_", "record_stream", "lift", "device", "_unsafe_view")
# Operators that write as many bytes as they read from their source.
SPARSE_WRITES = ("scatter_", "scatter_add_", "index_add_", "index_put_", "index_copy_")
OVERWRITING = ("copy_", "fill_", "zero_")  # operators that do not read the tensor that they write to
GATHERING = ("embedding", "index", "index_select", "gather")  # operators that read as many bytes as they write


@dataclass(frozen=True)
class Kernel:
    """A matmul or attention operator in one module and phase."""

    name: str  # name of the operator
    dtype: str
    module: str  # child of a layer, with `*` for the layer number, such as `model.layers.*.mlp`
    phase: str  # forward, backward (including recomputation) or update


class OpCounter:
    """Counts calls and FLOPs by kernel. For attention, FLOPs are not counted, because they depend on sample lengths."""

    def __init__(self, device: torch.device) -> None:
        self.device = device  # launches and bytes on other devices, such as the CPU, are not counted
        self.calls: Counter[Kernel] = Counter()
        self.flops: Counter[Kernel] = Counter()
        self.launched: Counter[str] = Counter()  # by phase: number of operators launched on the device
        self.moved: Counter[str] = Counter()  # by phase: bytes that non-matmul, non-attention operators read and write

    def see(
        self,
        func: Any,
        args: tuple[Any, ...],
        module: str,
        phase: str,
        result: Any = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Count one call of an operator.

        Args:
            func: The operator.
            args: Its positional arguments.
            module: The running module, with `*` for layer numbers.
            phase: The phase of the step.
            result: What the operator returned.
            kwargs: Its keyword arguments.
        """
        name: str = func.overloadpacket.__name__
        if is_idle(func):
            return
        is_matmul = name in MATMULS
        is_plain = not is_matmul and not any(part in name for part in ATTENTION)
        written, read = tensors_of(func, args, result, kwargs or {})
        if any(x.device == self.device for x in (*written, *read)):
            self.launched[phase] += 1
            if is_plain:
                self.moved[phase] += moved_by(name, written, read)
        if is_plain:
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
    """Whether the operator takes no time on a device: views, uninitialized allocations, and collectives."""
    name: str = func.overloadpacket.__name__
    return func.namespace in ("c10d", "prim") or bool(func.is_view) or any(part in name for part in IDLE)


def tensors_of(
    func: Any, args: tuple[Any, ...], result: Any, kwargs: Mapping[str, Any]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the tensors that an operator writes, and the tensors that it reads."""
    written = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
    if not written:  # in-place operators without a result
        written = written_arguments(func, args, kwargs)
    name: str = func.overloadpacket.__name__
    read = args[1:] if name in OVERWRITING or name.endswith("_like") else args
    return written, [x for x in tree_leaves(read) if isinstance(x, torch.Tensor)]


def moved_by(name: str, written: Sequence[torch.Tensor], read: Sequence[torch.Tensor]) -> int:
    """Return the number of bytes that an operator reads and writes, assuming no fusion with other operators."""
    written_bytes = sum(size_of(tensor) for tensor in written)
    read_bytes = [size_of(tensor) for tensor in read]
    if name == "all_gather_copy_in":  # this operator of FSDP writes only this rank's part of the buffer
        return 2 * sum(read_bytes[:-1])
    if name in SPARSE_WRITES:
        return 3 * sum(read_bytes[1:])
    if name in GATHERING:
        read_bytes = [min(size, written_bytes) for size in read_bytes]
    return written_bytes + sum(read_bytes)


def size_of(tensor: torch.Tensor) -> int:
    """Return the size of a tensor in bytes. An expanded tensor has the size of its storage."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


def part_of(module: str) -> str:
    """Return the child of a layer that contains `module`: `model.layers.*.mlp.up` -> `model.layers.*.mlp`."""
    match = re.match(r".*\*\.[^.]+", module)
    return match[0] if match else module


def flops_of(name: str, a: torch.Tensor, b: torch.Tensor) -> int:
    """Return the FLOPs of `a @ b`. In a grouped matmul, each row of `a` is multiplied by one matrix of `b`."""
    if name == "_grouped_mm" and a.ndim == b.ndim == 2:  # gradients of weights: groups split the inner dimension
        return 2 * a.shape[0] * a.shape[1] * b.shape[1]
    return 2 * math.prod(a.shape) * b.shape[-1]
