"""OLMoE: small experts, many of them; `intermediate_size` is that of an expert."""

from omnizoo.recipes.base import Recipe

RECIPE = Recipe(about="OLMoE")
