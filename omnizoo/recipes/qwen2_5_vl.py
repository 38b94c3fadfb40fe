"""Qwen2.5-VL: images and clips through a tower that attends in windows; M-RoPE in real time."""

from collections.abc import Sequence
from functools import partial

from transformers import PreTrainedModel

from omnizoo.modalities.base import Item
from omnizoo.models.media_model import Ids
from omnizoo.recipes.base import Recipe
from omnizoo.recipes.qwen_clips import PacedClips
from omnizoo.recipes.qwen_towers import (
    BEGIN,
    END,
    SHRINK_TEXT,
    SHRINK_WINDOWS,
    WindowedTower,
    build_modalities,
    enter_visual,
    shapes_of,
    visual_positions,
)


def positions(model: PreTrainedModel, ids: Ids, items: Sequence[Item]) -> Ids:
    clips = shapes_of(items, "video")
    return visual_positions(model, ids, items, second_per_grid_ts=None if clips is None else clips[:, 3])


MODALITIES = {
    "image": (WindowedTower, BEGIN, "<|image_pad|>", END),
    "video": (PacedClips, BEGIN, "<|video_pad|>", END),
}
RECIPE = Recipe(
    about="Qwen2.5-VL 3B to 72B",
    blocks=("Qwen2_5_VLDecoderLayer", "Qwen2_5_VLVisionBlock"),
    shrink={"text_config": SHRINK_TEXT, "vision_config": SHRINK_WINDOWS},
    modalities=partial(build_modalities, MODALITIES),
    positions=positions,
    enter=enter_visual,
    towers=dict.fromkeys(MODALITIES, "model.visual"),
    projectors=dict.fromkeys(MODALITIES, ("model.visual.merger",)),
)
