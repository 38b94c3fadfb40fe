"""gpt-oss 20B and 120B: experts with biases and interleaved gates, attention sinks, a window in every other layer."""

from omnizoo.models.recipe import Recipe

RECIPE = Recipe(about="gpt-oss 20B and 120B")
