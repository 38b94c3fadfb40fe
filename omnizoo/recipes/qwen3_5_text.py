"""Language model of dense Qwen3.5: three gated delta net layers per gated attention layer."""

from omnizoo.models.recipe import Recipe

RECIPE = Recipe(
    about="Qwen3.5, dense, text", state_size=("linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
)
