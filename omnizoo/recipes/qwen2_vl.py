"""Qwen2-VL: images, and clips as one run of places; M-RoPE."""

from functools import partial

from omnizoo.recipes.base import Recipe
from omnizoo.recipes.qwen_clips import VideoTower
from omnizoo.recipes.qwen_towers import (
    BEGIN,
    END,
    SHRINK_TEXT,
    ImageTower,
    build_modalities,
    enter_visual,
    visual_positions,
)

MODALITIES = {
    "image": (ImageTower, BEGIN, "<|image_pad|>", END),
    "video": (VideoTower, BEGIN, "<|video_pad|>", END),
}
RECIPE = Recipe(
    about="Qwen2-VL 2B to 72B",
    blocks=("Qwen2VLDecoderLayer", "Qwen2VLVisionBlock"),
    # the tower's own width has a name of its own: `hidden_size` is the text's
    shrink={"text_config": SHRINK_TEXT, "vision_config": {"embed_dim": 64, "hidden_size": 128}},
    modalities=partial(build_modalities, MODALITIES),
    positions=visual_positions,
    enter=enter_visual,
    towers=dict.fromkeys(MODALITIES, "model.visual"),
    projectors=dict.fromkeys(MODALITIES, ("model.visual.merger",)),
)
