"""Kimi Linear 48B-A3B: a delta rule with decay per channel, latent attention in every fourth layer, experts."""

from omnizoo.models.recipe import Recipe

RECIPE = Recipe(
    about="Kimi Linear 48B-A3B",
    state_size=("linear_num_heads", "linear_head_dim", "linear_head_dim"),
    attention_width=("qk_head_dim", "v_head_dim"),
)
