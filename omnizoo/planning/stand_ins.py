"""Stand-ins for functions that cannot run on a simulated device, and a context manager that installs them.

- Attention: on this device torch would decompose it into matmuls, unlike on any accelerator. The stand-in calls the
  operator of the fused kernel, which saves queries, keys, values, output and log-sum-exp.
- Recurrent layers: the packages with their kernels need not be installed. The stand-ins allocate and save the same
  tensors as these kernels.
- Routing: the rows of each expert depend on values. The stand-in balances experts, or sends `imbalance` times the even
  share of rows to this rank.
- Data: this rank has loaded all packs of the step.
- Host memory: offloaded tensors are counted, but not stored.
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

from omnizoo.balancing import redistribute
from omnizoo.balancing.pack_metadata import PackTable, decode_messages, encode_message
from omnizoo.ops.device import PLANNED
from omnizoo.ops.experts import Pairs
from omnizoo.ops.linear_attention import kernels
from omnizoo.ops.linear_attention.chunked_rules import CHUNK
from omnizoo.ops.memory import offload
from omnizoo.ops.memory.offload import DeviceCopy
from omnizoo.ops.torch_private import FakeTensor, replaced
from omnizoo.parallel.experts import Dispatch
from omnizoo.parallelize import memory as memory_checks

UNLIMITED = 2**62  # bytes


@contextmanager
def stand_ins(world: int, rank: int, imbalance: float = 1.0) -> Iterator["HostMemory"]:
    """Context manager: install all stand-ins for a dry run, and yield the counter of host memory."""
    memory = HostMemory()
    split, swap_tensors = Dispatch.split, torch.utils.swap_tensors

    def even_split(self: Dispatch, pairs: Pairs, arriving: torch.Tensor) -> tuple[list[int], list[int]]:
        split(self, pairs, arriving)  # for its operators and its host sync; the result is not used
        count, ranks = len(pairs.order), self.group.size()
        sent = shares(count, ranks)
        return sent, shares(int(count * imbalance), ranks)

    def from_this_rank(message: bytes, group: object = None) -> list[Any]:
        own = np.frombuffer(message, np.uint8)
        told, (note,) = decode_messages([own])
        nothing = PackTable(told.packs[:0], told.lengths[:0], told.items[:0], told.spans[:0])
        empty = np.frombuffer(encode_message(nothing, note), np.uint8)
        return [own if other == rank else empty for other in range(world)]

    def to_itself(to: Sequence[Sequence[Any]], group: object = None) -> list[list[Any]]:
        tensors = [
            (header, {name: torch.as_tensor(array) for name, array in arrays.items()}) for header, arrays in to[rank]
        ]
        return [tensors if other == rank else [] for other in range(world)]

    def swap(here: torch.Tensor, there: torch.Tensor) -> None:
        # `Module.to` swaps fake parameters with their moved versions, which fails if a weak reference to them exists.
        # If neither device nor dtype changes, the swap is not needed.
        if (here.device, here.dtype) != (there.device, there.dtype):
            swap_tensors(here, there)  # type: ignore[no-untyped-call]  # torch's own has no types

    with replaced(
        (torch.utils, "swap_tensors", swap),
        (F, "scaled_dot_product_attention", attention),
        (kernels, "find_kernel", lambda module, name, layers: STATE_KERNELS[name]),
        (Dispatch, "split", even_split),
        (redistribute, "gather_bytes", from_this_rank),
        (redistribute, "exchange_payloads", to_itself),
        (
            memory_checks,
            "total_memory",
            lambda device: UNLIMITED,
        ),  # a plan reports that a step does not fit, instead of raising
        (offload, "HostBuffers", partial(PlannedHost, memory)),
        (offload, "available_memory", lambda: UNLIMITED),
        (memory_checks, "available_memory", lambda: UNLIMITED),
        (FakeTensor, "is_pinned", lambda tensor, *_: True),  # for offloaded weights on the host
    ):
        yield memory


class HostMemory:
    """Counts the bytes of fake and offloaded tensors in host memory, and their peak."""

    def __init__(self) -> None:
        self.bytes = self.peak = 0
        self._seen: set[int] = set()  # keys of live storages

    def see(self, tensor: torch.Tensor) -> None:
        """Count a fake tensor on the host, such as an offloaded weight, until its storage is freed."""
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
        """Add `size` bytes, which may be negative, and update the peak."""
        self.bytes += size
        self.peak = max(self.peak, self.bytes)


class PlannedHost:
    """Stand-in for `ops.memory.offload.HostBuffers`, which counts host memory and copies nothing."""

    def __init__(self, memory: HostMemory, device: torch.device) -> None:
        self.memory, self.device = memory, device

    def copy_to_host(self, tensor: torch.Tensor) -> "FakeOffloadedTensor":
        taken = FakeOffloadedTensor(tensor.shape, tensor.stride(), tensor.dtype)
        self.memory.change(tensor.nbytes)
        weakref.finalize(taken, self.memory.change, -tensor.nbytes)
        return taken

    def copy_to_device(self, taken: "FakeOffloadedTensor") -> DeviceCopy:
        return DeviceCopy(torch.empty_strided(taken.shape, taken.stride, dtype=taken.dtype, device=self.device))

    def refill(self, taken: "FakeOffloadedTensor", tensor: torch.Tensor) -> None:
        pass

    def put_back(self, taken: "FakeOffloadedTensor", tensor: torch.Tensor) -> None:
        pass


@dataclass(eq=False)
class FakeOffloadedTensor:
    """Metadata of a tensor in simulated host memory."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


def shares(count: int, ranks: int) -> list[int]:
    """Split `count` rows evenly over the ranks."""
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
    """Stand-in for `F.scaled_dot_product_attention`, which calls the operators of the fused kernels."""
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
    """Stand-in for a recurrent kernel of `fla`, which allocates and saves the same tensors.

    Forward saves the inputs and, for the delta rule, a matrix per chunk. Backward recomputes the states before all
    chunks.
    """

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
        both = [given[1].new_empty(ctx.states) for _ in range(2)]  # states and their gradients
        back = [torch.empty_like(x) for x in given]
        del both
        return None, None, None if ctx.state is None else torch.empty_like(ctx.state), *back


def _rule(has_matrix: bool, *given: torch.Tensor, initial_state: torch.Tensor | None, **options: Any) -> Any:
    """Call the stand-in with the arguments of a kernel of `fla`."""
    return _Rule.apply(has_matrix, len(options["cu_seqlens"]) - 1, initial_state, *given)  # type: ignore[no-untyped-call]


class _Convolution(torch.autograd.Function):
    """Stand-in for `causal_conv1d_fn`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight, bias)
        return torch.empty_like(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return tuple(None if x is None else torch.empty_like(x) for x in ctx.saved_tensors)


# Stand-ins by the names of the functions that ops/linear_attention/kernels.py imports.
STATE_KERNELS: dict[str, Any] = {
    "chunk_gated_delta_rule": partial(_rule, True),
    "chunk_kda": partial(_rule, True),
    "chunk_simple_gla": partial(_rule, False),
    "causal_conv1d_fn": _Convolution.apply,
}
