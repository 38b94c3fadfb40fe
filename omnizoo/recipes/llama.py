"""Llama 2 and 3: dense. The recipe is empty because the model provides everything."""

from omnizoo.models.recipe import Recipe

RECIPE = Recipe(about="Llama 2 and 3, and the many models of their shape")
