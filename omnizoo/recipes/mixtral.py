"""Mixtral 8x7B and 8x22B: few large experts, two per token."""

from omnizoo.recipes.base import Recipe

RECIPE = Recipe(about="Mixtral 8x7B and 8x22B")
