"""Nemotron-H and Nemotron 3: each layer is Mamba-2, attention, an MLP, or experts with a shared one."""

from omnizoo.recipes.base import Recipe

RECIPE = Recipe(
    about="Nemotron-H, Nemotron 3",
    state_size=("mamba_num_heads", "ssm_state_size", "mamba_head_dim"),
    shrink={
        "mamba_num_heads": 8,  # x mamba_head_dim is the layer's own width
        "mamba_head_dim": 32,
        "ssm_state_size": 16,
        "n_groups": 2,
        "hidden_dropout": 0.0,
    },
)
