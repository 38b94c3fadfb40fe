"""Flux.1: text to image, with joint attention over text and image tokens."""

from omnizoo.models.diffusion.recipe import LATENTS, TEXT, Config, Cut, DiffusionRecipe, Split
from omnizoo.recipes.shared.diffusion import fixed, guidance, position_ids, text, vector

PATCH = (1, 2, 2)


def channels(config: Config) -> int:
    """Return the channels of the latents, before patches are joined."""
    return int(config["in_channels"]) // 4


RECIPE = DiffusionRecipe(
    about="Flux.1 dev and schnell, 12B",
    media=("image",),
    blocks=("FluxTransformerBlock", "FluxSingleTransformerBlock"),
    conditions={
        "text": text("encoder_hidden_states", "joint_attention_dim"),
        "pooled": vector("pooled_projections", "pooled_projection_dim"),
        "guidance": guidance(),
    },
    small_config={
        "num_layers": 2,
        "num_single_layers": 2,
        "num_attention_heads": 4,
        "attention_head_dim": 16,
        "axes_dims_rope": [4, 6, 6],
    },
    patch=fixed(*PATCH),
    channels=channels,
    is_packed=True,
    time_scale=1.0,
    arguments=position_ids,
    unsupported={"out_channels": "conditioning images in the channels are not supported"},
    split=Split(
        inputs={
            "": {
                "hidden_states": Cut(LATENTS),
                "encoder_hidden_states": Cut(TEXT),
                "img_ids": Cut(LATENTS, 0),
                "txt_ids": Cut(TEXT, 0),
            }
        },
        attention=dict.fromkeys(
            ("transformer_blocks.*.attn", "single_transformer_blocks.*.attn"),
            (TEXT, LATENTS),
        ),
    ),
)
