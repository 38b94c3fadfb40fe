"""LFM2: short gated convolutions, with attention in between."""

from omnizoo.recipes.base import Recipe

RECIPE = Recipe(about="LFM2 350M to 2.6B", shrink={"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2})
