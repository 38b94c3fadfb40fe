"""Encoders for images and videos of GLM-4V models."""

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
from omnizoo.recipes.shared.qwen_image import ImageTower
from omnizoo.recipes.shared.qwen_video import VideoTower

BEGIN, END = "<|begin_of_image|>", "<|end_of_image|>"
SIZE = {"shortest_edge": 112**2, "longest_edge": 28**2 * 15000}  # pixels of all frames of a step


class GlmImageEncoder(ImageTower):
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
        """Also return the grid of each step, which the tower's position table needs. It stays on the device."""
        one = torch.ones_like(items[0]["grid"][:1])
        steps = [torch.cat([one, item["grid"][1:]]).expand(len(item["positions"]), 3) for item in items]
        return super().tower_inputs(items) | {"grid_thw": torch.cat(steps)}


class GlmVideoEncoder(GlmImageEncoder, VideoTower):
    """Video encoder of GLM-4V.

    Videos longer than the folder's `max_duration` are sampled at fewer frames per second.
    """

    counted = ("fps",)
    published_clips: ClassVar[dict[str, Any]] = {
        "size": {"shortest_edge": 112**2, "longest_edge": 28**2 * 2 * 30000},
        "fps": 2.0,
        "max_duration": 300,  # seconds
    }

    def choose(self, clip: VideoInfo) -> list[int]:
        """Return an even number of frame indices at regular times, as `Glm4vVideoProcessor` chooses them."""
        seconds = clip.frames / clip.rate
        longest = self.settings["max_duration"]
        count = int(longest * self.fps)
        if seconds <= longest:
            frames = [i * clip.rate / self.fps for i in range(max(math.floor(seconds * self.fps), 1))]
        elif count >= clip.frames:
            frames = [float(i) for i in range(clip.frames)]
        else:
            frames = (np.linspace(0, seconds, count) * clip.rate).tolist()
        chosen = list(dict.fromkeys(min(clip.frames - 1, math.ceil(frame)) for frame in frames))
        return chosen if len(chosen) % 2 == 0 else [*chosen, max(chosen)]

    def layout(self, times: npt.NDArray[np.float64], places: int) -> tuple[str | int, ...]:
        return tuple(part for at in times[:, 0] for part in (BEGIN, places, f"{END}{int(at)}"))
