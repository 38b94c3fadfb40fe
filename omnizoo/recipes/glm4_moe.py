"""GLM 4.5 MoE: dense first layers, shared expert, sigmoid routing with a bias, RoPE on half of each head."""

from omnizoo.models.recipe import Recipe

RECIPE = Recipe(about="GLM 4.5 and 4.6", small_config={"first_k_dense_replace": 1})
