"""LFM2: short gated convolutions, with some attention layers."""

from omnizoo.models.recipe import Recipe

RECIPE = Recipe(
    about="LFM2 350M to 2.6B", small_config={"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2}
)
