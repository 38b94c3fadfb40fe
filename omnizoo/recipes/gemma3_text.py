"""Gemma 3 (text): five sliding-window layers per full-attention layer, separate rotary bases, scaled embeddings."""

from omnizoo.models.recipe import Recipe

RECIPE = Recipe(
    about="Gemma 3, the language model alone",
    small_config={"query_pre_attn_scalar": 16},  # queries are scaled by this number, not by the head width
)
