"""Mistral 7B and its successors: dense, with a sliding window in all layers if the config sets one."""

from omnizoo.models.recipe import Recipe

RECIPE = Recipe(about="Mistral 7B and its successors")
