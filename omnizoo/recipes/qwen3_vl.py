"""Qwen3-VL: images, and videos with text timestamps between frames; deepstack; M-RoPE."""

from functools import partial

from omnizoo.models.recipe import Recipe
from omnizoo.recipes.shared.encoders import build_modalities, visual_modules
from omnizoo.recipes.shared.qwen_image import (
    SMALL_DEEPSTACK,
    InterpolatedImageEncoder,
    deepstack_inputs,
    merge_visual_features,
    visual_positions,
)
from omnizoo.recipes.shared.qwen_video import TimedVideoEncoder, visual_specs

RECIPE = Recipe(
    about="Qwen3-VL 2B to 32B",
    blocks=("Qwen3VLTextDecoderLayer", "Qwen3VLVisionBlock"),
    small_config=SMALL_DEEPSTACK,
    modalities=partial(build_modalities, visual_specs(InterpolatedImageEncoder, TimedVideoEncoder)),
    positions=visual_positions,
    merge_features=merge_visual_features,
    language_model_inputs=deepstack_inputs,
    media_modules=visual_modules("model.visual", "model.visual.merger", "model.visual.deepstack_merger_list"),
)
