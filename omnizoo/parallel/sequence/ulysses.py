"""Ulysses: an all-to-all exchanges all heads of some tokens for some heads of all tokens, and another reverses this.

Buffers are token-major, `[tokens, heads, width]`. The pieces received from the ranks are contiguous along the token
dim, so they need no copy.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from omnizoo.config.errors import UserError
from omnizoo.parallel.layout import Layout, divisors
from omnizoo.parallel.traffic_tag import sent_along

Ranges = Sequence[tuple[int, int]]
Start = Callable[[torch.Tensor, Ranges], Callable[[], torch.Tensor]]


@dataclass(frozen=True)
class HeadSplit:
    """The query heads and kv heads of each Ulysses rank. Several ranks may need the same kv head."""

    heads: Ranges  # for each rank, (first, end) of its query heads
    kv_heads: Ranges  # for each rank, (first, end) of its kv heads; ranges may overlap
    group_size: int  # number of query heads per kv head

    def kv_repeats(self, rank: int) -> list[int] | None:
        """Return the number of local query heads of each local kv head, or None if it is the same for all kv heads."""
        first, end = self.heads[rank]
        repeats = []
        for kv_head in range(*self.kv_heads[rank]):
            first_of_kv = kv_head * self.group_size
            repeats.append(min(end, first_of_kv + self.group_size) - max(first, first_of_kv))
        return repeats if len(set(repeats)) > 1 else None


def split_heads(heads: int, kv_heads: int, ranks: int) -> HeadSplit:
    """Split the heads into contiguous ranges that are as even as possible. Every rank must get at least one head."""
    assert heads >= ranks, f"{heads} heads on {ranks} ranks: `check_heads` must be called first"
    group_size = heads // kv_heads
    ranges = [(rank * heads // ranks, (rank + 1) * heads // ranks) for rank in range(ranks)]
    kv_ranges = [(first // group_size, (end - 1) // group_size + 1) for first, end in ranges]
    return HeadSplit(heads=ranges, kv_heads=kv_ranges, group_size=group_size)


def check_heads(layout: Layout, heads: int, kv_heads: int) -> None:
    """Raise a `UserError` if the layout has more Ulysses ranks than attention heads."""
    if layout.ulysses <= heads:
        return
    ulysses = max(n for n in divisors(layout.sp) if n <= heads)
    raise UserError(
        f"parallel.ulysses: {layout.ulysses} is more than the {heads} attention heads of the model ({kv_heads} for "
        f"keys and values). Use parallel.ulysses: {ulysses} with parallel.ring: {layout.sp // ulysses}."
    )


@dataclass(frozen=True)
class Exchange:
    """The two collectives of Ulysses, gather and scatter.

    Each is one all-to-all, and each is the backward of the other.
    """

    group: dist.ProcessGroup
    axis: str  # mesh axis of `group`
    rank: int
    tokens: Sequence[int]  # number of tokens of each rank
    overlap: bool  # whether the transfer of one tensor overlaps with packing the next

    def start_gather(self, x: torch.Tensor, ranges: Ranges) -> Callable[[], torch.Tensor]:
        """Start to gather all tokens of this rank's heads from `x` `[local tokens, heads, width]`.

        Returns:
            A function that waits for the collective and returns `[tokens, local heads, width]`.
        """
        first_head, end_head = ranges[self.rank]
        local_heads = end_head - first_head
        width = x.shape[2]
        sent_sizes = [len(x) * (end - first) * width for first, end in ranges]
        received_sizes = [count * local_heads * width for count in self.tokens]
        sent = x.new_empty(sum(sent_sizes))
        received = x.new_empty(sum(self.tokens), local_heads, width)
        for piece, (first, end) in zip(sent.split(sent_sizes), ranges, strict=True):
            piece.view(len(x), end - first, width).copy_(x[:, first:end])
        work = dist.all_to_all_single(
            received.view(-1), sent, received_sizes, sent_sizes, self.group, async_op=self.overlap
        )
        return lambda: _after(work, received)

    def start_scatter(self, x: torch.Tensor, ranges: Ranges) -> Callable[[], torch.Tensor]:
        """Start to scatter `x` `[tokens, local heads, width]` to the ranks of the tokens.

        Returns:
            A function that waits for the collective and returns all heads of this rank's tokens,
            `[local tokens, heads, width]`. If several ranks have the same head, their values are summed.
        """
        local_tokens = self.tokens[self.rank]
        local_heads, width = x.shape[1:]
        received_sizes = [local_tokens * (end - first) * width for first, end in ranges]
        sent_sizes = [count * local_heads * width for count in self.tokens]
        received = x.new_empty(sum(received_sizes))
        sent = x.contiguous().view(-1)
        work = dist.all_to_all_single(received, sent, received_sizes, sent_sizes, self.group, async_op=self.overlap)

        def finish() -> torch.Tensor:
            parts = []
            for part, (first, end) in zip(_after(work, received).split(received_sizes), ranges, strict=True):
                parts.append(part.view(local_tokens, end - first, width))
            is_contiguous = all(before[1] == after[0] for before, after in pairwise(ranges))
            if is_contiguous:
                return torch.cat(parts, 1)
            total = x.new_zeros(local_tokens, ranges[-1][1], width)
            for part, (first, end) in zip(parts, ranges, strict=True):
                total[:, first:end].add_(part)
            return total

        return finish

    def run(self, start: Start, tensors: Sequence[torch.Tensor], ranges: Sequence[Ranges]) -> tuple[torch.Tensor, ...]:
        """Run `start_gather` or `start_scatter` for several tensors. With overlap, all start before the first wait."""
        with sent_along(self.axis):
            finishers = [start(x, tensor_ranges) for x, tensor_ranges in zip(tensors, ranges, strict=True)]
            return tuple(finish() for finish in finishers)


def _after(work: dist.Work | None, received: torch.Tensor) -> torch.Tensor:
    """Wait for `work`, if it is asynchronous, and return `received`."""
    if work is not None:
        work.wait()
    return received


class GatherTokens(torch.autograd.Function):
    """Exchanges all heads of this rank's tokens for all tokens of this rank's heads.

    `ranges` has one entry per tensor.
    """

    @staticmethod
    def forward(
        ctx: Any, exchange: Exchange, ranges: Sequence[Ranges], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.exchange = exchange
        ctx.ranges = ranges
        return exchange.run(exchange.start_gather, tensors, ranges)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, None, *ctx.exchange.run(ctx.exchange.start_scatter, grads, ctx.ranges)


class ScatterTokens(torch.autograd.Function):
    """Exchanges the attention output of this rank's heads for the output of this rank's tokens."""

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, split: HeadSplit, out: torch.Tensor) -> torch.Tensor:
        ctx.exchange = exchange
        ctx.split = split
        return exchange.run(exchange.start_scatter, [out], [split.heads])[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, None, *ctx.exchange.run(ctx.exchange.start_gather, [grad], [ctx.split.heads])
