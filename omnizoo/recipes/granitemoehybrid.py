"""Granite 4 hybrids: Mamba-2 layers and a layer of attention now and then, experts and a shared MLP in each."""

from omnizoo.recipes.base import Recipe

RECIPE = Recipe(
    about="Granite 4.0 H",
    state_size=("mamba_n_heads", "mamba_d_state", "mamba_d_head"),
    shrink={
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],  # its default has no attention
        "mamba_n_heads": 8,  # x mamba_d_head = mamba_expand x hidden_size
        "mamba_d_head": 32,
        "mamba_d_state": 16,
        "mamba_n_groups": 2,
    },
)
