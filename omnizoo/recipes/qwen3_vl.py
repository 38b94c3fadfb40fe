"""Qwen3-VL: images, and clips whose steps stand between their times, written as text; deepstack; M-RoPE."""

from functools import partial

from omnizoo.recipes.base import Recipe
from omnizoo.recipes.qwen_clips import TimedClips
from omnizoo.recipes.qwen_towers import (
    BEGIN,
    END,
    SHRINK,
    InterpolatedTower,
    build_modalities,
    enter_visual,
    visual_positions,
)

MODALITIES = {
    "image": (InterpolatedTower, BEGIN, "<|image_pad|>", END),
    "video": (TimedClips, BEGIN, "<|video_pad|>", END),
}
RECIPE = Recipe(
    about="Qwen3-VL 2B to 32B",
    blocks=("Qwen3VLTextDecoderLayer", "Qwen3VLVisionBlock"),
    shrink=SHRINK,
    modalities=partial(build_modalities, MODALITIES),
    positions=visual_positions,
    enter=enter_visual,
    towers=dict.fromkeys(MODALITIES, "model.visual"),
    projectors=dict.fromkeys(MODALITIES, ("model.visual.merger", "model.visual.deepstack_merger_list")),
)
