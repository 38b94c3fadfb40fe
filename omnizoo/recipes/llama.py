"""Llama 2 and 3: dense; nothing to add: the model itself tells all."""

from omnizoo.recipes.base import Recipe

RECIPE = Recipe(about="Llama 2 and 3, and the many models of their shape")
