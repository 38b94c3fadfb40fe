"""Kimi K2.5 and K2.6: images of any shape; latent attention and experts as in DeepSeek V3."""

from functools import partial

from omnizoo.models.media.media_model import MediaModule
from omnizoo.models.recipe import Recipe
from omnizoo.recipes.shared.encoders import EncoderSpec, build_modalities, merge_features
from omnizoo.recipes.shared.kimi_image import MARKS, NativeSizeEncoder

# The chat template of the model writes a newline after an image.
IMAGE = EncoderSpec(NativeSizeEncoder, "<|media_pad|>", MARKS, in_chat="{item}\n")

RECIPE = Recipe(
    about="Kimi K2.5, K2.6",
    blocks=("DeepseekV3DecoderLayer", "Kimi_K25VisionEncoderLayer"),
    attention_width=("qk_head_dim", "v_head_dim"),
    small_config={"vision_config": {"pos_emb_height": 8, "pos_emb_width": 8}, "projection_hidden_size": 64},
    modalities=partial(build_modalities, {"image": IMAGE}),
    merge_features=merge_features,
    media_modules=(MediaModule("image", "encoder", "model.vision_tower", projectors=("model.mm_projector",)),),
)
