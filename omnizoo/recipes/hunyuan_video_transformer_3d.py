"""HunyuanVideo: text to video, with joint attention over text and video tokens."""

from typing import Any

import torch

from omnizoo.models.diffusion.recipe import LATENTS, TEXT, Cut, DiffusionRecipe, ForwardShapes, Split
from omnizoo.recipes.shared.diffusion import guidance, output_channels, squares, text, vector


def text_mask(shapes: ForwardShapes) -> dict[str, Any]:
    """Return a mask of ones: text is trimmed."""
    return {"encoder_attention_mask": torch.ones(shapes.batch, shapes.text_tokens, device=shapes.device).bool()}


RECIPE = DiffusionRecipe(
    about="HunyuanVideo, 13B",
    media=("video", "image"),
    blocks=("HunyuanVideoTransformerBlock", "HunyuanVideoSingleTransformerBlock"),
    conditions={
        "text": text("encoder_hidden_states", "text_embed_dim"),
        "pooled": vector("pooled_projections", "pooled_projection_dim"),
        "guidance": guidance(scale=1000.0),
    },
    small_config={
        "num_layers": 2,
        "num_single_layers": 2,
        "num_refiner_layers": 1,
        "num_attention_heads": 4,
        "attention_head_dim": 12,
        "rope_axes_dim": [4, 4, 4],
    },
    patch=squares(frames="patch_size_t"),
    channels=output_channels,
    arguments=text_mask,
    trims_text=True,
    unsupported={"image_condition_type": "image to video is not supported for this family"},
    split=Split(
        outputs={
            "x_embedder": (Cut(LATENTS),),
            "context_embedder": (Cut(TEXT),),
            "rope": (Cut(LATENTS, 0), Cut(LATENTS, 0)),
        },
        attention=dict.fromkeys(
            ("transformer_blocks.*.attn", "single_transformer_blocks.*.attn"),
            (LATENTS, TEXT),
        ),
        local_attention=("context_embedder.token_refiner.refiner_blocks.*.attn",),
        needs_text=True,  # its blocks slice with `[:, :-text_tokens]`
    ),
)
