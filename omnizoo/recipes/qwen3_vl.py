"""Qwen3-VL: images, and clips whose steps stand between their times, written as text; deepstack; M-RoPE."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize

from omnizoo.modalities.base import Item
from omnizoo.models.media_model import Ids
from omnizoo.recipes.base import Recipe
from omnizoo.recipes.qwen_towers import (
    BEGIN,
    END,
    SHRINK,
    ImageTower,
    VideoTower,
    build_modalities,
    enter_visual,
    shapes_of,
)


class TimedVideoTower(VideoTower):
    """`min_pixels` and `max_pixels` are of all frames of a clip together."""

    def fit(self, frames: int, height: int, width: int) -> tuple[int, int]:
        frames = max(frames, self.together)
        fitted: tuple[int, int] = smart_resize(frames, height, width, self.together, self.factor, *self.pixels)
        return fitted

    def layout(self, seconds: npt.NDArray[np.float64], places: int) -> tuple[str | int, ...]:
        return tuple(part for at in seconds for part in (f"<{at:.1f} seconds>{BEGIN}", places, END))


def positions(model: PreTrainedModel, ids: Ids, items: Sequence[Item]) -> Ids:
    """`[4, L]`: in the text, by which samples are told apart; then time, height and width."""
    tokens = torch.from_numpy(ids).long()[None]
    config: Any = model.config
    clips = shapes_of(items, "video")
    core: Any = model.get_submodule("model")
    axes, _ = core.get_rope_index(
        tokens,
        mm_token_type_ids=(tokens == config.image_token_id) + 2 * (tokens == config.video_token_id),
        image_grid_thw=shapes_of(items, "image"),
        video_grid_thw=None if clips is None else clips[:, :3].long(),
    )
    return torch.cat([torch.arange(len(ids))[None], axes[:, 0]]).int().numpy()


MODALITIES = {
    "image": (ImageTower, BEGIN, "<|image_pad|>", END),
    "video": (TimedVideoTower, BEGIN, "<|video_pad|>", END),
}
RECIPE = Recipe(
    about="Qwen3-VL 2B to 32B",
    blocks=("Qwen3VLTextDecoderLayer", "Qwen3VLVisionBlock"),
    shrink=SHRINK,
    modalities=partial(build_modalities, MODALITIES),
    positions=positions,
    enter=enter_visual,
    towers=dict.fromkeys(MODALITIES, "model.visual"),
    projectors=dict.fromkeys(MODALITIES, ("model.visual.merger", "model.visual.deepstack_merger_list")),
)
