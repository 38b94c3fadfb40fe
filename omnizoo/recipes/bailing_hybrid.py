"""Ling hybrids: Kimi delta attention and latent attention, experts in groups."""

from omnizoo.recipes.base import Recipe

RECIPE = Recipe(
    about="Ling hybrids",
    state_size=("linear_num_heads", "linear_head_dim", "linear_head_dim"),
    attention_width=("qk_head_dim", "v_head_dim"),
)
