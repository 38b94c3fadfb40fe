"""LFM2 with experts: short convolutions, and attention in some layers."""

from omnizoo.recipes.base import Recipe

RECIPE = Recipe(
    about="LFM2 8B-A1B",
    shrink={
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],  # the first one dense; by default it has none at all
    },
)
