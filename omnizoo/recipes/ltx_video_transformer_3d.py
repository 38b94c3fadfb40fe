"""LTX-Video: text to video. The latents are packed, and text is read by cross attention."""

from typing import Any

from omnizoo.models.diffusion.recipe import LATENTS, Config, Cut, DiffusionRecipe, ForwardShapes, Grid, Split
from omnizoo.recipes.shared.diffusion import output_channels, squares, text

FRAME_RATE = 25  # default of the pipeline
COMPRESSION = (8, 32, 32)  # of the published autoencoder


def positions(shapes: ForwardShapes) -> dict[str, Any]:
    """Return the grid and the size of a latent in seconds and pixels. Text is trimmed, so it has no mask."""
    frames, height, width = shapes.grid
    depth, rows, columns = shapes.compression or COMPRESSION
    return {
        "num_frames": frames,
        "height": height,
        "width": width,
        "rope_interpolation_scale": (depth / FRAME_RATE, rows, columns),
        "encoder_attention_mask": None,
    }


def compression(vae: Config) -> Grid:
    """Return the pixels per latent of an autoencoder."""
    scalings = [bool(scaling) for scaling in vae["spatio_temporal_scaling"]]
    factor = 2 ** sum(scalings)
    side = vae["patch_size"] * factor
    return vae["patch_size_t"] * factor, side, side


RECIPE = DiffusionRecipe(
    about="LTX-Video 2B and 13B",
    media=("video", "image"),
    blocks=("LTXVideoTransformerBlock",),
    conditions={"text": text("encoder_hidden_states", "caption_channels")},
    small_config={"num_layers": 2, "num_attention_heads": 4, "attention_head_dim": 8, "cross_attention_dim": 32},
    patch=squares(frames="patch_size_t"),
    channels=output_channels,
    is_packed=True,
    arguments=positions,
    compression=compression,
    trims_text=True,
    attends_text=False,
    split=Split(
        inputs={"": {"hidden_states": Cut(LATENTS)}},
        outputs={"rope": (Cut(LATENTS), Cut(LATENTS))},
        attention={"transformer_blocks.*.attn1": (LATENTS,)},
        local_attention=("transformer_blocks.*.attn2",),
    ),
)
