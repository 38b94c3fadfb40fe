"""Plugs `ops.attention` into transformers' attention interface under the name `packed`.

No mask function goes with the name, so models build no mask. What attention needs to know of the pack travels through
the model's own keyword arguments: its boundaries as `cu_seq_lens_q`, or, where its tokens are spread over ranks, the
function `attend` that reaches across them. A model that loses them on the way is an error, not a leak.
"""

from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from omnizoo.models.hf_private import PACKED
from omnizoo.ops.attention import Boundaries, Pattern, packed_attention


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
    if attention_mask is not None or kwargs.get("position_bias") is not None:
        raise RuntimeError(
            f"{type(module).__name__} brings a mask or bias of its own, which packed attention does not take; "
            "set model.attention to `sdpa` or `eager` for this model"
        )
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    pattern = Pattern(causal, scaling, sliding_window, softcap, s_aux, dropout)
    if "attend" in kwargs:  # sequence parallel: the tokens of a pack are spread over ranks
        return kwargs["attend"](query, key, value, pattern), None
    if "cu_seq_lens_q" not in kwargs:
        raise RuntimeError(
            f"{type(module).__name__} did not pass the sample boundaries on to attention: the samples of a pack would "
            "see each other; set model.attention to `sdpa` or `eager` for this model"
        )
    boundaries = Boundaries(kwargs["cu_seq_lens_q"], kwargs["max_length_q"])
    return packed_attention(query, key, value, boundaries, pattern), None


AttentionInterface.register(PACKED, packed)


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None = None, **kwargs: Any
) -> torch.Tensor:
    """Causal attention for a user's own module: `[1, heads, tokens, width]` in, `[1, tokens, heads, width]` out.

    `kwargs` are those that the module's forward was called with; they tell samples apart and reach across ranks.
    """
    return packed(_CAUSAL, query, key, value, None, scaling=scale, **kwargs)[0]


_CAUSAL = nn.Identity()
