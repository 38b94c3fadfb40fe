"""Ulysses: an all-to-all turns all heads of some tokens into some heads of all tokens, and another one reverses it.

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

    heads: Ranges  # (first, end) of each rank
    kv_heads: Ranges  # (first, end) of each rank; ranges may overlap
    group_size: int  # query heads per kv head

    def kv_repeats(self, rank: int) -> list[int] | None:
        """Return the number of local query heads of each local kv head, or None if all have the same number."""
        (first, end), size = self.heads[rank], self.group_size
        repeats = [min(end, (kv + 1) * size) - max(first, kv * size) for kv in range(*self.kv_heads[rank])]
        return repeats if len(set(repeats)) > 1 else None


def split_heads(heads: int, kv_heads: int, ranks: int) -> HeadSplit:
    """Split the heads into contiguous ranges that are as even as possible. Every rank must get at least one head."""
    assert heads >= ranks, f"{heads} heads on {ranks} ranks: `check_heads` was to refuse this"
    size = heads // kv_heads
    ranges = [(rank * heads // ranks, (rank + 1) * heads // ranks) for rank in range(ranks)]
    return HeadSplit(ranges, [(first // size, (end - 1) // size + 1) for first, end in ranges], size)


def check_heads(layout: Layout, heads: int, kv_heads: int) -> None:
    """Raise a `UserError` if the layout has more Ulysses ranks than attention heads."""
    if layout.ulysses <= heads:
        return
    ulysses = max(n for n in divisors(layout.sp) if n <= heads)
    raise UserError(
        f"parallel.ulysses: {layout.ulysses} ranks cannot share {heads} attention heads ({kv_heads} of keys and "
        f"values), as each needs one; the nearest layout that works: ulysses {ulysses} x ring {layout.sp // ulysses}"
    )


@dataclass(frozen=True)
class Exchange:
    """The two collectives of Ulysses, gather and scatter. Each is one all-to-all, and the gradient of the other."""

    group: dist.ProcessGroup
    axis: str  # mesh axis of `group`
    rank: int
    tokens: Sequence[int]  # tokens of each rank
    overlap: bool  # whether the transfer of one tensor overlaps with packing the next

    def start_gather(self, x: torch.Tensor, ranges: Ranges) -> Callable[[], torch.Tensor]:
        """Start to gather all tokens of this rank's heads from `x` `[local tokens, heads, width]`.

        Returns:
            A function that waits for the collective and returns `[tokens, local heads, width]`.
        """
        own, width = ranges[self.rank][1] - ranges[self.rank][0], x.shape[2]
        pieces = [len(x) * (end - first) * width for first, end in ranges]
        sent, received = x.new_empty(sum(pieces)), x.new_empty(sum(self.tokens), own, width)
        for piece, (first, end) in zip(sent.split(pieces), ranges, strict=True):
            piece.view(len(x), end - first, width).copy_(x[:, first:end])
        receive = [n * own * width for n in self.tokens]
        work = dist.all_to_all_single(received.view(-1), sent, receive, pieces, self.group, async_op=self.overlap)
        return lambda: _after(work, received)

    def start_scatter(self, x: torch.Tensor, ranges: Ranges) -> Callable[[], torch.Tensor]:
        """Start to scatter `x` `[tokens, local heads, width]` to the ranks of the tokens.

        Returns:
            A function that waits for the collective and returns all heads of this rank's tokens,
            `[local tokens, heads, width]`. A head that several ranks have is summed.
        """
        tokens, own, width = self.tokens[self.rank], x.shape[1], x.shape[2]
        pieces = [tokens * (end - first) * width for first, end in ranges]
        received = x.new_empty(sum(pieces))
        sent, send = x.contiguous().view(-1), [n * own * width for n in self.tokens]
        work = dist.all_to_all_single(received, sent, pieces, send, self.group, async_op=self.overlap)

        def finish() -> torch.Tensor:
            parts = [
                part.view(tokens, end - first, width)
                for part, (first, end) in zip(_after(work, received).split(pieces), ranges, strict=True)
            ]
            if all(before[1] == after[0] for before, after in pairwise(ranges)):
                return torch.cat(parts, 1)
            total = x.new_zeros(tokens, ranges[-1][1], width)
            for part, (first, end) in zip(parts, ranges, strict=True):
                total[:, first:end].add_(part)
            return total

        return finish

    def run(self, start: Start, tensors: Sequence[torch.Tensor], ranges: Sequence[Ranges]) -> tuple[torch.Tensor, ...]:
        """Run `start_gather` or `start_scatter` for several tensors. With overlap, all start before the first wait."""
        with sent_along(self.axis):
            started = [start(x, r) for x, r in zip(tensors, ranges, strict=True)]
            return tuple(finish() for finish in started)


def _after(work: dist.Work | None, received: torch.Tensor) -> torch.Tensor:
    """Wait for `work`, if it is asynchronous, and return `received`."""
    if work is not None:
        work.wait()
    return received


class GatherTokens(torch.autograd.Function):
    """Turn all heads of this rank's tokens into all tokens of this rank's heads; `ranges` has one entry per tensor."""

    @staticmethod
    def forward(
        ctx: Any, exchange: Exchange, ranges: Sequence[Ranges], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.exchange, ctx.ranges = exchange, ranges
        return exchange.run(exchange.start_gather, tensors, ranges)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, None, *ctx.exchange.run(ctx.exchange.start_scatter, grads, ctx.ranges)


class ScatterTokens(torch.autograd.Function):
    """Turn the attention output of this rank's heads into the output of this rank's tokens."""

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, split: HeadSplit, out: torch.Tensor) -> torch.Tensor:
        ctx.exchange, ctx.split = exchange, split
        return exchange.run(exchange.start_scatter, [out], [split.heads])[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, None, *ctx.exchange.run(ctx.exchange.start_gather, [grad], [ctx.split.heads])
