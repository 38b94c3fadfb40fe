"""Stand-ins for functions that cannot run on a simulated device, and a context manager that installs them.

- Attention: on a simulated device, torch would decompose attention into matmuls. The stand-in calls the operator of the
  fused kernel, as on an accelerator. This operator saves queries, keys, values, output and log-sum-exp.
- Recurrent layers: the packages that contain their kernels may not be installed. The stand-ins allocate and save the
  same tensors as these kernels.
- Routing: the number of rows of each expert depends on unknown values. With the stand-in, the simulated rank
  sends the same number of rows to each rank, and receives `imbalance` times as many rows as it sends.
- Data: the simulated rank loads all packs of the step, because there are no other ranks.
- Host memory: the bytes of offloaded tensors are counted, but the tensors are not stored.
"""

import math
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

UNLIMITED = 2**62  # bytes of memory, so that no check of the available memory fails


@contextmanager
def stand_ins(world: int, rank: int, imbalance: float = 1.0) -> Iterator["HostMemory"]:
    """Context manager: install all stand-ins for a dry run, and yield the counter of host memory.

    Args:
        world: World size.
        rank: The simulated rank.
        imbalance: Rows that this rank's experts receive / rows that they receive with balanced routing.
    """
    memory = HostMemory()
    split = Dispatch.split
    swap_tensors = torch.utils.swap_tensors

    def even_split(self: Dispatch, pairs: Pairs, arriving: torch.Tensor) -> tuple[list[int], list[int]]:
        """Return the numbers of rows that this rank sends to each rank and receives from each rank."""
        split(self, pairs, arriving)  # the result is not used; the call counts operators and the host sync
        count, ranks = len(pairs.order), self.group.size()
        sent = shares(count, ranks)
        received = shares(int(count * imbalance), ranks)
        return sent, received

    def from_this_rank(message: bytes, group: object = None) -> list[Any]:
        """Return the gathered messages: the message of this rank, and messages without packs from the other ranks."""
        local_message = np.frombuffer(message, np.uint8)
        table, (status,) = decode_messages([local_message])
        empty_table = PackTable(
            packs=table.packs[:0],
            lengths=table.lengths[:0],
            counts=table.counts[:0],
            items=table.items[:0],
            spans=table.spans[:0],
        )
        empty_message = np.frombuffer(encode_message(empty_table, status), np.uint8)
        return [local_message if other == rank else empty_message for other in range(world)]

    def to_itself(payloads_by_rank: Sequence[Sequence[Any]], group: object = None) -> list[list[Any]]:
        """Return the payloads that this rank sends to itself, and nothing from the other ranks."""
        received = []
        for header, arrays in payloads_by_rank[rank]:
            tensors = {name: torch.as_tensor(array) for name, array in arrays.items()}
            received.append((header, tensors))
        return [received if other == rank else [] for other in range(world)]

    def swap(old: torch.Tensor, new: torch.Tensor) -> None:
        # `Module.to` swaps fake parameters with copies. This fails if there are weak references to the parameters. The
        # swap is skipped if neither the device nor the dtype changes.
        if (old.device, old.dtype) != (new.device, new.dtype):
            swap_tensors(old, new)  # type: ignore[no-untyped-call]  # the function of torch has no types

    with replaced(
        (torch.utils, "swap_tensors", swap),
        (F, "scaled_dot_product_attention", attention),
        (kernels, "find_kernel", lambda module, name, layers: STATE_KERNELS[name]),
        (Dispatch, "split", even_split),
        (redistribute, "gather_bytes", from_this_rank),
        (redistribute, "exchange_payloads", to_itself),
        # Without these limits, checks of the memory raise no error, and the plan reports whether the step fits.
        (memory_checks, "total_memory", lambda device: UNLIMITED),
        (offload, "HostBuffers", partial(PlannedHost, memory)),
        (offload, "available_memory", lambda: UNLIMITED),
        (memory_checks, "available_memory", lambda: UNLIMITED),
        (FakeTensor, "is_pinned", lambda tensor, *_: True),  # FSDP checks this for offloaded weights on the host
    ):
        yield memory


class HostMemory:
    """Counts the bytes of fake and offloaded tensors in host memory, and their peak."""

    def __init__(self) -> None:
        self.bytes = self.peak = 0
        self._counted: set[int] = set()  # keys of live storages that are counted

    def see(self, tensor: torch.Tensor) -> None:
        """Count a fake tensor on the host, such as an offloaded weight, until its storage is freed."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._counted:
            self._counted.add(key)
            self.change(storage.nbytes())
            weakref.finalize(storage, self._end, key, storage.nbytes())

    def _end(self, key: int, size: int) -> None:
        """Subtract the size of a storage that is freed."""
        self._counted.remove(key)
        self.change(-size)

    def change(self, size: int) -> None:
        """Add `size` bytes (may be negative) and update the peak."""
        self.bytes += size
        self.peak = max(self.peak, self.bytes)


class PlannedHost:
    """Stand-in for `ops.memory.offload.HostBuffers` that counts host memory and copies nothing."""

    def __init__(self, memory: HostMemory, device: torch.device) -> None:
        self.memory, self.device = memory, device

    def copy_to_host(self, tensor: torch.Tensor) -> "FakeOffloadedTensor":
        """Count the bytes of a copy in host memory, until the copy is freed."""
        offloaded = FakeOffloadedTensor(tensor.shape, tensor.stride(), tensor.dtype)
        self.memory.change(tensor.nbytes)
        weakref.finalize(offloaded, self.memory.change, -tensor.nbytes)
        return offloaded

    def copy_to_device(self, offloaded: "FakeOffloadedTensor") -> DeviceCopy:
        """Allocate a tensor on the device for the copy of an offloaded tensor."""
        tensor = torch.empty_strided(offloaded.shape, offloaded.stride, dtype=offloaded.dtype, device=self.device)
        return DeviceCopy(tensor)

    def refill(self, offloaded: "FakeOffloadedTensor", tensor: torch.Tensor) -> None:
        """Do nothing, because the copy in host memory keeps its size."""

    def put_back(self, offloaded: "FakeOffloadedTensor", tensor: torch.Tensor) -> None:
        """Do nothing, because the copy in host memory keeps its size."""


@dataclass(eq=False)
class FakeOffloadedTensor:
    """Metadata of a tensor in simulated host memory."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


def shares(count: int, ranks: int) -> list[int]:
    """Split `count` rows evenly over the ranks, and return the number of rows of each rank."""
    return [count // ranks + (rank < count % ranks) for rank in range(ranks)]


_TORCH_ATTENTION = F.scaled_dot_product_attention


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
    """Stand-in for `F.scaled_dot_product_attention` that calls the operators of the fused kernels."""
    if query.device.type != PLANNED:
        return _TORCH_ATTENTION(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if attn_mask is None:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        out: torch.Tensor = flash(query, key, value, dropout_p, is_causal, scale=scale)[0]
        return out
    queries_per_key = query.shape[1] // key.shape[1]  # more than 1 in grouped-query attention
    key, value = (x.repeat_interleave(queries_per_key, 1) if queries_per_key > 1 else x for x in (key, value))
    bias = attn_mask if attn_mask.is_floating_point() else torch.zeros_like(attn_mask, dtype=query.dtype)
    bias = bias.expand(*query.shape[:-1], key.shape[-2])
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    with_bias: torch.Tensor = efficient(query, key, value, bias, True, dropout_p, is_causal, scale=scale)[0]
    return with_bias


class _Rule(torch.autograd.Function):
    """Stand-in for a recurrent kernel of `fla` that allocates and saves the same tensors.

    Forward saves the inputs and, for the delta rule, one matrix per chunk. Backward recomputes the state before each
    chunk.
    """

    @staticmethod
    def forward(
        ctx: Any, has_matrix: bool, runs: int, state: torch.Tensor | None, *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Allocate the output and the final states.

        Args:
            ctx: The context of autograd.
            has_matrix: Whether the kernel saves one matrix per chunk, as for the delta rule.
            runs: Number of samples, each with a separate state.
            state: Initial states, or None.
            *inputs: Query, key, value, and other inputs.
        """
        _, key, value, *_ = inputs
        _, tokens, heads, value_width = value.shape
        key_width = key.shape[-1]
        matrix = [key.new_empty(1, tokens, heads, CHUNK)] if has_matrix else []
        ctx.save_for_backward(*inputs, *matrix)
        ctx.num_inputs = len(inputs)
        ctx.state = state
        num_chunks = math.ceil(tokens / CHUNK)
        ctx.states_shape = (num_chunks + runs, heads, key_width, value_width)
        final_states = (runs, heads, key_width, value_width)
        return torch.empty_like(value), value.new_empty(final_states, dtype=torch.float32)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        """Allocate the states, their gradients, and the gradients of the inputs."""
        inputs = ctx.saved_tensors[: ctx.num_inputs]
        states = [inputs[1].new_empty(ctx.states_shape) for _ in range(2)]  # states and their gradients
        input_grads = [torch.empty_like(x) for x in inputs]
        del states
        state_grad = None if ctx.state is None else torch.empty_like(ctx.state)
        return None, None, state_grad, *input_grads


def _rule(has_matrix: bool, *inputs: torch.Tensor, initial_state: torch.Tensor | None, **options: Any) -> Any:
    """Call the stand-in with the arguments of a kernel of `fla`. `has_matrix` is described in `_Rule.forward`."""
    runs = len(options["cu_seqlens"]) - 1
    return _Rule.apply(has_matrix, runs, initial_state, *inputs)  # type: ignore[no-untyped-call]


class _Convolution(torch.autograd.Function):
    """Stand-in for `causal_conv1d_fn` that allocates and saves the same tensors."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight, bias)
        return torch.empty_like(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return tuple(None if x is None else torch.empty_like(x) for x in ctx.saved_tensors)


# Stand-ins, keyed by the names of the functions that ops/linear_attention/kernels.py imports.
STATE_KERNELS: dict[str, Any] = {
    "chunk_gated_delta_rule": partial(_rule, True),
    "chunk_kda": partial(_rule, True),
    "chunk_simple_gla": partial(_rule, False),
    "causal_conv1d_fn": _Convolution.apply,
}
