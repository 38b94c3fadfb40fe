"""Qwen3 dense: dense, normalised queries and keys."""

from omnizoo.recipes.base import Recipe

RECIPE = Recipe(about="Qwen3 dense")
