"""Ring attention: each rank keeps its queries, while keys and values travel around the ring from rank to rank.

The softmax over all of them is merged exactly, block by block. In backward the blocks are computed again, and the
gradients of keys and values travel along with them until they are home.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from omnizoo.ops.attention import Pattern, scale_of
from omnizoo.ops.attention_blocks import (
    Blocks,
    accumulator,
    add_sinks,
    attend_blocks,
    attend_blocks_backward,
    sinks_gradient,
)


@dataclass(frozen=True)
class Ring:
    """One rank's place in the ring: `tokens[rank]` of each, and what its queries see of each rank's keys."""

    group: dist.ProcessGroup
    rank: int
    tokens: Sequence[int]
    blocks: Sequence[Blocks]
    kv_repeats: Sequence[int] | None  # heads per kv head, where these differ

    @property
    def size(self) -> int:
        return len(self.tokens)

    def pass_on(self, sent: torch.Tensor, width: int, step: int) -> "Passing":
        """Start sending to the next rank what comes home after `size` steps; receive the same from the one before."""
        received = sent.new_empty(self.tokens[(self.rank - step - 1) % self.size] * width)
        operations = []
        if sent.numel():  # both sides know, so nothing is sent, and nothing awaited
            operations.append(dist.P2POp(dist.isend, sent, group=self.group, group_peer=(self.rank + 1) % self.size))
        if received.numel():
            operations.append(
                dist.P2POp(dist.irecv, received, group=self.group, group_peer=(self.rank - 1) % self.size)
            )
        return Passing(dist.batch_isend_irecv(operations) if operations else [], sent, received)


@dataclass(frozen=True)
class Passing:
    works: Sequence[dist.Work]
    sent: torch.Tensor  # kept until it is
    received: torch.Tensor

    def wait(self) -> torch.Tensor:
        for work in self.works:
            work.wait()
        return self.received


def ring_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ring: Ring, pattern: Pattern) -> torch.Tensor:
    """Token-major `[tokens, heads, width]` of this rank's tokens; returns `[tokens, heads, width of v]`."""
    out: torch.Tensor = _RingAttention.apply(q, k, v, pattern.sinks, ring, pattern)  # type: ignore[no-untyped-call]
    return out


class _RingAttention(torch.autograd.Function):
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
        ctx.ring, ctx.scale, ctx.softcap = ring, scale_of(q, pattern), pattern.softcap
        out, lse = accumulator(q, *q.shape[:2], v.shape[-1]), accumulator(q, *q.shape[:2])
        shapes, width = (k.shape[1:], v.shape[1:]), k.shape[1] * (k.shape[2] + v.shape[2])
        travelling = torch.cat([k.flatten(), v.flatten()])  # one message instead of two
        for step in range(ring.size):
            passing = ring.pass_on(travelling, width, step) if step < ring.size - 1 else None
            keys, values = (repeat_kv(x, ring.kv_repeats) for x in _unflatten(travelling, *shapes))
            blocks = ring.blocks[(ring.rank - step) % ring.size]
            attend_blocks(q, keys, values, blocks, ctx.scale, ctx.softcap, out, lse)
            if passing is not None:
                travelling = passing.wait()
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
        shapes, width = (k.shape[1:], v.shape[1:]), k.shape[1] * (k.shape[2] + v.shape[2])
        dq = accumulator(q, *q.shape)
        travelling = torch.cat([k.flatten(), v.flatten()])
        gradients: Passing | None = None
        for step in range(ring.size):
            passing = ring.pass_on(travelling, width, step) if step < ring.size - 1 else None
            keys, values = (repeat_kv(x, ring.kv_repeats) for x in _unflatten(travelling, *shapes))
            own = accumulator(k, keys.numel() + values.numel())  # both in one, as they will travel
            dk, dv = _unflatten(own, keys.shape[1:], values.shape[1:])
            blocks = ring.blocks[(ring.rank - step) % ring.size]
            attend_blocks_backward(grad_out, q, keys, values, out, lse, blocks, ctx.scale, ctx.softcap, dq, dk, dv)
            if ring.kv_repeats is not None:
                own = torch.cat([sum_repeated(x, ring.kv_repeats).flatten() for x in (dk, dv)])
            # Waited for only now: they were on their way while this block was computed.
            gradients = ring.pass_on(own if gradients is None else own.add_(gradients.wait()), width, step)
            if passing is not None:
                travelling = passing.wait()
        assert gradients is not None
        dk, dv = _unflatten(gradients.wait(), *shapes)
        dsinks = None if sinks is None else sinks_gradient(grad_out, out, lse, sinks)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks, None, None


def _unflatten(flat: torch.Tensor, k_shape: torch.Size, v_shape: torch.Size) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = flat.numel() // (k_shape.numel() + v_shape.numel())
    k, v = flat.split([tokens * k_shape.numel(), tokens * v_shape.numel()])
    return k.view(tokens, *k_shape), v.view(tokens, *v_shape)


def repeat_kv(x: torch.Tensor, repeats: Sequence[int] | None) -> torch.Tensor:
    """Irregular groups of heads per kv head, as one kv head per head; regular ones the kernel takes as they are."""
    if repeats is None:
        return x
    return torch.cat([head.expand(-1, n, -1) for head, n in zip(x.split(1, 1), repeats, strict=True)], 1)


def sum_repeated(x: torch.Tensor, repeats: Sequence[int] | None) -> torch.Tensor:
    if repeats is None:
        return x
    return torch.cat([heads.sum(1, keepdim=True) for heads in x.split(list(repeats), 1)], 1)
