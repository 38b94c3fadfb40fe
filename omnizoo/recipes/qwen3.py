"""Qwen3: dense, normalized queries and keys."""

from omnizoo.models.recipe import Recipe

RECIPE = Recipe(about="Qwen3 dense")
