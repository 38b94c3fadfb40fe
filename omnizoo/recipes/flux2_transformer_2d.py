"""Flux.2: text to image, with joint attention over text and image tokens. Normalized latents are already patches."""

from typing import Any

import torch

from omnizoo.models.diffusion.recipe import LATENTS, TEXT, Config, Cut, DiffusionRecipe, ForwardShapes, Split
from omnizoo.recipes.shared.diffusion import fixed, guidance, text


def ids(shapes: ForwardShapes) -> dict[str, Any]:
    """Return the ids of tokens as (0, row, column, 0) for latents, and (0, 0, 0, position) for text."""

    def coordinates(*sizes: int) -> torch.Tensor:
        axes = [torch.arange(size, device=shapes.device) for size in sizes]
        return torch.cartesian_prod(*axes).expand(shapes.batch, -1, -1)

    _, height, width = shapes.grid
    return {"img_ids": coordinates(1, height, width, 1), "txt_ids": coordinates(1, 1, 1, shapes.text_tokens)}


def channels(config: Config) -> int:
    """Return the channels of the normalized latents."""
    return int(config["in_channels"])


RECIPE = DiffusionRecipe(
    about="Flux.2 dev, 32B, and klein",
    media=("image",),
    blocks=("Flux2TransformerBlock", "Flux2SingleTransformerBlock"),
    conditions={"text": text("encoder_hidden_states", "joint_attention_dim"), "guidance": guidance()},
    small_config={
        "num_layers": 2,
        "num_single_layers": 2,
        "num_attention_heads": 4,
        "attention_head_dim": 16,
        "axes_dims_rope": [4, 4, 4, 4],
    },
    patch=fixed(1, 1, 1),
    channels=channels,
    is_packed=True,
    time_scale=1.0,
    arguments=ids,
    split=Split(
        inputs={
            "": {
                "hidden_states": Cut(LATENTS),
                "encoder_hidden_states": Cut(TEXT),
                "img_ids": Cut(LATENTS),
                "txt_ids": Cut(TEXT),
            }
        },
        attention=dict.fromkeys(
            ("transformer_blocks.*.attn", "single_transformer_blocks.*.attn"),
            (TEXT, LATENTS),
        ),
    ),
)
