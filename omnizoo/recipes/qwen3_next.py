"""Qwen3-Next 80B-A3B: three gated delta net layers per gated attention layer, experts in every layer."""

from omnizoo.models.recipe import Recipe

RECIPE = Recipe(
    about="Qwen3-Next 80B-A3B", state_size=("linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
)
