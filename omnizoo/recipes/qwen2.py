"""Qwen2 and Qwen2.5: dense; query, key and value projections with biases."""

from omnizoo.models.recipe import Recipe

RECIPE = Recipe(about="Qwen2 and Qwen2.5")
