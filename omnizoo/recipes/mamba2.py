"""Mamba-2: no attention."""

from omnizoo.models.recipe import Recipe

RECIPE = Recipe(
    about="Mamba-2, Codestral Mamba 7B",
    state_size=("num_heads", "state_size", "head_dim"),
    small_config={"hidden_size": 128, "num_heads": 8, "head_dim": 32, "state_size": 16, "n_groups": 2},
)
