"""Qwen2.5-VL: images and videos through a tower with window attention; M-RoPE with positions in units of real time."""

from collections.abc import Sequence
from functools import partial

from transformers import PreTrainedModel

from omnizoo.modalities.item import Ids, MediaItem
from omnizoo.models.recipe import Recipe
from omnizoo.recipes.shared.encoders import build_modalities, visual_modules
from omnizoo.recipes.shared.qwen_image import (
    SMALL_MROPE,
    SMALL_WINDOWS,
    WindowedImageEncoder,
    media_shapes,
    merge_visual_features,
    visual_positions,
)
from omnizoo.recipes.shared.qwen_video import PacedVideoEncoder, visual_specs


def positions(model: PreTrainedModel, ids: Ids, items: Sequence[MediaItem]) -> Ids:
    return visual_positions(model, ids, items, second_per_grid_ts=media_shapes(items)["second_per_grids"])


RECIPE = Recipe(
    about="Qwen2.5-VL 3B to 72B",
    blocks=("Qwen2_5_VLDecoderLayer", "Qwen2_5_VLVisionBlock"),
    small_config={"text_config": SMALL_MROPE, "vision_config": SMALL_WINDOWS},
    modalities=partial(build_modalities, visual_specs(WindowedImageEncoder, PacedVideoEncoder)),
    positions=positions,
    merge_features=merge_visual_features,
    media_modules=visual_modules("model.visual", "model.visual.merger"),
)
