"""Wan 2.1 and 2.2: text to video, image to video, and the pair of transformers of Wan 2.2."""

from omnizoo.models.diffusion.recipe import (
    LATENTS,
    Condition,
    Config,
    Cut,
    DiffusionRecipe,
    Shape,
    Split,
)
from omnizoo.recipes.shared.diffusion import REFERENCE_CHANNELS, cubes, output_channels, text


def text_tokens(config: Config) -> int | None:
    """Return the number of text tokens of models with image features. Their attention takes the last 512 as text."""
    return 512 if config.get("added_kv_proj_dim") else None


def features_shape(config: Config, latents: Shape, tokens: int) -> Shape | None:
    """Return the shape of CLIP's features: 257 tokens of the first frame, or of the first and the last."""
    return (257, config["image_dim"]) if config.get("image_dim") else None


RECIPE = DiffusionRecipe(
    about="Wan 2.1 1.3B and 14B, Wan 2.2 A14B",
    media=("video", "image"),
    blocks=("WanTransformerBlock",),
    conditions={
        "text": text("encoder_hidden_states", "text_dim"),
        "reference_latents": REFERENCE_CHANNELS,
        "reference_features": Condition("encoder_hidden_states_image", features_shape),
    },
    small_config={"num_layers": 2, "num_attention_heads": 4, "attention_head_dim": 12, "ffn_dim": 64, "freq_dim": 16},
    patch=cubes("patch_size"),
    channels=output_channels,
    fixed_text_tokens=text_tokens,
    unsupported={"pos_embed_seq_len": "first and last frames as conditions are not supported"},
    attends_text=False,
    split=Split(
        inputs={"blocks.0": {"hidden_states": Cut(LATENTS)}},
        outputs={"rope": (Cut(LATENTS), Cut(LATENTS))},
        attention={"blocks.*.attn1": (LATENTS,)},
        local_attention=("blocks.*.attn2",),
    ),
)
