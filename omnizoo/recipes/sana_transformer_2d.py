"""Sana: text to image with linear attention and convolutions over the image, so ranks cannot share its tokens."""

from omnizoo.models.diffusion.recipe import Config, DiffusionRecipe
from omnizoo.recipes.shared.diffusion import squares, text


def channels(config: Config) -> int:
    """Return the channels of the latents. Some models also predict a variance."""
    return int(config["in_channels"])


RECIPE = DiffusionRecipe(
    about="Sana 0.6B and 1.6B",
    media=("image",),
    blocks=("SanaTransformerBlock",),
    conditions={"text": text("encoder_hidden_states", "caption_channels")},
    small_config={
        "num_layers": 2,
        "num_attention_heads": 4,
        "attention_head_dim": 8,
        "num_cross_attention_heads": 4,
        "cross_attention_head_dim": 8,
        "cross_attention_dim": 32,
    },
    patch=squares(),
    channels=channels,
    dims=2,
    time_factor="timestep_scale",
    trims_text=True,
    attends_text=False,
    unsupported={"guidance_embeds": "Sana-Sprint is trained with another objective"},
)
