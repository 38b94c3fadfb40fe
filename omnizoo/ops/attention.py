"""Attention over packed samples: `[1, heads, tokens, width]` in which each sample sees only itself.

`packed_attention` picks the kernel for the device; `per_sample` is the plain torch twin that every kernel is tested
against, and on the CPU also the fastest exact one with a backward (docs/LOG.md has the figures).
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class Boundaries:
    """Where samples begin and end along the token axis: `cu_seqlens` as flash kernels take it."""

    cu_seqlens: torch.Tensor  # int32 [samples + 1], starts with 0, ends with the number of tokens
    max_seqlen: int

    def lengths(self) -> list[int]:
        return self.cu_seqlens.diff().tolist()


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
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, boundaries: Boundaries, pattern: Pattern
) -> torch.Tensor:
    """`query [1, H, T, D]`, `key, value [1, KV, T, D]` with KV dividing H; returns `[1, T, H, D]`."""
    plain = pattern.softcap is None and pattern.sinks is None and pattern.dropout == 0.0
    if query.device.type == "cuda" and query.dtype in (torch.bfloat16, torch.float16) and plain:
        return _varlen(query, key, value, boundaries, pattern)
    return per_sample(query, key, value, boundaries, pattern)


def per_sample(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, boundaries: Boundaries, pattern: Pattern
) -> torch.Tensor:
    """One attention call per sample: no mask over the whole pack, work only where attention is."""
    lengths = boundaries.lengths()
    samples = zip(query.split(lengths, 2), key.split(lengths, 2), value.split(lengths, 2), strict=True)
    return torch.cat([_one_sample(q, k, v, pattern) for q, k, v in samples], 2).transpose(1, 2)


def _one_sample(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, pattern: Pattern) -> torch.Tensor:
    length = query.shape[2]
    windowed = pattern.window is not None and pattern.window < length
    if pattern.softcap is None and pattern.sinks is None:
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=_visible(length, pattern, query.device) if windowed else None,
            is_causal=pattern.causal and not windowed,
            dropout_p=pattern.dropout,
            scale=pattern.scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scale = query.shape[-1] ** -0.5 if pattern.scale is None else pattern.scale
    logits = (query @ key.transpose(2, 3)) * scale
    if pattern.softcap is not None:
        logits = pattern.softcap * torch.tanh(logits / pattern.softcap)
    logits = logits.masked_fill(~_visible(length, pattern, query.device), -torch.inf)
    if pattern.sinks is not None:
        sinks = pattern.sinks.to(logits.dtype).view(1, -1, 1, 1).expand(1, -1, length, 1)
        logits = torch.cat([logits, sinks], 3)
    weights = logits.softmax(3, dtype=torch.promote_types(logits.dtype, torch.float32)).to(query.dtype)[..., :length]
    return F.dropout(weights, pattern.dropout) @ value


def _visible(length: int, pattern: Pattern, device: torch.device) -> torch.Tensor:
    """bool [length, length]: may query i see key j."""
    position = torch.arange(length, device=device)
    distance = position[:, None] - position[None, :]
    visible = distance >= 0 if pattern.causal else torch.ones_like(distance, dtype=torch.bool)
    return visible if pattern.window is None else visible & (distance.abs() < pattern.window)


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
