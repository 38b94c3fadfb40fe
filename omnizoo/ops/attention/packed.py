"""Attention over packed samples, `[1, heads, tokens, width]`. Tokens attend only to tokens of their own sample.

`packed_attention` selects the kernel for the device; docs/project/experiments.md has measurements. `per_sample` is the
plain torch reference that every kernel is tested against.

Bidirectional spans (`BidirectionalSpans`) add blocks for the later tokens of a span to causal attention. The same
kernels compute these blocks, and their results are merged exactly.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from omnizoo.ops.attention.bidirectional_spans import BidirectionalSpans
from omnizoo.ops.attention.blocks import (
    MAX_HEAD_WIDTH,
    Blocks,
    accumulator,
    add_sinks,
    attend_blocks,
    attend_blocks_backward,
    pack_blocks,
    sinks_gradient,
    supports_flash,
)


@dataclass(frozen=True)
class Boundaries:
    """Boundaries of the samples along the token axis, in the form that flash kernels expect."""

    cu_seqlens: torch.Tensor  # [samples + 1], int32, from 0 to the number of tokens
    max_seqlen: int  # length of the longest sample
    known: Sequence[int] | None = None  # [samples], lengths on the host; None if they are only on the device

    def lengths(self) -> list[int]:
        """Return the lengths of the samples. This causes a host sync if they are only on the device."""
        return self.cu_seqlens.diff().tolist() if self.known is None else list(self.known)


@dataclass(frozen=True)
class Pattern:
    """Options of attention, with the names and meanings of transformers' attention interface."""

    causal: bool = True
    scale: float | None = None
    window: int | None = None  # a token attends to itself and to the `window - 1` tokens before it
    softcap: float | None = None  # logits become softcap * tanh(logits / softcap)
    sinks: torch.Tensor | None = None  # [heads], one more logit per head, with a zero value vector
    dropout: float = 0.0


def packed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    boundaries: Boundaries,
    pattern: Pattern,
    bidirectional: BidirectionalSpans | None = None,
) -> torch.Tensor:
    """Compute attention within each sample of a pack, with the fastest kernel that supports the options.

    Args:
        query: `[1, heads, tokens, width]`.
        key: `[1, kv_heads, tokens, width]`, where `kv_heads` divides `heads`.
        value: `[1, kv_heads, tokens, width]`; the width may differ from the width of the keys.
        boundaries: Boundaries of the samples.
        pattern: Options of attention.
        bidirectional: Bidirectional spans of the pack.

    Returns:
        The output, `[1, tokens, heads, width]`.
    """
    if bidirectional is not None and not bidirectional.affects(pattern.causal, pattern.window):
        bidirectional = None
    has_equal_widths = query.shape[-1] == value.shape[-1]
    plain = pattern.softcap is None and pattern.sinks is None and has_equal_widths
    if pattern.dropout > 0.0:
        return per_sample(query, key, value, boundaries, pattern, bidirectional)
    if bidirectional is not None:
        return _in_blocks(query, key, value, boundaries, pattern, bidirectional)
    if plain and supports_flash(query):
        return _varlen(query, key, value, boundaries, pattern)
    if plain and (pattern.window is None or pattern.window >= boundaries.max_seqlen):
        return per_sample(query, key, value, boundaries, pattern)  # scaled_dot_product_attention uses flash
    return _in_blocks(query, key, value, boundaries, pattern)


def per_sample(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    boundaries: Boundaries,
    pattern: Pattern,
    bidirectional: BidirectionalSpans | None = None,
) -> torch.Tensor:
    """Compute attention with one call per sample, so that no mask over the whole pack is needed."""
    lengths = boundaries.lengths()
    samples = zip(query.split(lengths, 2), key.split(lengths, 2), value.split(lengths, 2), strict=True)
    outs = []
    for sample, (q, k, v) in enumerate(samples):
        span_mask = None if bidirectional is None else bidirectional.visible(sample, query.device)
        outs.append(_one_sample(q, k, v, pattern, span_mask))
    return torch.cat(outs, 2).transpose(1, 2)


def _one_sample(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pattern: Pattern,
    span_mask: torch.Tensor | None,
) -> torch.Tensor:
    """Compute attention within one sample. `span_mask` is a bool mask of additional (query, key) pairs."""
    length = query.shape[2]
    masked = span_mask is not None or (pattern.window is not None and pattern.window < length)
    groups = query.shape[1] // key.shape[1]
    if query.shape[-1] > MAX_HEAD_WIDTH:
        # For such wide heads, torch uses memory-efficient attention, which does not support grouped queries.
        key = key.repeat_interleave(groups, 1)
        value = value.repeat_interleave(groups, 1)
        groups = 1
    if pattern.softcap is None and pattern.sinks is None:
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=_visible(length, pattern, query.device, span_mask) if masked else None,
            is_causal=pattern.causal and not masked,
            dropout_p=pattern.dropout,
            scale=pattern.scale,
            enable_gqa=groups > 1,
        )

    key = key.repeat_interleave(groups, 1)
    value = value.repeat_interleave(groups, 1)
    logits = (query @ key.transpose(2, 3)) * scale_of(query, pattern)
    if pattern.softcap is not None:
        logits = pattern.softcap * torch.tanh(logits / pattern.softcap)
    logits = logits.masked_fill(~_visible(length, pattern, query.device, span_mask), -torch.inf)
    if pattern.sinks is not None:
        sinks = pattern.sinks.to(logits.dtype).view(1, -1, 1, 1).expand(1, -1, length, 1)
        logits = torch.cat([logits, sinks], 3)
    wide_dtype = torch.promote_types(logits.dtype, torch.float32)
    weights = logits.softmax(3, dtype=wide_dtype).to(query.dtype)[..., :length]
    return F.dropout(weights, pattern.dropout) @ value


def _visible(length: int, pattern: Pattern, device: torch.device, span_mask: torch.Tensor | None) -> torch.Tensor:
    """Return a bool mask `[length, length]` of the (query, key) pairs that `pattern` or `span_mask` allows."""
    position = torch.arange(length, device=device)
    distance = position[:, None] - position[None, :]
    visible = distance >= 0 if pattern.causal else torch.ones_like(distance, dtype=torch.bool)
    if pattern.window is not None:
        visible &= distance.abs() < pattern.window
    return visible if span_mask is None else visible | span_mask


def _in_blocks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    boundaries: Boundaries,
    pattern: Pattern,
    bidirectional: BidirectionalSpans | None = None,
) -> torch.Tensor:
    """Compute attention by blocks, with kernels that also return the log-sum-exp.

    Most (query, key) pairs outside a window are not computed, and sinks are merged at almost no cost.
    """
    tokens = (x[0].transpose(0, 1) for x in (query, key, value))
    if bidirectional is not None:
        blocks = bidirectional.blocks(pattern.window, query.device)
    else:
        blocks = Blocks(pack_blocks(boundaries.lengths(), pattern.causal, pattern.window), query.device)
    out: torch.Tensor = _InBlocks.apply(*tokens, pattern.sinks, blocks, pattern)  # type: ignore[no-untyped-call]
    return out.unsqueeze(0)


class _InBlocks(torch.autograd.Function):
    """Blockwise attention with gradients for queries, keys, values and sinks."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        blocks: Blocks,
        pattern: Pattern,
    ) -> torch.Tensor:
        out = accumulator(q, *q.shape[:2], v.shape[-1])
        lse = accumulator(q, *q.shape[:2])
        attend_blocks(q, k, v, blocks, scale_of(q, pattern), pattern.softcap, out, lse)
        if sinks is not None:
            add_sinks(out, lse, sinks)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.blocks = blocks
        ctx.scale = scale_of(q, pattern)
        ctx.softcap = pattern.softcap
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        dq, dk, dv = (accumulator(x, *x.shape) for x in (q, k, v))
        attend_blocks_backward(grad_out, q, k, v, out, lse, ctx.blocks, ctx.scale, ctx.softcap, dq, dk, dv)
        dsinks = None if sinks is None else sinks_gradient(grad_out, out, lse, sinks)
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype), dsinks, None, None


def scale_of(query: torch.Tensor, pattern: Pattern) -> float:
    """Return the scale of the logits: `pattern.scale` if it is set, otherwise 1 / sqrt(width)."""
    return float(query.shape[-1] ** -0.5) if pattern.scale is None else pattern.scale


def _varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, boundaries: Boundaries, pattern: Pattern
) -> torch.Tensor:
    """Compute attention with torch's flash attention over `cu_seqlens`: one launch per pack, without a host sync."""
    from torch.nn.attention.varlen import varlen_attn

    tokens_before = -1 if pattern.window is None else pattern.window - 1
    tokens_after = 0 if pattern.causal else tokens_before
    out = varlen_attn(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        boundaries.cu_seqlens,
        boundaries.cu_seqlens,
        boundaries.max_seqlen,
        boundaries.max_seqlen,
        scale=pattern.scale,
        window_size=(tokens_before, tokens_after),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(out, torch.Tensor)
    return out.unsqueeze(0)
