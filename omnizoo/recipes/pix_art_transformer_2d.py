"""PixArt-alpha and PixArt-Sigma: text to image with cross attention; predicts the noise and its variance."""

from typing import Any

import torch

from omnizoo.models.diffusion.recipe import LATENTS, Config, Cut, DiffusionRecipe, ForwardShapes, Split
from omnizoo.recipes.shared.diffusion import squares, text

PIXELS = 8  # per latent


def sizes(shapes: ForwardShapes) -> dict[str, Any]:
    """Return height, width and aspect ratio in pixels, which the model for 1024 pixels reads."""
    config = shapes.config
    is_used = config["use_additional_conditions"]
    if is_used is None:
        is_used = config["sample_size"] == 128
    if not is_used:
        return {"added_cond_kwargs": {"resolution": None, "aspect_ratio": None}}
    height, width = (tokens * config["patch_size"] * PIXELS for tokens in shapes.grid[1:])

    def repeated(*values: float) -> torch.Tensor:
        return torch.tensor([values] * shapes.batch, dtype=shapes.dtype, device=shapes.device)

    return {"added_cond_kwargs": {"resolution": repeated(height, width), "aspect_ratio": repeated(height / width)}}


def channels(config: Config) -> int:
    """Return the channels of the latents. The output has twice as many."""
    return int(config["in_channels"])


RECIPE = DiffusionRecipe(
    about="PixArt-alpha and PixArt-Sigma, 0.6B",
    media=("image",),
    blocks=("BasicTransformerBlock",),
    conditions={"text": text("encoder_hidden_states", "caption_channels")},
    small_config={"num_layers": 2, "num_attention_heads": 4, "attention_head_dim": 8, "cross_attention_dim": 32},
    patch=squares(),
    channels=channels,
    dims=2,
    is_time_discrete=True,
    arguments=sizes,
    trims_text=True,
    attends_text=False,
    split=Split(
        outputs={"pos_embed": (Cut(LATENTS),)},
        attention={"transformer_blocks.*.attn1": (LATENTS,)},
        local_attention=("transformer_blocks.*.attn2",),
    ),
)
