"""Granite 4 hybrid models: Mamba-2 layers, with some attention layers; experts and a shared MLP in each layer."""

from omnizoo.models.recipe import Recipe

RECIPE = Recipe(
    about="Granite 4.0 H",
    state_size=("mamba_n_heads", "mamba_d_state", "mamba_d_head"),
    small_config={
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],  # the default has no attention layers
        "mamba_n_heads": 8,  # mamba_n_heads x mamba_d_head = mamba_expand x hidden_size
        "mamba_d_head": 32,
        "mamba_d_state": 16,
        "mamba_n_groups": 2,
    },
)
