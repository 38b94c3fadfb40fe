"""Blockwise attention: ranges of queries against ranges of keys of a sample, merged exactly by log-sum-exp.

A pack on one rank has one block per sample. Ring attention, where keys are sent between ranks, has a few more per
sample. Tensors are token-major, `[tokens, heads, width]`, and accumulators are fp32 or better. Autograd does not record
these functions: callers implement the backward pass with `attend_blocks_backward`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import torch
import torch.nn.functional as F

from omnizoo.ops import torch_private
from omnizoo.ops.device import has_flash, is_host, to_device
from omnizoo.ops.precision import at_least_fp32

WIDEST = 256  # largest head width that flash attention supports
ROWS = 128  # rows of a band per kernel call, for kernels with a mask: fewer add overhead, more compute masked pairs


@dataclass(frozen=True)
class TokenRun:
    """Consecutive tokens of one sample that are also consecutive on a rank."""

    at: int  # index of the first token on the rank's token axis
    position: int  # position of the first token in its sample
    length: int  # number of tokens


@dataclass(frozen=True)
class AttentionBlock:
    """Queries q0 to q1 against keys k0 to k1. Each query attends to at least one key, and each key is attended to.

    Query i of n attends to key j of m if `i + m - n - left <= j <= i + m - n + right`, where -1 means no limit. This is
    the window of flash kernels, aligned at the last query and key. `first` is True for the first block of its queries,
    whose result is written to the accumulators instead of merged into them.
    """

    q0: int
    q1: int
    k0: int
    k1: int
    left: int = -1
    right: int = -1
    first: bool = False

    @property
    def full(self) -> bool:
        """Whether every query attends to every key of the block."""
        return self.left == -1 and self.right == -1


def block_between(q: TokenRun, k: TokenRun, causal: bool, window: int | None) -> AttentionBlock | None:
    """Return the block of queries `q` and keys `k` of the same sample, or None if no query attends to any key."""
    behind = _beyond(q, k) if window is None else window - 1
    return _band_between(q, k, behind, 0 if causal else behind)


def blocks_of_stretches(
    q: TokenRun, k: TokenRun, mutual: Sequence[tuple[int, int]], beyond: int | None
) -> list[AttentionBlock]:
    """Return the blocks that bidirectional spans add to causal attention between queries `q` and keys `k`.

    Args:
        q: Queries of a sample.
        k: Keys of the same sample.
        mutual: The bidirectional spans of the sample, as (first position, number of tokens).
        beyond: If set, blocks for earlier keys outside a window of this many tokens are added too, not only blocks for
            later keys.
    """
    found = []
    far = _beyond(q, k)
    for first, count in mutual:
        inner_q, inner_k = (_within(run, first, count) for run in (q, k))
        if inner_q and inner_k:
            ahead = _band_between(inner_q, inner_k, -1, far)
            behind = None if beyond is None else _band_between(inner_q, inner_k, far, -beyond)
            found += [block for block in (ahead, behind) if block is not None]
    return found


def pack_blocks(
    lengths: Sequence[int],
    causal: bool,
    window: int | None,
    mutual: Sequence[Sequence[tuple[int, int]]] | None = None,
    beyond: int | None = None,
) -> list[AttentionBlock]:
    """Return the blocks of a whole pack: one per sample, then those that bidirectional spans add.

    `mutual` has the spans of each sample, and `beyond` is the window outside which spans still attend backward.
    """
    blocks, added, at = [], [], 0
    for number, length in enumerate(lengths):
        run = TokenRun(at, 0, length)
        if (block := block_between(run, run, causal, window)) is not None:
            blocks.append(replace(block, first=True))
        added += [] if mutual is None else blocks_of_stretches(run, run, mutual[number], beyond)
        at += length
    return blocks + added


def _beyond(q: TokenRun, k: TokenRun) -> int:
    """Return a distance that is larger than that of any query in `q` to any key in `k`."""
    return q.position + q.length + k.position + k.length


def _within(run: TokenRun, first: int, count: int) -> TokenRun | None:
    """Return the part of `run` at the sample positions `first` to `first + count`, or None if it is empty."""
    low, high = max(run.position, first), min(run.position + run.length, first + count)
    return TokenRun(run.at + low - run.position, low, high - low) if low < high else None


def _band_between(q: TokenRun, k: TokenRun, behind: int, ahead: int) -> AttentionBlock | None:
    """Return the block in which each query attends from `behind` tokens before it to `ahead` tokens after it.

    With `behind` = -1, a query attends only to later tokens. Returns None if no query attends to any key.
    """
    q_low, q_high = max(q.position, k.position - ahead), min(q.position + q.length, k.position + k.length + behind)
    k_low, k_high = max(k.position, q_low - behind), min(k.position + k.length, q_high + ahead)
    n, m = q_high - q_low, k_high - k_low
    if n <= 0 or m <= 0:
        return None
    left, right = behind + k_high - q_high, ahead + q_high - k_high
    q0, k0 = q.at + q_low - q.position, k.at + k_low - k.position
    # A left limit that excludes no key of the last query is no limit, nor is a right one that excludes none of the
    # first query.
    return AttentionBlock(q0, q0 + n, k0, k0 + m, -1 if left >= m - 1 else left, -1 if right >= n - 1 else right)


def fuse(blocks: Iterable[AttentionBlock]) -> list[AttentionBlock]:
    """Merge adjacent full blocks that have the same queries or the same keys."""
    fused: list[AttentionBlock] = []
    for block in blocks:
        while fused and fused[-1].full and block.full:
            last = fused[-1]
            if (last.q0, last.q1, last.k1) == (block.q0, block.q1, block.k0):
                block = replace(last, k1=block.k1)
            elif (last.k0, last.k1, last.q1) == (block.k0, block.k1, block.q0):
                block = replace(last, q1=block.q1)
            else:
                break
            fused.pop()
        fused.append(block)
    return fused


@dataclass(frozen=True)
class KernelCall:
    """One kernel call: a single block, or several blocks with the same window and disjoint queries, by `cu_seqlens`."""

    rows: slice | torch.Tensor  # indices of the queries
    keys: slice | torch.Tensor  # indices of the keys
    first: bool  # whether the call is the first for its queries
    window: AttentionBlock | torch_private.Varlen


class Blocks:
    """Blocks in the order of computation, and their kernel calls, which are built once and reused by every layer."""

    def __init__(self, blocks: Sequence[AttentionBlock], device: torch.device) -> None:
        self.blocks, self.device = blocks, device

    @cached_property
    def cut(self) -> list[KernelCall]:
        """One call per block. Bands are split by rows, so that most pairs outside the band are not computed."""
        return [
            KernelCall(slice(part.q0, part.q1), slice(part.k0, part.k1), part.first, part)
            for block in self.blocks
            for part in _cut_band(block)
        ]

    @cached_property
    def grouped(self) -> list[KernelCall]:
        """One call per group of blocks with the same window and disjoint queries, for flash kernels."""
        groups: list[list[AttentionBlock]] = []
        for block in self.blocks:
            key = (block.left, block.right, block.first)
            for group in groups:
                alike = key == (group[0].left, group[0].right, group[0].first)
                if alike and all(block.q0 >= other.q1 or block.q1 <= other.q0 for other in group):
                    group.append(block)
                    break
            else:
                groups.append([block])
        # A group may contain blocks of several samples, so first blocks must be moved before the blocks merged into
        # them.
        return [self._group(group) for group in sorted(groups, key=lambda group: not group[0].first)]

    def _group(self, group: list[AttentionBlock]) -> KernelCall:
        q_ranges, k_ranges = [(b.q0, b.q1) for b in group], [(b.k0, b.k1) for b in group]
        pieces = torch_private.Varlen(
            cu_q=self._cumulative(q_ranges),
            cu_k=self._cumulative(k_ranges),
            max_q=max(b - a for a, b in q_ranges),
            max_k=max(b - a for a, b in k_ranges),
            left=group[0].left,
            right=group[0].right,
        )
        return KernelCall(self._rows(q_ranges), self._rows(k_ranges), group[0].first, pieces)

    def _rows(self, ranges: list[tuple[int, int]]) -> slice | torch.Tensor:
        """Return the indices of `ranges`, as a slice if the ranges are contiguous."""
        if all(before[1] == after[0] for before, after in pairwise(ranges)):
            return slice(ranges[0][0], ranges[-1][1])
        return to_device(torch.cat([torch.arange(a, b) for a, b in ranges]), self.device)

    def _cumulative(self, ranges: list[tuple[int, int]]) -> torch.Tensor:
        lengths = torch.tensor([0] + [b - a for a, b in ranges])
        return to_device(lengths.cumsum(0, dtype=torch.int32), self.device)


def _cut_band(block: AttentionBlock) -> list[AttentionBlock]:
    """Split a block with a limit on both sides into blocks of fewer queries, each with only the keys it needs."""
    n, m = block.q1 - block.q0, block.k1 - block.k0
    rows = max(ROWS, block.left + block.right + 1)
    if block.left == -1 or block.right == -1 or n < 2 * rows:
        return [block]
    parts = []
    for a in range(0, n, rows):
        b = min(n, a + rows)
        # Queries a to b attend to keys low to high. The window is shifted, because it is aligned at the last query and
        # key.
        low, high = max(0, a + m - n - block.left), min(m, b + m - n + block.right)
        moved = (m - high) - (n - b)
        parts.append(
            AttentionBlock(
                *(block.q0 + a, block.q0 + b, block.k0 + low, block.k0 + high),
                *(block.left - moved, block.right + moved, block.first),
            )
        )
    return parts


def accumulator(like: torch.Tensor, *shape: int) -> torch.Tensor:
    """Return zeros of this shape in fp32, or in float64 if `like` is."""
    return like.new_zeros(shape, dtype=torch.promote_types(like.dtype, torch.float32))


def attend_blocks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    blocks: Blocks,
    scale: float,
    softcap: float | None,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Merge the attention of `q` to `k, v` into the accumulators.

    The accumulators are `out [tokens, heads, width of v]` and `lse [tokens, heads]`.
    """
    width = v.shape[-1]
    q, k, v = _same_width(q, k, v)
    for call in _calls(blocks, q, softcap):
        rows = call.rows
        part, part_lse = _attend(call.window, q[rows], k[call.keys], v[call.keys], scale, softcap)
        part = part[..., :width]
        if call.first:
            out[rows], lse[rows] = part, part_lse
            continue
        before, so_far = lse[rows], out[rows]
        merged = torch.logaddexp(before, part_lse)
        so_far = so_far * (before - merged).exp_().unsqueeze(-1)
        out[rows] = so_far.addcmul_(part.to(so_far.dtype), (part_lse - merged).exp_().unsqueeze(-1))
        lse[rows] = merged


def attend_blocks_backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    blocks: Blocks,
    scale: float,
    softcap: float | None,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
) -> None:
    """Add the gradients to the accumulators `dq, dk, dv`, given the final `out` (in the dtype of `q`) and `lse`."""
    widths = q.shape[-1], q.shape[-1], v.shape[-1]
    q, k, v, out, grad_out = _same_width(q, k, v, out, grad_out)
    for call in _calls(blocks, q, softcap):
        rows, keys = call.rows, call.keys
        grads = _attend_backward(
            call.window, grad_out[rows], q[rows], k[keys], v[keys], out[rows], lse[rows], scale, softcap
        )
        for total, at, grad, width in zip((dq, dk, dv), (rows, keys, keys), grads, widths, strict=True):
            grad = grad[..., :width]
            if isinstance(at, slice):
                total[at].add_(grad)
            else:
                total.index_add_(0, at, grad.to(total.dtype))


def _calls(blocks: Blocks, q: torch.Tensor, softcap: float | None) -> list[KernelCall]:
    """Return grouped calls if flash attention supports the heads of `q`, else one or more calls per block."""
    return blocks.grouped if takes_flash(q) and softcap is None else blocks.cut


def _attend(
    window: AttentionBlock | torch_private.Varlen,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the kernel for one call, and return `out [queries, heads, width]` and `lse [queries, heads]`."""
    if isinstance(window, torch_private.Varlen):
        out, lse = torch_private.flash_cuda(q, k, v, window, scale)
        return out, lse.T
    q, k, v = (_heads_first(x) for x in (q, k, v))
    if softcap is None and is_host(q.device):
        out, lse = torch_private.flash_cpu(q, k, v, *_cpu_mask(window, q), scale)
    else:
        out, lse = _plain(q, k, v, window, scale, softcap)
    return out[0].transpose(0, 1), lse[0].T


def _attend_backward(
    window: AttentionBlock | torch_private.Varlen,
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    softcap: float | None,
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of `q`, `k` and `v` for one call."""
    if isinstance(window, torch_private.Varlen):
        return torch_private.flash_cuda_backward(grad_out, q, k, v, out, lse.T.contiguous(), window, scale)
    grad_out, q, k, v, out = (_heads_first(x) for x in (grad_out, q, k, v, out))
    lse = lse.T.unsqueeze(0)
    if softcap is None and is_host(q.device):
        grads = torch_private.flash_cpu_backward(grad_out, q, k, v, out, lse, *_cpu_mask(window, q), scale)
    else:
        grads = _plain_backward(grad_out, q, k, v, out, lse, window, scale, softcap)
    return tuple(grad[0].transpose(0, 1) for grad in grads)


def add_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> None:
    """Merge the sinks `[heads]` into the accumulators: one more logit per head, whose value is zero."""
    with_sinks = torch.logaddexp(lse, sinks.to(lse.dtype))
    out *= (lse - with_sinks).exp().unsqueeze(-1)
    lse.copy_(with_sinks)


def sinks_gradient(grad_out: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Return the gradient of the sinks from this rank's queries. The caller sums it over ranks."""
    delta = (grad_out.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    return -((sinks.to(lse.dtype) - lse).exp() * delta).sum(0).to(sinks.dtype)


def takes_flash(q: torch.Tensor) -> bool:
    """Whether torch's flash attention over `cu_seqlens` supports the device, dtype and head width of `q`."""
    return has_flash(q.device) and q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] <= WIDEST


def _same_width(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Pad the tensors with zeros to the same width, as flash kernels require. Zeros do not change the result."""
    width = max(t.shape[-1] for t in tensors)
    return tuple(t if t.shape[-1] == width else F.pad(t, (0, width - t.shape[-1])) for t in tensors)


def _heads_first(x: torch.Tensor) -> torch.Tensor:
    """Return a view `[1, heads, tokens, width]` of `[tokens, heads, width]`."""
    return x.transpose(0, 1).unsqueeze(0)


def _cpu_mask(block: AttentionBlock, q: torch.Tensor) -> tuple[bool, torch.Tensor | None]:
    """Return the `causal` flag and the additive mask that describe the window of `block` to `flash_cpu`."""
    if (block.left, block.right) == (-1, 0) and block.q1 - block.q0 == block.k1 - block.k0:
        return True, None
    hidden = _hidden(block, q.device)
    return False, None if hidden is None else q.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)


def _hidden(block: AttentionBlock, device: torch.device) -> torch.Tensor | None:
    """Return a bool mask `[queries, keys]` of the pairs outside the window, or None if there are none."""
    if block.full:
        return None
    n, m = block.q1 - block.q0, block.k1 - block.k0
    ahead = torch.arange(m, device=device) - torch.arange(m - n, m, device=device).unsqueeze(1)
    below = ahead < -block.left if block.left >= 0 else torch.zeros_like(ahead, dtype=torch.bool)
    return below | (ahead > block.right) if block.right >= 0 else below


def _capped_logits(q: torch.Tensor, k: torch.Tensor, scale: float, softcap: float | None) -> torch.Tensor:
    """Return the logits `[kv heads, query heads per kv head, n, m]` with scale and softcap, before the window mask."""
    logits = _by_group(q, k.shape[1]) @ k[0].unsqueeze(1).transpose(2, 3)
    logits = at_least_fp32(logits).mul_(scale)
    return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)


def _by_group(x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Return `[1, heads, n, ...]` as `[kv heads, heads per kv head, n, ...]`."""
    return x[0].view(kv_heads, -1, *x.shape[2:])


def _plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: AttentionBlock, scale: float, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute one block in plain torch, with all logits in memory. Shapes are those of `flash_cpu`."""
    logits = _capped_logits(q, k, scale, softcap)
    if (hidden := _hidden(block, q.device)) is not None:
        logits.masked_fill_(hidden, -torch.inf)
    lse = logits.logsumexp(-1)
    weights = logits.sub_(lse.unsqueeze(-1)).exp_().to(v.dtype)
    return (weights @ v[0].unsqueeze(1)).flatten(0, 1).unsqueeze(0), lse.flatten(0, 1).unsqueeze(0)


def _plain_backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    block: AttentionBlock,
    scale: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of `q`, `k` and `v` for `_plain`."""
    grad_out, out, lse, grouped_q = (_by_group(x, k.shape[1]) for x in (grad_out, out, lse, q))
    logits = _capped_logits(q, k, scale, softcap)
    weights = (logits - lse.unsqueeze(-1)).exp_()
    if (hidden := _hidden(block, q.device)) is not None:
        weights.masked_fill_(hidden, 0.0)
    delta = (grad_out.to(weights.dtype) * out.to(weights.dtype)).sum(-1, keepdim=True)
    slope = (grad_out @ v[0].unsqueeze(1).transpose(2, 3)).to(weights.dtype).sub_(delta).mul_(weights)
    if softcap is not None:
        slope.mul_(logits.div_(softcap).square_().neg_().add_(1))
    slope = slope.mul_(scale).to(q.dtype)
    dq = (slope @ k[0].unsqueeze(1)).flatten(0, 1)
    dk = (slope.transpose(2, 3) @ grouped_q).sum(1)
    dv = (weights.to(v.dtype).transpose(2, 3) @ grad_out).sum(1)
    return dq.unsqueeze(0), dk.unsqueeze(0), dv.unsqueeze(0)
