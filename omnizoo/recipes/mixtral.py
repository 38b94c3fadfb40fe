"""Mixtral 8x7B and 8x22B: few large experts, two per token."""

from omnizoo.models.recipe import Recipe

RECIPE = Recipe(about="Mixtral 8x7B and 8x22B")
