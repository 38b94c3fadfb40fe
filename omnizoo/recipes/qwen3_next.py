"""Qwen3-Next 80B-A3B: three layers of gated delta net for each of gated attention, experts in every layer."""

from omnizoo.recipes.base import Recipe

RECIPE = Recipe(
    about="Qwen3-Next 80B-A3B", state_size=("linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
)
