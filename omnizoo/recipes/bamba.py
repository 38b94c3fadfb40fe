"""Bamba: Mamba-2 layers, and a layer of attention now and then."""

from omnizoo.recipes.base import Recipe

RECIPE = Recipe(
    about="Bamba 9B",
    state_size=("mamba_n_heads", "mamba_d_state", "mamba_d_head"),
    shrink={
        "num_hidden_layers": 2,
        "attn_layer_indices": [1],  # by default, none
        "mamba_n_heads": 8,  # x mamba_d_head = mamba_expand x hidden_size
        "mamba_d_head": 32,
        "mamba_d_state": 16,
        "mamba_n_groups": 2,
    },
)
