"""Qwen2 and Qwen2.5: dense, biased q/k/v projections."""

from omnizoo.recipes.base import Recipe

RECIPE = Recipe(about="Qwen2 and Qwen2.5")
