"""Llama 2 and 3: dense. The recipe is empty, because everything can be read from the model."""

from omnizoo.models.recipe import Recipe

RECIPE = Recipe(about="Llama 2 and 3, and the many models of their shape")
