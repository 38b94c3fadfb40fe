"""Language model of Qwen3.5 with experts: gated delta net and gated attention, experts in every layer."""

from omnizoo.models.recipe import Recipe

RECIPE = Recipe(
    about="Qwen3.5 35B-A3B and larger, text",
    state_size=("linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
)
