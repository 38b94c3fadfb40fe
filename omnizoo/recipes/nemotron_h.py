"""Nemotron-H and Nemotron 3: each layer is Mamba-2, attention, an MLP, or experts with a shared expert."""

from omnizoo.models.recipe import Recipe

RECIPE = Recipe(
    about="Nemotron-H, Nemotron 3",
    state_size=("mamba_num_heads", "ssm_state_size", "mamba_head_dim"),
    small_config={
        "mamba_num_heads": 8,  # mamba_num_heads x mamba_head_dim is the inner width of the layer
        "mamba_head_dim": 32,
        "ssm_state_size": 16,
        "n_groups": 2,
        "hidden_dropout": 0.0,
    },
)
