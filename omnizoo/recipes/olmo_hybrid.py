"""OLMo hybrid: gated delta net, whose values may be wider than its keys, and attention."""

from omnizoo.recipes.base import Recipe

RECIPE = Recipe(
    about="OLMo Hybrid 7B", state_size=("linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
)
