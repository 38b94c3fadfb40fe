"""Kimi K2.5 and K2.6: pictures of any shape, latent attention and experts as DeepSeek V3 has them."""

from omnizoo.recipes.base import Recipe
from omnizoo.recipes.kimi_towers import modalities
from omnizoo.recipes.vision_towers import enter_features

RECIPE = Recipe(
    about="Kimi K2.5, K2.6",
    blocks=("DeepseekV3DecoderLayer", "Kimi_K25VisionEncoderLayer"),
    attention_width=("qk_head_dim", "v_head_dim"),
    shrink={"vision_config": {"pos_emb_height": 8, "pos_emb_width": 8}, "projection_hidden_size": 64},
    modalities=modalities,
    enter=enter_features,
    towers={"image": "model.vision_tower"},
    projectors={"image": ("model.mm_projector",)},
)
