"""Registers `ops.attention` in transformers' attention interface as `packed`, and as `packed_flash` for encoders.

No mask function is registered, so models build no mask. Metadata of the pack is passed through the keyword arguments of
the model. `cu_seq_lens_q` contains the sample boundaries. With sequence parallelism, `attend` is a function that
also attends to the tokens on other ranks. `mutual` contains bidirectional spans. `attend` already includes them.

Some models do not pass these arguments on. For these models, `carry_pack` stores a copy on each module. If a layer has
neither the arguments nor the copy, it raises an error instead of mixing samples.
"""

from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from omnizoo.config.errors import UserError
from omnizoo.models.hf_private import PACKED, PACKED_TOWER
from omnizoo.ops.attention.bidirectional_spans import BidirectionalSpans
from omnizoo.ops.attention.packed import Boundaries, Pattern, packed_attention
from omnizoo.ops.compiled_blocks import graph_break

# A KV cache or a 2-D attention mask would silently disable the isolation of packed samples.
NO_CACHE: dict[str, Any] = {"use_cache": False}
CARRIED = ("attend", "states", "cu_seq_lens_q", "max_length_q", "mutual")


def packed_inputs(
    cu_seqlens: torch.Tensor, max_seqlen: int, mutual: BidirectionalSpans | None = None
) -> dict[str, Any]:
    """Return the model's keyword arguments for a complete pack: sample boundaries and bidirectional spans."""
    boundaries = {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens}
    lengths = {"max_length_q": max_seqlen, "max_length_k": max_seqlen}
    return NO_CACHE | boundaries | lengths | ({} if mutual is None else {"mutual": mutual})


@graph_break
def packed(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention within each sample of a pack, with the signature of transformers' attention interface."""
    if attention_mask is not None or kwargs.get("position_bias") is not None:
        raise UserError(
            f"model: {type(module).__name__} passes a mask or bias, which packed attention does not support. "
            "Set model.attention to `sdpa` or `eager`."
        )
    if not kwargs.keys() & {"attend", "cu_seq_lens_q"}:
        kwargs |= getattr(module, "pack_carried", {})

    longest_sample = getattr(kwargs.get("attend"), "longest", kwargs.get("max_length_q", 0))
    _check_chunks(module, longest_sample)
    _check_temperature(module, max(query.shape[2], longest_sample))

    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    pattern = Pattern(causal, scaling, sliding_window, softcap, s_aux, dropout)
    if "attend" in kwargs:  # sequence parallel: the tokens of a pack are split over ranks
        return kwargs["attend"](query, key, value, pattern).contiguous(), None

    if "cu_seq_lens_q" not in kwargs:
        raise UserError(
            f"model: {type(module).__name__} did not pass the sample boundaries to attention, so tokens would attend "
            "to other samples of the pack. Pass the keyword arguments of forward on, or use another model."
        )
    bidirectional: BidirectionalSpans | None = kwargs.get("mutual")
    lengths = None if bidirectional is None else bidirectional.lengths
    boundaries = Boundaries(kwargs["cu_seq_lens_q"], kwargs["max_length_q"], lengths)
    # Some models call `view` on the result, because transformers' attention functions return contiguous tensors.
    return packed_attention(query, key, value, boundaries, pattern, bidirectional).contiguous(), None


def _check_chunks(module: nn.Module, longest_sample: int) -> None:
    """Raise a `UserError` if a layer attends within chunks and a sample is longer than one chunk.

    transformers implements chunks with a mask, but packed attention builds no mask. Within one chunk, such layers
    compute plain attention.
    """
    layer_types = getattr(getattr(module, "config", None), "layer_types", None) or ()
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int) or layer >= len(layer_types) or layer_types[layer] != "chunked_attention":
        return
    chunk: Any = module.config.attention_chunk_size  # type: ignore[union-attr]
    if chunk is not None and longest_sample > chunk:
        raise UserError(
            f"model: {type(module).__name__} attends in chunks of {chunk} tokens, which packed attention does not "
            f"support, and a sample has {longest_sample} tokens. Set data.pack_tokens to at most {chunk}."
        )


def _check_temperature(module: nn.Module, num_tokens: int) -> None:
    """Raise a `UserError` if a layer scales queries by position and the pack is long enough to be affected.

    These layers count positions from the first token of this rank's part of the pack, not from the first token of the
    sample. Below position `floor_scale`, the scale is 1.
    """
    floor = getattr(module, "floor_scale", None)
    if floor is None or not getattr(module, "attn_temperature_tuning", False) or getattr(module, "use_rope", False):
        return
    if num_tokens >= floor:
        raise UserError(
            f"model: {type(module).__name__} scales attention from token {floor} on, counted from the beginning of the "
            f"pack instead of the sample, and the pack has {num_tokens} tokens. Set data.pack_tokens below {floor}, or "
            "attn_temperature_tuning: false in the model's config."
        )


for name in (PACKED, PACKED_TOWER):
    AttentionInterface.register(name, packed)


def carry_pack(model: nn.Module) -> None:
    """Store the pack's keyword arguments on all modules of a model whose blocks do not pass these arguments on.

    They are kept until the next forward pass, because recomputation in backward needs them again.
    """
    carried: dict[str, Any] = {}

    def keep(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        carried.clear()
        carried.update((key, kwargs[key]) for key in CARRIED if key in kwargs)

    for module in model.modules():
        if module is not model:
            module.pack_carried = carried  # type: ignore[assignment]
    model.register_forward_pre_hook(keep, with_kwargs=True)


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None = None, **kwargs: Any
) -> torch.Tensor:
    """Compute causal attention within each sample of a pack, for user modules.

    Args:
        query: Queries `[1, heads, tokens, width]`.
        key: Keys `[1, kv_heads, tokens, width]`.
        value: Values `[1, kv_heads, tokens, width]`.
        scale: Factor of the scores (default: 1 / sqrt(width)).
        **kwargs: The keyword arguments of the module's forward. They contain the sample boundaries and, with sequence
            parallelism, the function that also attends to tokens on other ranks.

    Returns:
        The attention output `[1, tokens, heads, width]`.

    Raises:
        UserError: If `kwargs` lacks the sample boundaries.
    """
    return packed(_CAUSAL, query, key, value, None, scaling=scale, **kwargs)[0]


_CAUSAL = nn.Identity()
