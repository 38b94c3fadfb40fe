"""A recipe of one's own: facts about a family, in place of what its code says.

    PYTHONPATH=examples/fine_blocks omnizoo verify examples/text_tiny.yaml --model.recipe fine_blocks:RECIPE --world 2

Here, attention and MLP of Qwen3 are units of their own, sharded and recomputed one by one: half of a block is gathered
at a time, with twice as many messages. All fields of a recipe, media among them: omnizoo/models/recipe.py.
"""

from omnizoo import Recipe

RECIPE = Recipe(
    about="Qwen3, its blocks in halves",
    blocks=("Qwen3Attention", "Qwen3MLP"),
    small_config={"rope_theta": 10000.0},  # on top of the small sizes that `omnizoo verify` chooses itself
)
