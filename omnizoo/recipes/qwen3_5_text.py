"""Qwen3.5, the language model of its dense sizes: three layers of gated delta net for each of gated attention."""

from omnizoo.recipes.base import Recipe

RECIPE = Recipe(
    about="Qwen3.5, dense, text", state_size=("linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
)
