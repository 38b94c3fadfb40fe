"""Blockwise attention: ranges of queries attend to ranges of keys, and the log-sum-exp merges results exactly.

A pack on one rank has one block per sample. Ring attention, where keys are sent between ranks, has a few more blocks
per sample. Tensors are token-major, `[tokens, heads, width]`, and accumulators are fp32 or better. Autograd does not
record these functions, so callers implement the backward pass with `attend_blocks_backward`.
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

MAX_HEAD_WIDTH = 256  # largest head width that flash attention supports
ROWS = 128  # rows per kernel call with a mask; fewer rows add overhead, more rows compute masked pairs


@dataclass(frozen=True)
class TokenRun:
    """Consecutive tokens of one sample that are also consecutive on a rank."""

    index: int  # index of the first token on the rank's token axis
    position: int  # position of the first token in its sample
    length: int  # number of tokens


@dataclass(frozen=True)
class AttentionBlock:
    """Attention of queries q0 to q1 to keys k0 to k1.

    Each query attends to at least one key, and at least one query attends to each key.

    Query i of n attends to key j of m if `i + m - n - left <= j <= i + m - n + right`, where a `left` or `right` of -1
    means no limit. Flash kernels define their window in the same way: it is aligned at the last query and key. If
    `first` is True, the block is the first one of its queries: its result is written to the accumulators instead of
    merged.
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
    behind = _distance_bound(q, k) if window is None else window - 1
    ahead = 0 if causal else behind
    return _band_between(q, k, behind, ahead)


def span_blocks(
    q: TokenRun, k: TokenRun, spans: Sequence[tuple[int, int]], outer_window: int | None
) -> list[AttentionBlock]:
    """Return the blocks that bidirectional spans add to causal attention between queries `q` and keys `k`.

    Args:
        q: Queries of a sample.
        k: Keys of the same sample.
        spans: The bidirectional spans of the sample, as (first position, number of tokens).
        outer_window: Window of the causal attention, or None. If set, also add blocks for earlier keys of a span that
            are outside this window, because causal attention does not cover them. Otherwise, add only blocks for later
            keys.
    """
    blocks = []
    unlimited = _distance_bound(q, k)
    for first, count in spans:
        span_q = _within(q, first, count)
        span_k = _within(k, first, count)
        if not span_q or not span_k:
            continue

        later_keys = _band_between(span_q, span_k, behind=-1, ahead=unlimited)
        if later_keys is not None:
            blocks.append(later_keys)
        if outer_window is not None:
            keys_before_window = _band_between(span_q, span_k, behind=unlimited, ahead=-outer_window)
            if keys_before_window is not None:
                blocks.append(keys_before_window)
    return blocks


def pack_blocks(
    lengths: Sequence[int],
    causal: bool,
    window: int | None,
    spans: Sequence[Sequence[tuple[int, int]]] | None = None,
    outer_window: int | None = None,
) -> list[AttentionBlock]:
    """Return the blocks of a whole pack: one per sample, followed by the blocks that bidirectional spans add.

    `spans` has the spans of each sample. For `outer_window`, see `span_blocks`.
    """
    sample_blocks = []
    blocks_of_spans = []
    start = 0
    for sample, length in enumerate(lengths):
        run = TokenRun(start, 0, length)
        block = block_between(run, run, causal, window)
        if block is not None:
            sample_blocks.append(replace(block, first=True))
        if spans is not None:
            blocks_of_spans += span_blocks(run, run, spans[sample], outer_window)
        start += length
    return sample_blocks + blocks_of_spans


def _distance_bound(q: TokenRun, k: TokenRun) -> int:
    """Return an upper bound of the distances between queries in `q` and keys in `k`."""
    return q.position + q.length + k.position + k.length


def _within(run: TokenRun, first: int, count: int) -> TokenRun | None:
    """Return the part of `run` at the sample positions `first` to `first + count`, or None if it is empty."""
    low = max(run.position, first)
    high = min(run.position + run.length, first + count)
    if low >= high:
        return None
    return TokenRun(run.index + low - run.position, low, high - low)


def _band_between(q: TokenRun, k: TokenRun, behind: int, ahead: int) -> AttentionBlock | None:
    """Return the block in which each query attends to keys from `behind` tokens before it to `ahead` tokens after it.

    With `behind` = -1, a query attends only to later tokens. Returns None if no query attends to any key.
    """
    q_low = max(q.position, k.position - ahead)
    q_high = min(q.position + q.length, k.position + k.length + behind)
    k_low = max(k.position, q_low - behind)
    k_high = min(k.position + k.length, q_high + ahead)
    num_queries = q_high - q_low
    num_keys = k_high - k_low
    if num_queries <= 0 or num_keys <= 0:
        return None

    # A left limit has no effect if it excludes no key of the last query. A right limit has no effect if it excludes no
    # key of the first query.
    left = behind + k_high - q_high
    if left >= num_keys - 1:
        left = -1
    right = ahead + q_high - k_high
    if right >= num_queries - 1:
        right = -1

    q0 = q.index + q_low - q.position
    k0 = k.index + k_low - k.position
    return AttentionBlock(q0=q0, q1=q0 + num_queries, k0=k0, k1=k0 + num_keys, left=left, right=right)


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
    """A kernel call for one block or, with `cu_seqlens`, for several blocks with one window and disjoint queries."""

    rows: slice | torch.Tensor  # indices of the queries
    keys: slice | torch.Tensor  # indices of the keys
    first: bool  # whether the call is the first for its queries
    window: AttentionBlock | torch_private.Varlen


class Blocks:
    """Blocks in the order of computation. Their kernel calls are built once, and every layer reuses them."""

    def __init__(self, blocks: Sequence[AttentionBlock], device: torch.device) -> None:
        self.blocks = blocks
        self.device = device

    @cached_property
    def per_block(self) -> list[KernelCall]:
        """Calls for one block each. Bands are split by rows, so that most pairs outside the band are not computed."""
        calls = []
        for block in self.blocks:
            for band in _split_band(block):
                rows = slice(band.q0, band.q1)
                keys = slice(band.k0, band.k1)
                calls.append(KernelCall(rows=rows, keys=keys, first=band.first, window=band))
        return calls

    @cached_property
    def grouped(self) -> list[KernelCall]:
        """Kernel calls for flash kernels. Each call computes blocks with the same window and disjoint queries."""
        groups: list[list[AttentionBlock]] = []
        for block in self.blocks:
            for group in groups:
                if _can_join(block, group):
                    group.append(block)
                    break
            else:
                groups.append([block])
        # A group may contain blocks of several samples. The first block of a query must come before all blocks that
        # are merged into its result.
        groups.sort(key=lambda group: not group[0].first)
        return [self._group_call(group) for group in groups]

    def _group_call(self, group: list[AttentionBlock]) -> KernelCall:
        """Return one kernel call for a group of blocks."""
        q_ranges = [(block.q0, block.q1) for block in group]
        k_ranges = [(block.k0, block.k1) for block in group]
        varlen = torch_private.Varlen(
            cu_q=self._cumulative(q_ranges),
            cu_k=self._cumulative(k_ranges),
            max_q=max(end - start for start, end in q_ranges),
            max_k=max(end - start for start, end in k_ranges),
            left=group[0].left,
            right=group[0].right,
        )
        rows = self._indices(q_ranges)
        keys = self._indices(k_ranges)
        return KernelCall(rows=rows, keys=keys, first=group[0].first, window=varlen)

    def _indices(self, ranges: list[tuple[int, int]]) -> slice | torch.Tensor:
        """Return the indices of `ranges`, as a slice if the ranges are contiguous."""
        if all(before[1] == after[0] for before, after in pairwise(ranges)):
            return slice(ranges[0][0], ranges[-1][1])
        indices = torch.cat([torch.arange(start, end) for start, end in ranges])
        return to_device(indices, self.device)

    def _cumulative(self, ranges: list[tuple[int, int]]) -> torch.Tensor:
        """Return `cu_seqlens` of `ranges`, on the device."""
        lengths = torch.tensor([0] + [end - start for start, end in ranges])
        return to_device(lengths.cumsum(0, dtype=torch.int32), self.device)


def _can_join(block: AttentionBlock, group: list[AttentionBlock]) -> bool:
    """Whether `block` has the same window as the blocks in `group`, but no query in common with them."""
    representative = group[0]
    if (block.left, block.right, block.first) != (representative.left, representative.right, representative.first):
        return False
    return all(block.q0 >= member.q1 or block.q1 <= member.q0 for member in group)


def _split_band(block: AttentionBlock) -> list[AttentionBlock]:
    """Split a block with a limit on both sides into blocks of fewer queries, each with only the keys it needs."""
    num_queries = block.q1 - block.q0
    num_keys = block.k1 - block.k0
    rows = max(ROWS, block.left + block.right + 1)
    if block.left == -1 or block.right == -1 or num_queries < 2 * rows:
        return [block]

    bands = []
    aligned = num_keys - num_queries  # the key that query 0 is aligned with
    for first in range(0, num_queries, rows):
        end = min(num_queries, first + rows)
        # Queries `first` to `end` attend to keys `low` to `high`. The window is shifted, because windows are aligned at
        # the last query and key.
        low = max(0, first + aligned - block.left)
        high = min(num_keys, end + aligned + block.right)
        shift = (num_keys - high) - (num_queries - end)
        bands.append(
            AttentionBlock(
                q0=block.q0 + first,
                q1=block.q0 + end,
                k0=block.k0 + low,
                k1=block.k0 + high,
                left=block.left - shift,
                right=block.right + shift,
                first=block.first,
            )
        )
    return bands


def accumulator(like: torch.Tensor, *shape: int) -> torch.Tensor:
    """Return zeros of this shape in fp32, or in float64 if `like` is float64."""
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
        call_out, call_lse = _attend(call.window, q[rows], k[call.keys], v[call.keys], scale, softcap)
        call_out = call_out[..., :width]
        if call.first:
            out[rows] = call_out
            lse[rows] = call_lse
            continue

        old_lse = lse[rows]
        merged_out = out[rows]
        merged_lse = torch.logaddexp(old_lse, call_lse)
        merged_out = merged_out * (old_lse - merged_lse).exp_().unsqueeze(-1)
        out[rows] = merged_out.addcmul_(call_out.to(merged_out.dtype), (call_lse - merged_lse).exp_().unsqueeze(-1))
        lse[rows] = merged_lse


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
    """Add the gradients to the accumulators `dq, dk, dv`.

    `out` (in the dtype of `q`) and `lse` are the final results of the forward pass.
    """
    widths = q.shape[-1], q.shape[-1], v.shape[-1]
    q, k, v, out, grad_out = _same_width(q, k, v, out, grad_out)
    for call in _calls(blocks, q, softcap):
        rows = call.rows
        keys = call.keys
        grads = _attend_backward(
            call.window, grad_out[rows], q[rows], k[keys], v[keys], out[rows], lse[rows], scale, softcap
        )
        for total, indices, grad, width in zip((dq, dk, dv), (rows, keys, keys), grads, widths, strict=True):
            grad = grad[..., :width]
            if isinstance(indices, slice):
                total[indices].add_(grad)
            else:
                total.index_add_(0, indices, grad.to(total.dtype))


def _calls(blocks: Blocks, q: torch.Tensor, softcap: float | None) -> list[KernelCall]:
    """Return grouped calls if flash attention supports the heads of `q`, otherwise one or more calls per block."""
    return blocks.grouped if supports_flash(q) and softcap is None else blocks.per_block


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
        causal, mask = _cpu_mask(window, q)
        out, lse = torch_private.flash_cpu(q, k, v, causal, mask, scale)
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
        causal, mask = _cpu_mask(window, q)
        grads = torch_private.flash_cpu_backward(grad_out, q, k, v, out, lse, causal, mask, scale)
    else:
        grads = _plain_backward(grad_out, q, k, v, out, lse, window, scale, softcap)
    return tuple(grad[0].transpose(0, 1) for grad in grads)


def add_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> None:
    """Merge the sinks `[heads]` into the accumulators. A sink is one more logit of a head, with a zero value vector."""
    with_sinks = torch.logaddexp(lse, sinks.to(lse.dtype))
    out *= (lse - with_sinks).exp().unsqueeze(-1)
    lse.copy_(with_sinks)


def sinks_gradient(grad_out: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Return the gradient of the sinks from this rank's queries. The caller sums it over ranks."""
    delta = (grad_out.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    return -((sinks.to(lse.dtype) - lse).exp() * delta).sum(0).to(sinks.dtype)


def supports_flash(q: torch.Tensor) -> bool:
    """Whether torch's flash attention over `cu_seqlens` supports the device, dtype and head width of `q`."""
    return has_flash(q.device) and q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] <= MAX_HEAD_WIDTH


def _same_width(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Pad the tensors with zeros to the same width, as flash kernels require. Zeros do not change the result."""
    width = max(tensor.shape[-1] for tensor in tensors)
    padded = []
    for tensor in tensors:
        missing = width - tensor.shape[-1]
        padded.append(F.pad(tensor, (0, missing)) if missing else tensor)
    return tuple(padded)


def _heads_first(x: torch.Tensor) -> torch.Tensor:
    """Return a view `[1, heads, tokens, width]` of `[tokens, heads, width]`."""
    return x.transpose(0, 1).unsqueeze(0)


def _cpu_mask(block: AttentionBlock, q: torch.Tensor) -> tuple[bool, torch.Tensor | None]:
    """Return the arguments `causal` and `mask` with which `flash_cpu` computes the window of `block`."""
    if (block.left, block.right) == (-1, 0) and block.q1 - block.q0 == block.k1 - block.k0:
        return True, None
    is_masked = _outside_window(block, q.device)
    if is_masked is None:
        return False, None
    return False, q.new_zeros(is_masked.shape).masked_fill_(is_masked, -torch.inf)


def _outside_window(block: AttentionBlock, device: torch.device) -> torch.Tensor | None:
    """Return a bool mask `[queries, keys]` of the pairs outside the window, or None if there are none."""
    if block.full:
        return None
    num_queries = block.q1 - block.q0
    num_keys = block.k1 - block.k0
    keys = torch.arange(num_keys, device=device)
    aligned_keys = torch.arange(num_keys - num_queries, num_keys, device=device)  # one per query
    distance = keys - aligned_keys.unsqueeze(1)  # positive for keys after the query

    is_before = distance < -block.left if block.left >= 0 else torch.zeros_like(distance, dtype=torch.bool)
    if block.right < 0:
        return is_before
    return is_before | (distance > block.right)


def _capped_logits(q: torch.Tensor, k: torch.Tensor, scale: float, softcap: float | None) -> torch.Tensor:
    """Return the logits `[kv heads, heads per kv head, queries, keys]`, with scale and softcap, without window."""
    logits = _by_group(q, k.shape[1]) @ k[0].unsqueeze(1).transpose(2, 3)
    logits = at_least_fp32(logits).mul_(scale)
    return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)


def _by_group(x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Return `[1, heads, n, ...]` as `[kv heads, heads per kv head, n, ...]`."""
    return x[0].view(kv_heads, -1, *x.shape[2:])


def _plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: AttentionBlock, scale: float, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute one block in plain torch, with all its logits in memory. The shapes are the same as in `flash_cpu`."""
    logits = _capped_logits(q, k, scale, softcap)
    is_masked = _outside_window(block, q.device)
    if is_masked is not None:
        logits.masked_fill_(is_masked, -torch.inf)
    lse = logits.logsumexp(-1)
    weights = logits.sub_(lse.unsqueeze(-1)).exp_().to(v.dtype)
    out = weights @ v[0].unsqueeze(1)
    return out.flatten(0, 1).unsqueeze(0), lse.flatten(0, 1).unsqueeze(0)


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
    is_masked = _outside_window(block, q.device)
    if is_masked is not None:
        weights.masked_fill_(is_masked, 0.0)
    delta = (grad_out.to(weights.dtype) * out.to(weights.dtype)).sum(-1, keepdim=True)
    grad_logits = (grad_out @ v[0].unsqueeze(1).transpose(2, 3)).to(weights.dtype).sub_(delta).mul_(weights)
    if softcap is not None:
        grad_logits.mul_(logits.div_(softcap).square_().neg_().add_(1))
    grad_logits = grad_logits.mul_(scale).to(q.dtype)

    dq = (grad_logits @ k[0].unsqueeze(1)).flatten(0, 1)
    dk = (grad_logits.transpose(2, 3) @ grouped_q).sum(1)
    dv = (weights.to(v.dtype).transpose(2, 3) @ grad_out).sum(1)
    return dq.unsqueeze(0), dk.unsqueeze(0), dv.unsqueeze(0)
