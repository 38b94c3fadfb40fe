"""Stand-ins for what has no meaning on a device that is not there, and a context that puts them in place.

Attention: torch would take it apart into plain products there, which no accelerator does; the stand-in is the fused
kernel's own operator, which saves queries, keys, values, output and log-sum-exp. Layers with a state: their kernels are
packages that the machine of the plan need not have; the stand-ins make and keep what these do. Routing: who gets how
many rows only a real router knows; here experts are used evenly, or this rank gets `imbalance` times its share. Data:
this rank is the one that has read all packs of the step.
"""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from omnizoo.assembly import parallelize
from omnizoo.data import deal
from omnizoo.data.told import Told, read_messages, write_message
from omnizoo.ops import offload, state_kernels
from omnizoo.ops.chunked_rules import CHUNK
from omnizoo.ops.device import PLANNED
from omnizoo.ops.experts import Pairs
from omnizoo.ops.torch_private import FakeTensor
from omnizoo.parallel.experts import Dispatch
from omnizoo.planning.backend import replaced

UNLIMITED = 2**62  # bytes


@contextmanager
def stand_ins(world: int, rank: int, imbalance: float = 1.0) -> Iterator["HostMemory"]:
    """Everything that is replaced during a dry run, and put back after it; what is kept on the host meanwhile."""
    memory = HostMemory()
    split, swap_tensors = Dispatch.split, torch.utils.swap_tensors

    def even_split(self: Dispatch, pairs: Pairs, arriving: torch.Tensor) -> tuple[list[int], list[int]]:
        split(self, pairs, arriving)  # the same operators, and the same wait
        count, ranks = len(pairs.order), self.group.size()
        sent = shares(count, ranks)
        return sent, shares(int(count * imbalance), ranks)

    def from_this_rank(message: bytes, group: object = None) -> list[Any]:
        own = np.frombuffer(message, np.uint8)
        told, (note,) = read_messages([own])
        nothing = Told(told.packs[:0], told.lengths[:0], told.items[:0], told.spans[:0])
        empty = np.frombuffer(write_message(nothing, note), np.uint8)
        return [own if other == rank else empty for other in range(world)]

    def to_itself(to: Sequence[Sequence[Any]], group: object = None) -> list[list[Any]]:
        tensors = [
            (header, {name: torch.as_tensor(array) for name, array in arrays.items()}) for header, arrays in to[rank]
        ]
        return [tensors if other == rank else [] for other in range(world)]

    def swap(here: torch.Tensor, there: torch.Tensor) -> None:
        # `Module.to` swaps fake parameters for what they become, and cannot if anyone watches them: on the way to where
        # they are, nothing is to be done.
        if (here.device, here.dtype) != (there.device, there.dtype):
            swap_tensors(here, there)  # type: ignore[no-untyped-call]  # torch's own has no types

    with replaced(
        (torch.utils, "swap_tensors", swap),
        (F, "scaled_dot_product_attention", attention),
        (state_kernels, "find", lambda module, name, what: STATE_KERNELS[name]),
        (Dispatch, "split", even_split),
        (deal, "gather_bytes", from_this_rank),
        (deal, "exchange_payloads", to_itself),
        (parallelize, "total_memory", lambda device: UNLIMITED),  # what does not fit is to be reported, not refused
        (offload, "Host", memory.host),
        (offload, "available_memory", lambda: UNLIMITED),
        (parallelize, "available_memory", lambda: UNLIMITED),
        (FakeTensor, "is_pinned", lambda tensor, *_: True),  # those of the host, where weights may be
    ):
        yield memory


class HostMemory:
    """What a step keeps on the host, of which nothing is real."""

    def __init__(self) -> None:
        self.bytes = self.peak = 0
        self._seen: set[int] = set()  # storages

    def host(self, device: torch.device) -> "PlannedHost":
        return PlannedHost(self, device)

    def see(self, tensor: torch.Tensor) -> None:
        """Of a tensor of the host that is not real: weights that are there, and what is made of them."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._seen:
            self._seen.add(key)
            self.change(storage.nbytes())
            weakref.finalize(storage, self._end, key, storage.nbytes())

    def _end(self, key: int, size: int) -> None:
        self._seen.remove(key)
        self.change(-size)

    def change(self, size: int) -> None:
        self.bytes += size
        self.peak = max(self.peak, self.bytes)


class PlannedHost:
    """In the place of `ops.offload.Host`."""

    def __init__(self, memory: HostMemory, device: torch.device) -> None:
        self.memory, self.device = memory, device

    def take(self, tensor: torch.Tensor) -> "Taken":
        taken = Taken(tensor.shape, tensor.stride(), tensor.dtype)
        self.memory.change(tensor.nbytes)
        weakref.finalize(taken, self.memory.change, -tensor.nbytes)
        return taken

    def give(self, taken: "Taken") -> tuple[torch.Tensor, None]:
        return torch.empty_strided(taken.shape, taken.stride, dtype=taken.dtype, device=self.device), None

    def refill(self, taken: "Taken", tensor: torch.Tensor) -> None:
        pass

    def put_back(self, taken: "Taken", tensor: torch.Tensor) -> None:
        pass

    def wait(self, event: None) -> None:
        pass


@dataclass(eq=False)
class Taken:
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


def shares(count: int, ranks: int) -> list[int]:
    return [count // ranks + (rank < count % ranks) for rank in range(ranks)]


_TORCHS_OWN = F.scaled_dot_product_attention


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """`F.scaled_dot_product_attention` as the fused kernels of accelerators do it."""
    if query.device.type != PLANNED:
        return _TORCHS_OWN(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if attn_mask is None:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        out: torch.Tensor = flash(query, key, value, dropout_p, is_causal, scale=scale)[0]
        return out
    heads = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(heads, 1) if heads > 1 else x for x in (key, value))
    bias = attn_mask if attn_mask.is_floating_point() else torch.zeros_like(attn_mask, dtype=query.dtype)
    bias = bias.expand(*query.shape[:-1], key.shape[-2])
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    with_bias: torch.Tensor = efficient(query, key, value, bias, True, dropout_p, is_causal, scale=scale)[0]
    return with_bias


class _Rule(torch.autograd.Function):
    """A state along runs of tokens, as `fla` does it: what it is given is kept, for the delta rule also a matrix per
    chunk; backward makes the states before all chunks once more."""

    @staticmethod
    def forward(
        ctx: Any, has_matrix: bool, runs: int, state: torch.Tensor | None, *given: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        (_, tokens, heads, wide), deep = given[2].shape, given[1].shape[-1]
        matrix = [given[1].new_empty(1, tokens, heads, CHUNK)] if has_matrix else []
        ctx.save_for_backward(*given, *matrix)
        ctx.given, ctx.state = len(given), state
        ctx.states = (-(-tokens // CHUNK) + runs, heads, deep, wide)
        return torch.empty_like(given[2]), given[2].new_empty(runs, heads, deep, wide, dtype=torch.float32)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        given = ctx.saved_tensors[: ctx.given]
        both = [given[1].new_empty(ctx.states) for _ in range(2)]  # states, and their gradients
        back = [torch.empty_like(x) for x in given]
        del both
        return None, None, None if ctx.state is None else torch.empty_like(ctx.state), *back


def _rule(has_matrix: bool, *given: torch.Tensor, initial_state: torch.Tensor | None, **options: Any) -> Any:
    return _Rule.apply(has_matrix, len(options["cu_seqlens"]) - 1, initial_state, *given)  # type: ignore[no-untyped-call]


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight, bias)
        return torch.empty_like(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return tuple(None if x is None else torch.empty_like(x) for x in ctx.saved_tensors)


# By the names that ops/state_kernels.py looks for.
STATE_KERNELS: dict[str, Any] = {
    "chunk_gated_delta_rule": partial(_rule, True),
    "chunk_kda": partial(_rule, True),
    "chunk_simple_gla": partial(_rule, False),
    "causal_conv1d_fn": _Convolution.apply,
}
