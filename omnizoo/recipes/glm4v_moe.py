"""GLM-4.5V: images, and clips whose steps are written as images with their second after each; M-RoPE; experts."""

import math
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from transformers import Glm4vImageProcessorPil
from transformers.models.glm4v.image_processing_pil_glm4v import smart_resize

from omnizoo.modalities.base import Inputs
from omnizoo.modalities.files import Footage
from omnizoo.modalities.tower import Work
from omnizoo.recipes.base import Recipe
from omnizoo.recipes.qwen_clips import VideoTower
from omnizoo.recipes.qwen_towers import ImageTower, build_modalities, enter_visual, visual_positions

BEGIN, PLACE, END = "<|begin_of_image|>", "<|image|>", "<|end_of_image|>"
SIZE = {"shortest_edge": 112**2, "longest_edge": 28**2 * 15000}  # pixels of all frames of a step


class GlmImages(ImageTower):
    kind = Glm4vImageProcessorPil
    published: ClassVar[Mapping[str, Any]] = {"size": SIZE}

    @cached_property
    def work(self) -> Work:
        return Work.of(self.tower, merging=("downsample",))

    def fit(self, frames: int, height: int, width: int) -> tuple[int, int]:
        together = self.vision.temporal_patch_size
        fitted: tuple[int, int] = smart_resize(
            max(frames, together), height, width, together, self.factor, *self.pixels
        )
        return fitted

    def told(self, items: Sequence[Inputs]) -> dict[str, Any]:
        """The table of positions is read by the sizes of steps, which stay on the device."""
        one = torch.ones_like(items[0]["grid"][:1])
        steps = [torch.cat([one, item["grid"][1:]]).expand(len(item["positions"]), 3) for item in items]
        return super().told(items) | {"grid_thw": torch.cat(steps)}


class GlmClips(GlmImages, VideoTower):
    """Of clips longer than `max_duration`, which is the folder's to say, fewer frames a second are taken."""

    counted = ("fps",)
    published_clips: ClassVar[dict[str, Any]] = {
        "size": {"shortest_edge": 112**2, "longest_edge": 28**2 * 2 * 30000},
        "fps": 2.0,
        "max_duration": 300,  # seconds
    }

    def choose(self, clip: Footage) -> list[int]:
        """Frames by the second, each once: `Glm4vVideoProcessor`."""
        last, seconds, longest = clip.frames - 1, clip.frames / clip.rate, self.settings["max_duration"]
        if seconds <= longest:
            places = [i * clip.rate / self.fps for i in range(max(math.floor(seconds * self.fps), 1))]
        elif (count := int(longest * self.fps)) >= clip.frames:
            places = [float(i) for i in range(clip.frames)]
        else:
            places = (np.linspace(0, seconds, count) * clip.rate).tolist()
        chosen = {min(last, math.ceil(place)): None for place in places}
        return [*chosen, *[max(chosen)] * (len(chosen) % 2)]

    def layout(self, times: npt.NDArray[np.float64], places: int) -> tuple[str | int, ...]:
        return tuple(part for at in times[:, 0] for part in (BEGIN, places, f"{END}{int(at)}"))


MODALITIES = {
    "image": (GlmImages, BEGIN, PLACE, END),
    "video": (GlmClips, "<|begin_of_video|>", PLACE, "<|end_of_video|>"),
}
RECIPE = Recipe(
    about="GLM-4.5V (106B-A12B)",
    blocks=("Glm4vMoeTextDecoderLayer", "Glm4vMoeVisionBlock"),
    # half of a head's width turns
    shrink={
        "text_config": {"rope_parameters": {"partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}},
        "vision_config": {"image_size": 56},
    },
    modalities=partial(build_modalities, MODALITIES),
    positions=visual_positions,
    enter=enter_visual,
    towers=dict.fromkeys(MODALITIES, "model.visual"),
    projectors=dict.fromkeys(MODALITIES, ("model.visual.downsample", "model.visual.merger")),
)
