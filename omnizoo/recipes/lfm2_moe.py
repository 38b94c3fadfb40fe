"""LFM2 with experts: short convolutions, with some attention layers."""

from omnizoo.models.recipe import Recipe

RECIPE = Recipe(
    about="LFM2 8B-A1B",
    small_config={
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],  # the first layer is dense; the default is None
    },
)
