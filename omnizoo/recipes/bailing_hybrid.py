"""Ling hybrid models: Kimi delta attention, latent attention, grouped experts."""

from omnizoo.models.recipe import Recipe

RECIPE = Recipe(
    about="Ling hybrids",
    state_size=("linear_num_heads", "linear_head_dim", "linear_head_dim"),
    attention_width=("qk_head_dim", "v_head_dim"),
)
