"""Qwen-Image: text to image, with joint attention over text and image tokens."""

from typing import Any

from omnizoo.models.diffusion.recipe import LATENTS, TEXT, Config, Cut, DiffusionRecipe, ForwardShapes, Split
from omnizoo.recipes.shared.diffusion import fixed, guidance, text


def channels(config: Config) -> int:
    """Return the channels of the latents, before patches are joined."""
    return int(config["in_channels"]) // 4


def shapes_of_grids(shapes: ForwardShapes) -> dict[str, Any]:
    """Return the grids from which the model computes rotary positions."""
    return {"img_shapes": [[shapes.grid]] * shapes.batch}


RECIPE = DiffusionRecipe(
    about="Qwen-Image, 20B",
    media=("image",),
    blocks=("QwenImageTransformerBlock",),
    conditions={"text": text("encoder_hidden_states", "joint_attention_dim"), "guidance": guidance()},
    small_config={
        "num_layers": 2,
        "num_attention_heads": 4,
        "attention_head_dim": 16,
        "axes_dims_rope": [4, 6, 6],
    },
    patch=fixed(1, 2, 2),
    channels=channels,
    is_packed=True,
    time_scale=1.0,
    arguments=shapes_of_grids,
    trims_text=True,
    unsupported=dict.fromkeys(
        ("zero_cond_t", "use_additional_t_cond", "use_layer3d_rope"), "editing and layers are not supported"
    ),
    split=Split(
        inputs={"transformer_blocks.0": {"hidden_states": Cut(LATENTS), "encoder_hidden_states": Cut(TEXT)}},
        outputs={"pos_embed": (Cut(LATENTS, 0), Cut(TEXT, 0))},
        attention={"transformer_blocks.*.attn": (TEXT, LATENTS)},
    ),
)
