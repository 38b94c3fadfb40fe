"""Falcon-H1: Mamba-2 and attention side by side in every layer."""

from omnizoo.recipes.base import Recipe

RECIPE = Recipe(
    about="Falcon-H1 0.5B to 34B",
    state_size=("mamba_n_heads", "mamba_d_state", "mamba_d_head"),
    shrink={
        "mamba_d_ssm": 64,
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_d_state": 16,
        "mamba_n_groups": 2,
    },
)
