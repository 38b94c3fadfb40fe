"""gpt-oss 20B and 120B: experts with biases and interleaved gates, attention sinks, every other layer windowed."""

from omnizoo.recipes.base import Recipe

RECIPE = Recipe(about="gpt-oss 20B and 120B")
