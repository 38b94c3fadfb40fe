"""Ulysses: ranks that hold all heads of some tokens exchange them for some heads of all tokens, and back.

Buffers are token-major, `[tokens, heads, width]`, so that what arrives is already in place: the pieces of the other
ranks follow each other on the token axis.
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

Ranges = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class HeadSplit:
    """Which heads each Ulysses rank works on, and the kv heads these need: more ranks than kv heads share them."""

    heads: Ranges
    kv_heads: Ranges
    group_size: int  # heads per kv head

    def kv_repeats(self, rank: int) -> list[int] | None:
        """Local heads per local kv head, where these are not all the same."""
        (first, end), size = self.heads[rank], self.group_size
        repeats = [
            min(end, (kv + 1) * size) - max(first, kv * size)
            for kv in range(self.kv_heads[rank][0], self.kv_heads[rank][1])
        ]
        return repeats if len(set(repeats)) > 1 else None


def split_heads(heads: int, kv_heads: int, ranks: int) -> HeadSplit:
    """Contiguous and as even as can be; any number of heads not below the number of ranks."""
    assert heads >= ranks, f"{heads} heads on {ranks} ranks: `check_heads` was to refuse this"
    size = heads // kv_heads
    ranges = [(rank * heads // ranks, (rank + 1) * heads // ranks) for rank in range(ranks)]
    return HeadSplit(ranges, [(first // size, (end - 1) // size + 1) for first, end in ranges], size)


def check_heads(layout: Layout, heads: int, kv_heads: int) -> None:
    """Refuse a layout that leaves ranks without a head."""
    if layout.ulysses <= heads:
        return
    ulysses = max(n for n in divisors(layout.sp) if n <= heads)
    raise UserError(
        f"parallel.ulysses: {layout.ulysses} ranks cannot share {heads} attention heads ({kv_heads} of keys and "
        f"values), as each needs one; the nearest layout that works: ulysses {ulysses} x ring {layout.sp // ulysses}"
    )


@dataclass(frozen=True)
class Exchange:
    """The two collectives, each the other's gradient; one all-to-all each. `tokens[rank]`: how many each rank holds."""

    group: dist.ProcessGroup
    rank: int
    tokens: Sequence[int]
    overlap: bool

    def start_gather(self, x: torch.Tensor, ranges: Ranges) -> Callable[[], torch.Tensor]:
        """My tokens of all heads, `[tokens, heads, width]`, become all tokens of my range of heads, once called."""
        own, width = ranges[self.rank][1] - ranges[self.rank][0], x.shape[2]
        pieces = [len(x) * (end - first) * width for first, end in ranges]
        sent, received = x.new_empty(sum(pieces)), x.new_empty(sum(self.tokens), own, width)
        for piece, (first, end) in zip(sent.split(pieces), ranges, strict=True):
            piece.view(len(x), end - first, width).copy_(x[:, first:end])
        work = self._start(received.view(-1), [n * own * width for n in self.tokens], sent, pieces)
        return lambda: _after(work, received)

    def start_scatter(self, x: torch.Tensor, ranges: Ranges) -> Callable[[], torch.Tensor]:
        """All tokens of my range of heads become my tokens of all heads; a head that several ranks had is summed."""
        tokens, own, width = self.tokens[self.rank], x.shape[1], x.shape[2]
        pieces = [tokens * (end - first) * width for first, end in ranges]
        received = x.new_empty(sum(pieces))
        work = self._start(received, pieces, x.contiguous().view(-1), [n * own * width for n in self.tokens])

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

    def _start(
        self, received: torch.Tensor, receive: list[int], sent: torch.Tensor, send: list[int]
    ) -> dist.Work | None:
        return dist.all_to_all_single(received, sent, receive, send, self.group, async_op=self.overlap)  # type: ignore[no-any-return]


def _after(work: dist.Work | None, received: torch.Tensor) -> torch.Tensor:
    if work is not None:
        work.wait()
    return received


class GatherTokens(torch.autograd.Function):
    """Tensors of my tokens in, the same of my heads out, each by its own ranges. With overlap, one is on its way while
    the next is packed."""

    @staticmethod
    def forward(
        ctx: Any, exchange: Exchange, ranges: Sequence[Ranges], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.exchange, ctx.ranges = exchange, ranges
        started = [exchange.start_gather(x, r) for x, r in zip(tensors, ranges, strict=True)]
        return tuple(finish() for finish in started)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        started = [ctx.exchange.start_scatter(x, r) for x, r in zip(grads, ctx.ranges, strict=True)]
        return None, None, *(finish() for finish in started)


class ScatterTokens(torch.autograd.Function):
    """The output of my heads in, the output of my tokens out."""

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, split: HeadSplit, out: torch.Tensor) -> torch.Tensor:
        ctx.exchange, ctx.split = exchange, split
        return exchange.start_scatter(out, split.heads)()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, None, ctx.exchange.start_gather(grad, ctx.split.heads)()
