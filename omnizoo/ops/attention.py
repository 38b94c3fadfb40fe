"""Attention over packed samples: `[1, heads, tokens, width]` in which each sample sees only itself.

`packed_attention` picks the kernel for the device (docs/LOG.md has the figures); `per_sample` is the plain torch twin
that every kernel is tested against. Tokens that see each other (`Mutual`) take two blocks, by the same kernels and
merged exactly: what is behind, as without them, and the triangle ahead.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from omnizoo.ops.attention_blocks import (
    WIDEST,
    Blocks,
    accumulator,
    add_sinks,
    attend_blocks,
    attend_blocks_backward,
    pack_blocks,
    sinks_gradient,
    takes_flash,
)
from omnizoo.ops.mutual import Mutual


@dataclass(frozen=True)
class Boundaries:
    """Where samples begin and end along the token axis: `cu_seqlens` as flash kernels take it."""

    cu_seqlens: torch.Tensor  # int32 [samples + 1], starts with 0, ends with the number of tokens
    max_seqlen: int
    known: Sequence[int] | None = None  # the lengths, where the host has them

    def lengths(self) -> list[int]:
        return self.cu_seqlens.diff().tolist() if self.known is None else list(self.known)


@dataclass(frozen=True)
class Pattern:
    """What attention does besides softmax(q k) v. Names and meanings are those of transformers' attention interface."""

    causal: bool = True
    scale: float | None = None
    window: int | None = None  # a token sees itself and the `window - 1` before it
    softcap: float | None = None  # logits become softcap * tanh(logits / softcap)
    sinks: torch.Tensor | None = None  # [heads]: one more logit per head that takes weight but has no value
    dropout: float = 0.0


def packed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    boundaries: Boundaries,
    pattern: Pattern,
    mutual: Mutual | None = None,
) -> torch.Tensor:
    """`query [1, H, T, D]`, `key, value [1, KV, T, D]` with KV dividing H; returns `[1, T, H, D]`."""
    if mutual is not None and not mutual.counts(pattern.causal, pattern.window):
        mutual = None
    plain = pattern.softcap is None and pattern.sinks is None and query.shape[-1] == value.shape[-1]
    if pattern.dropout > 0.0:
        return per_sample(query, key, value, boundaries, pattern, mutual)
    if mutual is not None:
        return _in_blocks(query, key, value, boundaries, pattern, mutual)
    if plain and takes_flash(query):
        return _varlen(query, key, value, boundaries, pattern)
    if plain and (pattern.window is None or pattern.window >= boundaries.max_seqlen):
        return per_sample(query, key, value, boundaries, pattern)  # one flash kernel per sample: nothing to gain
    return _in_blocks(query, key, value, boundaries, pattern)


def per_sample(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    boundaries: Boundaries,
    pattern: Pattern,
    mutual: Mutual | None = None,
) -> torch.Tensor:
    """One attention call per sample: no mask over the whole pack, work only where attention is."""
    lengths = boundaries.lengths()
    samples = zip(query.split(lengths, 2), key.split(lengths, 2), value.split(lengths, 2), strict=True)
    outs = []
    for number, (q, k, v) in enumerate(samples):
        stretch = None if mutual is None else mutual.numbers(number, query.device)
        over = mutual is not None and mutual.over_windows
        outs.append(_one_sample(q, k, v, pattern, stretch, over))
    return torch.cat(outs, 2).transpose(1, 2)


def _one_sample(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pattern: Pattern,
    stretch: torch.Tensor | None = None,
    over_windows: bool = False,
) -> torch.Tensor:
    length = query.shape[2]
    masked = stretch is not None or (pattern.window is not None and pattern.window < length)
    groups = query.shape[1] // key.shape[1]
    if query.shape[-1] > WIDEST:  # the only kernel for these that does not write all logits down knows no groups
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        groups = 1
    if pattern.softcap is None and pattern.sinks is None:
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=_visible(length, pattern, query.device, stretch, over_windows) if masked else None,
            is_causal=pattern.causal and not masked,
            dropout_p=pattern.dropout,
            scale=pattern.scale,
            enable_gqa=groups > 1,
        )
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    logits = (query @ key.transpose(2, 3)) * scale_of(query, pattern)
    if pattern.softcap is not None:
        logits = pattern.softcap * torch.tanh(logits / pattern.softcap)
    logits = logits.masked_fill(~_visible(length, pattern, query.device, stretch, over_windows), -torch.inf)
    if pattern.sinks is not None:
        sinks = pattern.sinks.to(logits.dtype).view(1, -1, 1, 1).expand(1, -1, length, 1)
        logits = torch.cat([logits, sinks], 3)
    weights = logits.softmax(3, dtype=torch.promote_types(logits.dtype, torch.float32)).to(query.dtype)[..., :length]
    return F.dropout(weights, pattern.dropout) @ value


def _visible(
    length: int,
    pattern: Pattern,
    device: torch.device,
    stretch: torch.Tensor | None = None,
    over_windows: bool = False,
) -> torch.Tensor:
    """bool [length, length]: may query i see key j. `stretch [length]`: tokens with the same number see each other also
    ahead, however far; 0: none does. `over_windows`: and behind, whatever the window."""
    position = torch.arange(length, device=device)
    distance = position[:, None] - position[None, :]
    visible = distance >= 0 if pattern.causal else torch.ones_like(distance, dtype=torch.bool)
    if pattern.window is not None:
        visible &= distance.abs() < pattern.window
    if stretch is None:
        return visible
    together = (stretch[:, None] == stretch) & (stretch > 0)
    return visible | (together if over_windows else together & (distance < 0))


def _in_blocks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    boundaries: Boundaries,
    pattern: Pattern,
    mutual: Mutual | None = None,
) -> torch.Tensor:
    """One block per sample, by kernels that hand out the log-sum-exp: windows cost what they show, sinks nothing."""
    tokens = (x[0].transpose(0, 1) for x in (query, key, value))
    if mutual is not None:
        blocks = mutual.blocks(pattern.window, query.device)
    else:
        blocks = Blocks(pack_blocks(boundaries.lengths(), pattern.causal, pattern.window), query.device)
    out: torch.Tensor = _InBlocks.apply(*tokens, pattern.sinks, blocks, pattern)  # type: ignore[no-untyped-call]
    return out.unsqueeze(0)


class _InBlocks(torch.autograd.Function):
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
        out, lse = accumulator(q, *q.shape[:2], v.shape[-1]), accumulator(q, *q.shape[:2])
        attend_blocks(q, k, v, blocks, scale_of(q, pattern), pattern.softcap, out, lse)
        if sinks is not None:
            add_sinks(out, lse, sinks)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.blocks, ctx.scale, ctx.softcap = blocks, scale_of(q, pattern), pattern.softcap
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        grads = [accumulator(x, *x.shape) for x in (q, k, v)]
        attend_blocks_backward(grad_out, q, k, v, out, lse, ctx.blocks, ctx.scale, ctx.softcap, *grads)
        dsinks = None if sinks is None else sinks_gradient(grad_out, out, lse, sinks)
        return *(grad.to(q.dtype) for grad in grads), dsinks, None, None


def scale_of(query: torch.Tensor, pattern: Pattern) -> float:
    return float(query.shape[-1] ** -0.5) if pattern.scale is None else pattern.scale


def _varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, boundaries: Boundaries, pattern: Pattern
) -> torch.Tensor:
    """torch's own FlashAttention over `cu_seqlens`: one launch for the pack, no host sync."""
    from torch.nn.attention.varlen import varlen_attn

    reach = -1 if pattern.window is None else pattern.window - 1
    out = varlen_attn(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        boundaries.cu_seqlens,
        boundaries.cu_seqlens,
        boundaries.max_seqlen,
        boundaries.max_seqlen,
        scale=pattern.scale,
        window_size=(reach, 0 if pattern.causal else reach),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(out, torch.Tensor)
    return out.unsqueeze(0)
