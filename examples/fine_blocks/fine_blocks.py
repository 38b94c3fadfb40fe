"""A custom recipe, which overrides what OmniZoo reads from the code of a model family.

    PYTHONPATH=examples/fine_blocks omnizoo verify examples/text_tiny.yaml --model.recipe fine_blocks:RECIPE --world 2

In this one, attention and MLP of Qwen3 are separate blocks, the unit of FSDP sharding and recomputation. FSDP gathers
half of a layer at a time, with twice as many all-gathers. omnizoo/models/recipe.py documents all fields of a recipe.
"""

from omnizoo import Recipe

RECIPE = Recipe(
    about="Qwen3 with half a layer per block",
    blocks=("Qwen3Attention", "Qwen3MLP"),
    small_config={"rope_theta": 10000.0},  # added to the small sizes that `omnizoo verify` chooses
)
