"""Bamba: Mamba-2 layers, with some attention layers."""

from omnizoo.models.recipe import Recipe

RECIPE = Recipe(
    about="Bamba 9B",
    state_size=("mamba_n_heads", "mamba_d_state", "mamba_d_head"),
    small_config={
        "num_hidden_layers": 2,
        "attn_layer_indices": [1],  # the default has no attention layers
        "mamba_n_heads": 8,  # mamba_n_heads x mamba_d_head = mamba_expand x hidden_size
        "mamba_d_head": 32,
        "mamba_d_state": 16,
        "mamba_n_groups": 2,
    },
)
