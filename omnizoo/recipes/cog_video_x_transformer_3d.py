"""CogVideoX 1.0 and 1.5: text to video, with joint attention over text and video tokens; v-prediction."""

from typing import Any

import torch
from diffusers.models.embeddings import get_3d_rotary_pos_embed
from diffusers.pipelines.cogvideo.pipeline_cogvideox import get_resize_crop_region_for_grid

from omnizoo.models.diffusion.recipe import LATENTS, TEXT, Cut, DiffusionRecipe, ForwardShapes, Split
from omnizoo.recipes.shared.diffusion import REFERENCE_CHANNELS, output_channels, squares, text


def positions(shapes: ForwardShapes) -> dict[str, Any]:
    """Return rotary positions, if the model has them, and the constant of the image-to-video model of 1.5."""
    config = shapes.config
    frames, *sides = shapes.grid
    patch = config["patch_size"]
    base = config["sample_height"] // patch, config["sample_width"] // patch
    inputs: dict[str, Any] = {}
    if config["ofs_embed_dim"]:
        inputs["ofs"] = torch.full((1,), 2.0, dtype=shapes.dtype, device=shapes.device)
    if not config["use_rotary_positional_embeddings"]:
        return inputs
    is_sliced = config["patch_size_t"] is not None
    crop: Any = get_resize_crop_region_for_grid
    inputs["image_rotary_emb"] = get_3d_rotary_pos_embed(
        embed_dim=config["attention_head_dim"],
        crops_coords=None if is_sliced else crop(tuple(sides), base[1], base[0]),
        grid_size=tuple(sides),
        temporal_size=frames,
        grid_type="slice" if is_sliced else "linspace",
        max_size=base if is_sliced else None,
        device=shapes.device,
    )
    return inputs


RECIPE = DiffusionRecipe(
    about="CogVideoX 2B and 5B, CogVideoX 1.5 5B",
    media=("video",),
    blocks=("CogVideoXBlock",),
    conditions={"text": text("encoder_hidden_states", "text_embed_dim"), "reference_latents": REFERENCE_CHANNELS},
    small_config={"num_layers": 2, "num_attention_heads": 4, "attention_head_dim": 16, "time_embed_dim": 16},
    patch=squares(frames="patch_size_t"),
    channels=output_channels,
    frames_first=True,
    is_time_discrete=True,
    arguments=positions,
    split=Split(
        inputs={
            "": {"image_rotary_emb": Cut(LATENTS, 0)},
            "transformer_blocks.0": {"hidden_states": Cut(LATENTS), "encoder_hidden_states": Cut(TEXT)},
        },
        attention={"transformer_blocks.*.attn1": (TEXT, LATENTS)},
    ),
)
