"""Gemma 3 (text): five sliding-window layers to one full one, each kind with its own rotary base; scaled embeddings."""

from omnizoo.recipes.base import Recipe

RECIPE = Recipe(
    about="Gemma 3, the language model alone",
    shrink={"query_pre_attn_scalar": 16},  # queries are scaled by this, not by the width of a head
)
