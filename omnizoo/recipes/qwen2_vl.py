"""Qwen2-VL: images, and videos as one run of placeholder tokens; M-RoPE."""

from functools import partial

from omnizoo.models.recipe import Recipe
from omnizoo.recipes.shared.encoders import build_modalities, visual_modules
from omnizoo.recipes.shared.qwen_image import SMALL_MROPE, QwenImageEncoder, merge_visual_features, visual_positions
from omnizoo.recipes.shared.qwen_video import QwenVideoEncoder, visual_specs

RECIPE = Recipe(
    about="Qwen2-VL 2B to 72B",
    blocks=("Qwen2VLDecoderLayer", "Qwen2VLVisionBlock"),
    # in the config of the tower, `embed_dim` is the tower's width, and `hidden_size` the text model's width
    small_config={"text_config": SMALL_MROPE, "vision_config": {"embed_dim": 64, "hidden_size": 128}},
    modalities=partial(build_modalities, visual_specs(QwenImageEncoder, QwenVideoEncoder)),
    positions=visual_positions,
    merge_features=merge_visual_features,
    media_modules=visual_modules("model.visual", "model.visual.merger"),
)
