"""Qwen3.5, dense: encoders of Qwen3-VL without deepstack; gated delta net and gated attention."""

from dataclasses import replace

from omnizoo.recipes import qwen3_vl
from omnizoo.recipes.shared.encoders import visual_modules
from omnizoo.recipes.shared.qwen_image import SMALL_PARTIAL_ROTARY

RECIPE = replace(
    qwen3_vl.RECIPE,
    about="Qwen3.5, dense",
    blocks=("Qwen3_5DecoderLayer", "Qwen3_5VisionBlock"),
    small_config=SMALL_PARTIAL_ROTARY,
    media_modules=visual_modules("model.visual", "model.visual.merger"),
)
