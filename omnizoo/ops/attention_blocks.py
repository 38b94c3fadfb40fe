"""Attention in blocks: some queries of a sample against some of its keys, merged exactly by log-sum-exp.

One rank's pack is one block per sample; with keys that travel between ranks, each rank's part is a few more. Tensors
are token-major, `[tokens, heads, width]`; accumulators are fp32 or better. Nothing here is recorded by autograd.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import torch
import torch.nn.functional as F

from omnizoo.ops import torch_private
from omnizoo.ops.device import has_cpu_flash, has_flash, to_device

WIDEST = 256  # heads that flash attention takes
ROWS = 128  # of a band that are computed at once where the kernel takes a mask: less is overhead, more is masked work


@dataclass(frozen=True)
class Run:
    """Tokens `at` to `at + length` of a rank's token axis, which are neighbours in their sample from `position` on."""

    at: int
    position: int
    length: int


@dataclass(frozen=True)
class Block:
    """Queries q0 to q1 against keys k0 to k1. Each query sees at least one key, and each key is seen.

    Query i of n sees key j of m if `i + m - n - left <= j <= i + m - n + right`; -1 is no limit. That is the window of
    flash kernels, aligned at the last query and key. `first`: nothing was computed for these queries before.
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
        return self.left == -1 and self.right == -1


def block_between(q: Run, k: Run, causal: bool, window: int | None) -> Block | None:
    """What queries `q` see of keys `k` of the same sample; None if nothing."""
    behind = _beyond(q, k) if window is None else window - 1
    return _band_between(q, k, behind, 0 if causal else behind)


def blocks_of_stretches(q: Run, k: Run, mutual: Sequence[tuple[int, int]], beyond: int | None) -> list[Block]:
    """What queries `q` see of keys `k` only because they are in one of the stretches (first position, how many) of a
    sample whose tokens all see each other: later ones, and those that a window of `beyond` tokens hides."""
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
) -> list[Block]:
    """Of a whole pack of samples: one block for each, then what stretches (`mutual`, of each sample) add to them."""
    blocks, added, at = [], [], 0
    for number, length in enumerate(lengths):
        run = Run(at, 0, length)
        if (block := block_between(run, run, causal, window)) is not None:
            blocks.append(replace(block, first=True))
        added += [] if mutual is None else blocks_of_stretches(run, run, mutual[number], beyond)
        at += length
    return blocks + added


def _beyond(q: Run, k: Run) -> int:
    """Farther than any two of their tokens are apart."""
    return q.position + q.length + k.position + k.length


def _within(run: Run, first: int, count: int) -> Run | None:
    low, high = max(run.position, first), min(run.position + run.length, first + count)
    return Run(run.at + low - run.position, low, high - low) if low < high else None


def _band_between(q: Run, k: Run, behind: int, ahead: int) -> Block | None:
    """Each query sees from `behind` tokens before it (-1: from the next one on) to `ahead` tokens after it."""
    q_low, q_high = max(q.position, k.position - ahead), min(q.position + q.length, k.position + k.length + behind)
    k_low, k_high = max(k.position, q_low - behind), min(k.position + k.length, q_high + ahead)
    n, m = q_high - q_low, k_high - k_low
    if n <= 0 or m <= 0:
        return None
    left, right = behind + k_high - q_high, ahead + q_high - k_high
    q0, k0 = q.at + q_low - q.position, k.at + k_low - k.position
    # A limit that the last query (left) or the first one (right) does not reach is none.
    return Block(q0, q0 + n, k0, k0 + m, -1 if left >= m - 1 else left, -1 if right >= n - 1 else right)


def fuse(blocks: Iterable[Block]) -> list[Block]:
    """Full blocks that are neighbours, of the same queries or of the same keys, become one."""
    fused: list[Block] = []
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
class Group:
    """Blocks of one window that share no queries, as one call of a kernel that takes `cu_seqlens`."""

    rows: slice | torch.Tensor
    keys: slice | torch.Tensor
    first: bool
    pieces: torch_private.Varlen


class Blocks:
    """Blocks in the order they are computed, and the kernel calls they become (made once, used by every layer)."""

    def __init__(self, blocks: Sequence[Block], device: torch.device) -> None:
        self.blocks, self.device = blocks, device

    @cached_property
    def cut(self) -> list[Block]:
        """A call per block, bands cut into rows so that most of what is outside of them is never computed."""
        return [part for block in self.blocks for part in _cut_band(block)]

    @cached_property
    def grouped(self) -> list[Group]:
        groups: list[list[Block]] = []
        for block in self.blocks:
            key = (block.left, block.right, block.first)
            for group in groups:
                alike = key == (group[0].left, group[0].right, group[0].first)
                if alike and all(block.q0 >= other.q1 or block.q1 <= other.q0 for other in group):
                    group.append(block)
                    break
            else:
                groups.append([block])
        # A group may have been opened by one sample and joined by another: what comes first is still to come first.
        return [self._group(group) for group in sorted(groups, key=lambda group: not group[0].first)]

    def _group(self, group: list[Block]) -> Group:
        q_ranges, k_ranges = [(b.q0, b.q1) for b in group], [(b.k0, b.k1) for b in group]
        pieces = torch_private.Varlen(
            cu_q=self._cumulative(q_ranges),
            cu_k=self._cumulative(k_ranges),
            max_q=max(b - a for a, b in q_ranges),
            max_k=max(b - a for a, b in k_ranges),
            left=group[0].left,
            right=group[0].right,
        )
        return Group(self._rows(q_ranges), self._rows(k_ranges), group[0].first, pieces)

    def _rows(self, ranges: list[tuple[int, int]]) -> slice | torch.Tensor:
        if all(before[1] == after[0] for before, after in pairwise(ranges)):
            return slice(ranges[0][0], ranges[-1][1])
        return to_device(torch.cat([torch.arange(a, b) for a, b in ranges]), self.device)

    def _cumulative(self, ranges: list[tuple[int, int]]) -> torch.Tensor:
        lengths = torch.tensor([0] + [b - a for a, b in ranges])
        return to_device(lengths.cumsum(0, dtype=torch.int32), self.device)


def _cut_band(block: Block) -> list[Block]:
    n, m = block.q1 - block.q0, block.k1 - block.k0
    rows = max(ROWS, block.left + block.right + 1)
    if block.left == -1 or block.right == -1 or n < 2 * rows:
        return [block]
    parts = []
    for a in range(0, n, rows):
        b = min(n, a + rows)
        # Keys low to high are seen by queries a to b; the window keeps its place relative to the last of both.
        low, high = max(0, a + m - n - block.left), min(m, b + m - n + block.right)
        moved = (m - high) - (n - b)
        parts.append(
            Block(
                *(block.q0 + a, block.q0 + b, block.k0 + low, block.k0 + high),
                *(block.left - moved, block.right + moved, block.first),
            )
        )
    return parts


def accumulator(like: torch.Tensor, *shape: int) -> torch.Tensor:
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
    """Add what `q` sees of `k, v` to the accumulators `out [tokens, heads, width of v]` and `lse [tokens, heads]`."""
    width = v.shape[-1]
    q, k, v = _same_width(q, k, v)
    kernel = _forward_in_groups if _takes_groups(q, softcap) else _forward_one_by_one
    for rows, first, part, part_lse in kernel(q, k, v, blocks, scale, softcap):
        if part.shape[-1] != width:
            part = part[..., :width]
        if first:
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
    """Add to the accumulators `dq, dk, dv`, given the final `out` (in the dtype of `q`) and `lse`."""
    widths = q.shape[-1], q.shape[-1], v.shape[-1]
    q, k, v, out, grad_out = _same_width(q, k, v, out, grad_out)
    kernel = _backward_in_groups if _takes_groups(q, softcap) else _backward_one_by_one
    for rows, keys, grads in kernel(grad_out, q, k, v, out, lse, blocks, scale, softcap):
        for total, at, grad, width in zip((dq, dk, dv), (rows, keys, keys), grads, widths, strict=True):
            if grad.shape[-1] != width:
                grad = grad[..., :width]
            if isinstance(at, slice):
                total[at].add_(grad)
            else:
                total.index_add_(0, at, grad.to(total.dtype))


def _forward_in_groups(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: Blocks, scale: float, softcap: float | None
) -> Iterator[tuple[slice | torch.Tensor, bool, torch.Tensor, torch.Tensor]]:
    for group in blocks.grouped:
        part, part_lse = torch_private.flash_cuda(q[group.rows], k[group.keys], v[group.keys], group.pieces, scale)
        yield group.rows, group.first, part, part_lse.T


def _backward_in_groups(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    blocks: Blocks,
    scale: float,
    softcap: float | None,
) -> Iterator[tuple[slice | torch.Tensor, slice | torch.Tensor, tuple[torch.Tensor, ...]]]:
    for group in blocks.grouped:
        rows, keys = group.rows, group.keys
        grads = torch_private.flash_cuda_backward(
            *(grad_out[rows], q[rows], k[keys], v[keys], out[rows], lse[rows].T.contiguous()),
            *(group.pieces, scale),
        )
        yield rows, keys, grads


def _forward_one_by_one(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: Blocks, scale: float, softcap: float | None
) -> Iterator[tuple[slice, bool, torch.Tensor, torch.Tensor]]:
    q, k, v = _heads_first(q), _heads_first(k), _heads_first(v)
    for block in blocks.cut:
        n, m = block.q1 - block.q0, block.k1 - block.k0
        piece = q.narrow(2, block.q0, n), k.narrow(2, block.k0, m), v.narrow(2, block.k0, m)
        if softcap is None and has_cpu_flash(q.device):
            part, lse = torch_private.flash_cpu(*piece, *_cpu_mask(block, q), scale)
        else:
            part, lse = _plain(*piece, block, scale, softcap)
        yield slice(block.q0, block.q1), block.first, part[0].transpose(0, 1), lse[0].T


def _backward_one_by_one(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    blocks: Blocks,
    scale: float,
    softcap: float | None,
) -> Iterator[tuple[slice, slice, tuple[torch.Tensor, ...]]]:
    grad_out, q, k, v, out = (_heads_first(x) for x in (grad_out, q, k, v, out))
    lse = lse.T.unsqueeze(0)
    for block in blocks.cut:
        n, m = block.q1 - block.q0, block.k1 - block.k0
        piece = (
            *(grad_out.narrow(2, block.q0, n), q.narrow(2, block.q0, n)),
            *(k.narrow(2, block.k0, m), v.narrow(2, block.k0, m)),
            *(out.narrow(2, block.q0, n), lse.narrow(2, block.q0, n)),
        )
        if softcap is None and has_cpu_flash(q.device):
            grads = torch_private.flash_cpu_backward(*piece, *_cpu_mask(block, q), scale)
        else:
            grads = _plain_backward(*piece, block, scale, softcap)
        yield slice(block.q0, block.q1), slice(block.k0, block.k1), tuple(g[0].transpose(0, 1) for g in grads)


def add_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> None:
    """One more logit per head, which takes weight and has no value, joins the accumulators."""
    with_sinks = torch.logaddexp(lse, sinks.to(lse.dtype))
    out *= (lse - with_sinks).exp().unsqueeze(-1)
    lse.copy_(with_sinks)


def sinks_gradient(grad_out: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Of this rank's queries only: the sum over ranks is the gradient."""
    delta = (grad_out.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    return -((sinks.to(lse.dtype) - lse).exp() * delta).sum(0).to(sinks.dtype)


def takes_flash(q: torch.Tensor) -> bool:
    """Whether torch's flash attention over `cu_seqlens` takes such heads."""
    return has_flash(q.device) and q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] <= WIDEST


def _takes_groups(q: torch.Tensor, softcap: float | None) -> bool:
    return takes_flash(q) and softcap is None


def _same_width(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Zeros appended where widths of keys and values differ: no flash kernel takes that, and zeros change nothing."""
    width = max(t.shape[-1] for t in tensors)
    return tuple(t if t.shape[-1] == width else F.pad(t, (0, width - t.shape[-1])) for t in tensors)


def _heads_first(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, 1).unsqueeze(0)


def _cpu_mask(block: Block, q: torch.Tensor) -> tuple[bool, torch.Tensor | None]:
    if (block.left, block.right) == (-1, 0) and block.q1 - block.q0 == block.k1 - block.k0:
        return True, None
    hidden = _hidden(block, q.device)
    return False, None if hidden is None else q.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)


def _hidden(block: Block, device: torch.device) -> torch.Tensor | None:
    """bool `[queries, keys]`: the pairs outside of the window; None if there are none."""
    if block.full:
        return None
    n, m = block.q1 - block.q0, block.k1 - block.k0
    ahead = torch.arange(m, device=device) - torch.arange(m - n, m, device=device).unsqueeze(1)
    below = ahead < -block.left if block.left >= 0 else torch.zeros_like(ahead, dtype=torch.bool)
    return below | (ahead > block.right) if block.right >= 0 else below


def _capped_logits(q: torch.Tensor, k: torch.Tensor, scale: float, softcap: float | None) -> torch.Tensor:
    """`[kv heads, queries per kv head, n, m]`, before the window."""
    logits = _by_group(q, k.shape[1]) @ k[0].unsqueeze(1).transpose(2, 3)
    logits = logits.to(torch.promote_types(q.dtype, torch.float32)).mul_(scale)
    return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)


def _by_group(x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """`[1, heads, n, ...]` as `[kv heads, heads per kv head, n, ...]`."""
    return x[0].view(kv_heads, -1, *x.shape[2:])


def _plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: Block, scale: float, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
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
    block: Block,
    scale: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
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
