"""What a step computes: kernels that were chosen, in which precision, where, and how many FLOPs its matmuls have."""

import math
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from omnizoo.ops.torch_private import tree_leaves

MATMULS = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "_scaled_mm")
ATTENTION = ("attention", "attn")


@dataclass(frozen=True)
class Kernel:
    name: str
    dtype: str
    module: str  # the part of a layer it is in, layers of one kind together
    phase: str  # forward, backward (with what is computed again) or update


class Work:
    """Calls and FLOPs by kernel. Of attention the calls only: how much it has to do depends on lengths of samples."""

    def __init__(self) -> None:
        self.calls: Counter[Kernel] = Counter()
        self.flops: Counter[Kernel] = Counter()

    def see(self, func: Any, args: tuple[Any, ...], module: str, phase: str) -> None:
        name: str = func.overloadpacket.__name__
        is_matmul = name in MATMULS
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


def part_of(module: str) -> str:
    """`model.layers.*.mlp` for what is inside of it."""
    found = re.match(r".*\*\.[^.]+", module)
    return found[0] if found else module


def flops_of(name: str, a: torch.Tensor, b: torch.Tensor) -> int:
    """Of `a @ b`; where groups of rows have a matrix each, all rows together are as many as `a` has."""
    if name == "_grouped_mm" and a.ndim == b.ndim == 2:  # gradients of weights: groups of the inner dimension
        return 2 * a.shape[0] * a.shape[1] * b.shape[1]
    return 2 * math.prod(a.shape) * b.shape[-1]
