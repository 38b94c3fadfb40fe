"""Stable Diffusion 3 and 3.5: text to image, with joint attention over text and image tokens."""

from omnizoo.models.diffusion.recipe import LATENTS, TEXT, Cut, DiffusionRecipe, Split
from omnizoo.recipes.shared.diffusion import output_channels, squares, text, vector

RECIPE = DiffusionRecipe(
    about="Stable Diffusion 3 and 3.5, 2B and 8B",
    media=("image",),
    blocks=("JointTransformerBlock",),
    conditions={
        "text": text("encoder_hidden_states", "joint_attention_dim"),
        "pooled": vector("pooled_projections", "pooled_projection_dim"),
    },
    small_config={
        "num_layers": 2,
        "num_attention_heads": 4,
        "attention_head_dim": 8,
        "caption_projection_dim": 32,
        "dual_attention_layers": [],
    },
    patch=squares(),
    channels=output_channels,
    dims=2,
    split=Split(
        outputs={"pos_embed": (Cut(LATENTS),), "context_embedder": (Cut(TEXT),)},
        attention={"transformer_blocks.*.attn": (TEXT, LATENTS), "transformer_blocks.*.attn2": (LATENTS,)},
    ),
)
