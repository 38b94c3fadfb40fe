"""Image and video encoders of GLM-4V models."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from transformers import Glm4vImageProcessorPil
from transformers.models.glm4v.image_processing_pil_glm4v import smart_resize

from omnizoo.modalities.encoders.tower import TowerFlops
from omnizoo.modalities.files.video import VideoInfo
from omnizoo.modalities.item import Inputs
from omnizoo.recipes.shared.qwen_image import QwenImageEncoder
from omnizoo.recipes.shared.qwen_video import QwenVideoEncoder

BEGIN, END = "<|begin_of_image|>", "<|end_of_image|>"
SIZE = {"shortest_edge": 112**2, "longest_edge": 28**2 * 15000}  # number of pixels, summed over all frames of a step


class GlmImageEncoder(QwenImageEncoder):
    """Image encoder of GLM-4V."""

    kind = Glm4vImageProcessorPil
    published: ClassVar[Mapping[str, Any]] = {"size": SIZE}

    def tower_work(self) -> TowerFlops:
        return TowerFlops.of(self.tower, merging=("downsample",))

    def fit(self, frames: int, height: int, width: int) -> tuple[int, int]:
        frames_per_step = self.vision.temporal_patch_size
        fitted: tuple[int, int] = smart_resize(
            max(frames, frames_per_step), height, width, frames_per_step, self.factor, *self.pixels
        )
        return fitted

    def tower_inputs(self, items: Sequence[Inputs]) -> dict[str, Any]:
        """Add the grid of each step for the tower's position table. The grid stays on the device."""
        one_step = torch.ones_like(items[0]["grid"][:1])
        step_grids = []
        for item in items:
            num_steps = len(item["positions"])
            grid = torch.cat([one_step, item["grid"][1:]])
            step_grids.append(grid.expand(num_steps, 3))
        return super().tower_inputs(items) | {"grid_thw": torch.cat(step_grids)}


class GlmVideoEncoder(GlmImageEncoder, QwenVideoEncoder):
    """Video encoder of GLM-4V.

    Videos longer than the folder's `max_duration` are sampled at fewer frames per second.
    """

    sampling_options = ("fps",)
    published_video: ClassVar[dict[str, Any]] = {
        "size": {"shortest_edge": 112**2, "longest_edge": 28**2 * 2 * 30000},
        "fps": 2.0,
        "max_duration": 300,  # seconds
    }

    def choose(self, video: VideoInfo) -> list[int]:
        """Return an even number of frame indices at regular intervals, as `Glm4vVideoProcessor` does."""
        seconds = video.frames / video.rate
        max_seconds = self.settings["max_duration"]
        count = int(max_seconds * self.fps)
        if seconds <= max_seconds:
            frames = [i * video.rate / self.fps for i in range(max(math.floor(seconds * self.fps), 1))]
        elif count >= video.frames:
            frames = [float(i) for i in range(video.frames)]
        else:
            frames = (np.linspace(0, seconds, count) * video.rate).tolist()
        indices = [min(video.frames - 1, math.ceil(frame)) for frame in frames]
        distinct = list(dict.fromkeys(indices))
        return distinct if len(distinct) % 2 == 0 else [*distinct, max(distinct)]

    def layout(self, times: npt.NDArray[np.float64], placeholders: int) -> tuple[str | int, ...]:
        layout: list[str | int] = []
        for seconds in times[:, 0]:
            layout += [BEGIN, placeholders, f"{END}{int(seconds)}"]
        return tuple(layout)
