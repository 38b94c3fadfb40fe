"""Qwen3-VL: images, and videos with text timestamps between frames; deepstack; M-RoPE."""

from omnizoo.models.recipe import Recipe
from omnizoo.recipes.shared.encoders import visual_modules
from omnizoo.recipes.shared.qwen_image import (
    SMALL_DEEPSTACK,
    deepstack_inputs,
    merge_visual_features,
    visual_positions,
)
from omnizoo.recipes.shared.qwen_video import timed_modalities

RECIPE = Recipe(
    about="Qwen3-VL 2B to 32B",
    blocks=("Qwen3VLTextDecoderLayer", "Qwen3VLVisionBlock"),
    small_config=SMALL_DEEPSTACK,
    modalities=timed_modalities,
    positions=visual_positions,
    merge_features=merge_visual_features,
    language_model_inputs=deepstack_inputs,
    media_modules=visual_modules("model.visual", "model.visual.merger", "model.visual.deepstack_merger_list"),
)
