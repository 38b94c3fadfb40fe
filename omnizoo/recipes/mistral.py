"""Mistral 7B and its successors: dense, a sliding window in every layer where the config has one."""

from omnizoo.recipes.base import Recipe

RECIPE = Recipe(about="Mistral 7B and its successors")
