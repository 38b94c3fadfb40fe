"""OLMo Hybrid: gated delta net, with values that may be wider than keys, and attention."""

from omnizoo.models.recipe import Recipe

RECIPE = Recipe(
    about="OLMo Hybrid 7B", state_size=("linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
)
