"""Plugs `ops.attention` into transformers' attention interface under the name `packed` (`packed_flash` for towers).

No mask function goes with the name, so models build no mask. What attention needs to know of the pack travels through
the model's own keyword arguments: its boundaries as `cu_seq_lens_q`, or, where its tokens are spread over ranks, the
function `attend` that reaches across them; and tokens that see each other as `mutual` (`attend` knows them). Some
models lose them on the way: `carry_pack` leaves a copy where attention finds it. Without either it is an error, not a
leak.
"""

from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from omnizoo.config.errors import UserError
from omnizoo.models.hf_private import PACKED, PACKED_TOWER
from omnizoo.ops.attention import Boundaries, Pattern, packed_attention
from omnizoo.ops.graphs import edge
from omnizoo.ops.mutual import Mutual

CARRIED = ("attend", "states", "cu_seq_lens_q", "max_length_q", "mutual")


@edge
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
        raise UserError(
            f"model: {type(module).__name__} brings a mask or bias of its own, which packed attention does not take; "
            "set model.attention to `sdpa` or `eager` for this model"
        )
    if not kwargs.keys() & {"attend", "cu_seq_lens_q"}:
        kwargs |= getattr(module, "pack_carried", {})
    _refuse_chunks(module, kwargs)
    _refuse_temperature(module, query.shape[2], kwargs)
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    pattern = Pattern(causal, scaling, sliding_window, softcap, s_aux, dropout)
    if "attend" in kwargs:  # sequence parallel: the tokens of a pack are spread over ranks
        return kwargs["attend"](query, key, value, pattern).contiguous(), None
    if "cu_seq_lens_q" not in kwargs:
        raise UserError(
            f"model: {type(module).__name__} did not pass the sample boundaries on to attention: the samples of a pack "
            "would see each other; hand the keyword arguments of forward on, or use another model"
        )
    mutual: Mutual | None = kwargs.get("mutual")
    known = None if mutual is None else mutual.lengths
    boundaries = Boundaries(kwargs["cu_seq_lens_q"], kwargs["max_length_q"], known)
    # Some models call `view` on what comes back, as transformers' own functions allow them to.
    return packed_attention(query, key, value, boundaries, pattern, mutual).contiguous(), None


def _refuse_chunks(module: nn.Module, told: dict[str, Any]) -> None:
    """Layers that attend within chunks of a sample say so by a mask alone, which is not made here: within one chunk
    they are like any other."""
    kinds = getattr(getattr(module, "config", None), "layer_types", None) or ()
    number = getattr(module, "layer_idx", None)
    if not isinstance(number, int) or number >= len(kinds) or kinds[number] != "chunked_attention":
        return
    chunk = module.config.attention_chunk_size  # type: ignore[union-attr]
    longest = getattr(told.get("attend"), "longest", told.get("max_length_q", 0))
    if chunk is not None and longest > chunk:
        raise UserError(
            f"model: {type(module).__name__} attends in chunks of {chunk} tokens, which packed attention does not; a "
            f"sample here has {longest}: set data.pack_tokens to at most {chunk}"
        )


def _refuse_temperature(module: nn.Module, tokens: int, told: dict[str, Any]) -> None:
    """Layers that scale queries by how far along they are count from the beginning of what this rank has of a pack, not
    of a sample. It makes no difference until `floor_scale` tokens."""
    floor = getattr(module, "floor_scale", None)
    if floor is None or not getattr(module, "attn_temperature_tuning", False) or getattr(module, "use_rope", False):
        return
    most = max(tokens, getattr(told.get("attend"), "longest", told.get("max_length_q", 0)))
    if most >= floor:
        raise UserError(
            f"model: {type(module).__name__} scales attention from token {floor} on, counted from the beginning of a "
            f"pack and not of a sample; there are {most}: set data.pack_tokens below {floor}, or "
            "attn_temperature_tuning: false in the config"
        )


for name in (PACKED, PACKED_TOWER):
    AttentionInterface.register(name, packed)


def carry_pack(model: nn.Module) -> None:
    """Keep what tells samples apart within reach of `model`'s attention, for models whose blocks do not hand it on.

    It stays until the next forward pass: a block that is recomputed in backward needs it again.
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
    """Causal attention for a user's own module: `[1, heads, tokens, width]` in, `[1, tokens, heads, width]` out.

    `kwargs` are those that the module's forward was called with; they tell samples apart and reach across ranks.
    """
    return packed(_CAUSAL, query, key, value, None, scaling=scale, **kwargs)[0]


_CAUSAL = nn.Identity()
