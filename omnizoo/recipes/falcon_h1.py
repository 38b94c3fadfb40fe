"""Falcon-H1: Mamba-2 and attention in parallel in every layer."""

from omnizoo.models.recipe import Recipe

RECIPE = Recipe(
    about="Falcon-H1 0.5B to 34B",
    state_size=("mamba_n_heads", "mamba_d_state", "mamba_d_head"),
    small_config={
        "mamba_d_ssm": 64,
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_d_state": 16,
        "mamba_n_groups": 2,
    },
)
