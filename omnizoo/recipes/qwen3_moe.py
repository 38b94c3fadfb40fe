"""Qwen3 30B-A3B and 235B-A22B: experts in every layer, none shared."""

from omnizoo.recipes.base import Recipe

RECIPE = Recipe(about="Qwen3 30B-A3B and 235B-A22B")
