"""GLM 4.5 MoE: dense first layers, shared expert, sigmoid routing with a bias, rotary on half of each head."""

from omnizoo.recipes.base import Recipe

RECIPE = Recipe(about="GLM 4.5 and 4.6", shrink={"first_k_dense_replace": 1})
