"""OLMoE: many small experts; `intermediate_size` is the width of one expert."""

from omnizoo.models.recipe import Recipe

RECIPE = Recipe(about="OLMoE")
