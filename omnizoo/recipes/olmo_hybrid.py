"""OLMo Hybrid: attention layers, and gated delta net layers whose values may be wider than their keys."""

from omnizoo.models.recipe import Recipe

RECIPE = Recipe(
    about="OLMo Hybrid 7B", state_size=("linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
)
