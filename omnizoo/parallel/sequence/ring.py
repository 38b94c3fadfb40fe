"""Ring attention: each rank keeps its queries, while keys and values are sent around the ring from rank to rank.

Partial softmax results are merged exactly, block by block. Backward recomputes the blocks. The gradients of keys and
values are sent around the ring as well, until they reach the rank that holds these keys and values.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from omnizoo.ops.attention.blocks import (
    Blocks,
    accumulator,
    add_sinks,
    attend_blocks,
    attend_blocks_backward,
    sinks_gradient,
)
from omnizoo.ops.attention.packed import Pattern, scale_of
from omnizoo.parallel.traffic_tag import sent_along


@dataclass(frozen=True)
class Ring:
    """Data of one rank for ring attention: token counts of all ranks, and attention blocks for its own queries."""

    group: dist.ProcessGroup
    rank: int
    tokens: Sequence[int]  # number of tokens of each rank
    blocks: Sequence[Blocks]  # for each rank, the blocks between this rank's queries and that rank's keys
    kv_repeats: Sequence[int] | None  # number of query heads of each kv head; None if it is the same for all kv heads

    @property
    def size(self) -> int:
        """Number of ranks in the ring."""
        return len(self.tokens)

    @sent_along("ring")
    def pass_on(self, sent: torch.Tensor, width: int, step: int) -> "Transfer":
        """Start sending a buffer to the next rank, and receiving the previous rank's buffer of the same `step`.

        `width` is the number of elements per token. After `size` steps, a buffer is back at the rank that it came from.
        """
        next_rank = (self.rank + 1) % self.size
        previous_rank = (self.rank - 1) % self.size
        received_tokens = self.tokens[(self.rank - step - 1) % self.size]
        received = sent.new_empty(received_tokens * width)
        operations = []
        if sent.numel():  # both sides have all token counts, so empty messages are skipped
            operations.append(dist.P2POp(dist.isend, sent, group=self.group, group_peer=next_rank))
        if received.numel():
            operations.append(dist.P2POp(dist.irecv, received, group=self.group, group_peer=previous_rank))
        works = dist.batch_isend_irecv(operations) if operations else []
        return Transfer(works, sent, received)


@dataclass(frozen=True)
class Transfer:
    """A send and a receive in progress."""

    works: Sequence[dist.Work]
    sent: torch.Tensor  # keeps the buffer alive until the send has finished
    received: torch.Tensor

    def wait(self) -> torch.Tensor:
        """Wait for both messages and return the received buffer."""
        for work in self.works:
            work.wait()
        return self.received


def ring_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ring: Ring, pattern: Pattern) -> torch.Tensor:
    """Return the attention output for this rank's queries, `[tokens, heads, width of v]`.

    `q`, `k` and `v` have the shape `[tokens, heads, width]` and contain this rank's tokens. Collective: all ranks of
    the ring must call it.
    """
    out: torch.Tensor = _RingAttention.apply(q, k, v, pattern.sinks, ring, pattern)  # type: ignore[no-untyped-call]
    return out


class _RingAttention(torch.autograd.Function):
    """Ring attention with a backward that recomputes the blocks from queries, keys, values and log-sum-exp."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        ring: Ring,
        pattern: Pattern,
    ) -> torch.Tensor:
        ctx.ring = ring
        ctx.scale = scale_of(q, pattern)
        ctx.softcap = pattern.softcap
        out = accumulator(q, *q.shape[:2], v.shape[-1])
        lse = accumulator(q, *q.shape[:2])
        width = k.shape[1] * (k.shape[2] + v.shape[2])
        current = _message(k, v)
        for step in range(ring.size):
            transfer = ring.pass_on(current, width, step) if step < ring.size - 1 else None
            keys, values = (repeat_kv(x, ring.kv_repeats) for x in _unflatten(current, k.shape[1:], v.shape[1:]))
            blocks = ring.blocks[(ring.rank - step) % ring.size]
            attend_blocks(q, keys, values, blocks, ctx.scale, ctx.softcap, out, lse)
            if transfer is not None:
                current = transfer.wait()
        if sinks is not None:
            add_sinks(out, lse, sinks)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ring: Ring = ctx.ring
        q, k, v, sinks, out, lse = ctx.saved_tensors
        width = k.shape[1] * (k.shape[2] + v.shape[2])
        dq = accumulator(q, *q.shape)
        current = _message(k, v)
        gradients: Transfer | None = None
        for step in range(ring.size):
            transfer = ring.pass_on(current, width, step) if step < ring.size - 1 else None
            keys, values = (repeat_kv(x, ring.kv_repeats) for x in _unflatten(current, k.shape[1:], v.shape[1:]))
            # One buffer for both gradients, because they are sent together.
            step_grads = accumulator(k, keys.numel() + values.numel())
            dk, dv = _unflatten(step_grads, keys.shape[1:], values.shape[1:])
            blocks = ring.blocks[(ring.rank - step) % ring.size]
            attend_blocks_backward(grad_out, q, keys, values, out, lse, blocks, ctx.scale, ctx.softcap, dq, dk, dv)
            if ring.kv_repeats is not None:
                step_grads = _message(sum_repeated(dk, ring.kv_repeats), sum_repeated(dv, ring.kv_repeats))
            # Wait here and not earlier, so that the transfer overlaps with the computation of this block.
            if gradients is not None:
                step_grads = step_grads.add_(gradients.wait())
            gradients = ring.pass_on(step_grads, width, step)
            if transfer is not None:
                current = transfer.wait()
        assert gradients is not None
        dk, dv = _unflatten(gradients.wait(), k.shape[1:], v.shape[1:])
        dsinks = None if sinks is None else sinks_gradient(grad_out, out, lse, sinks)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks, None, None


@sent_along("ring")
def _message(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return keys and values in one buffer, so that they are sent in one message."""
    return torch.cat([k.flatten(), v.flatten()])


def _unflatten(flat: torch.Tensor, k_shape: torch.Size, v_shape: torch.Size) -> tuple[torch.Tensor, torch.Tensor]:
    """Split a buffer of `_message` into views of keys and values.

    `k_shape` and `v_shape` are the shapes of one token.
    """
    tokens = flat.numel() // (k_shape.numel() + v_shape.numel())
    k, v = flat.split([tokens * k_shape.numel(), tokens * v_shape.numel()])
    return k.view(tokens, *k_shape), v.view(tokens, *v_shape)


def repeat_kv(x: torch.Tensor, repeats: Sequence[int] | None) -> torch.Tensor:
    """Repeat each kv head for its query heads, if kv heads have different numbers of query heads.

    If the numbers are equal, `repeats` is None, because attention kernels support this directly.
    """
    if repeats is None:
        return x
    return torch.cat([head.expand(-1, n, -1) for head, n in zip(x.split(1, 1), repeats, strict=True)], 1)


def sum_repeated(x: torch.Tensor, repeats: Sequence[int]) -> torch.Tensor:
    """Sum the gradients of repeated kv heads. This is the backward of `repeat_kv`."""
    return torch.cat([heads.sum(1, keepdim=True) for heads in x.split(list(repeats), 1)], 1)
