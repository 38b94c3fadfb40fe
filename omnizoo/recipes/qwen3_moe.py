"""Qwen3 30B-A3B and 235B-A22B: experts in every layer, without shared experts."""

from omnizoo.models.recipe import Recipe

RECIPE = Recipe(about="Qwen3 30B-A3B and 235B-A22B")
