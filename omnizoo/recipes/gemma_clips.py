"""How clips enter Gemma 4: frames as pictures of fewer places, each after its time, written as text. Frames do not see
each other but through the language model."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from omnizoo.config.errors import UserError
from omnizoo.modalities.base import Inputs, Size
from omnizoo.modalities.files import CLIP_OPTIONS, Footage, footage_of, read_frames
from omnizoo.modalities.image import thumbnail
from omnizoo.modalities.item import BadMedia, Media
from omnizoo.modalities.pixels import to_patches
from omnizoo.recipes.gemma_towers import BEGIN, END, PoolTower, RawPatches
from omnizoo.recipes.qwen_clips import video_settings
from omnizoo.recipes.tensor_pictures import BICUBIC, TensorPictures

PUBLISHED = {"max_soft_tokens": 70, "resample": BICUBIC, "image_mean": [0.0], "image_std": [1.0]}
PUBLISHED_FRAMES = 32
RATE = 24.0  # at which frames without a rate are taken to have been filmed
MOST_FRAMES = 8  # of a part of a clip: ranks share out what is longer


class _Clips:
    """Clips as `num_frames` frames, or as `fps` of them a second, each of at most `max_soft_tokens` places. What is not
    given is as the folder says, else as published. Comes before a tower for pictures."""

    def __init__(
        self,
        model: PreTrainedModel,
        folder: str | None,
        max_soft_tokens: int | None = None,
        num_frames: int | None = None,
        fps: float | None = None,
        max_seconds: float = 3600.0,
    ) -> None:
        where = "model.modalities.video.encoder.options"
        for name, value in {"num_frames": num_frames, "fps": fps, "max_seconds": max_seconds}.items():
            if value is not None and not value > 0:
                raise UserError(f"{where}.{name}: {value!r} is not above 0")
        if fps is not None and num_frames is not None:
            raise UserError(f"{where}: fps and num_frames are both given; give one")
        said = video_settings(folder)
        frames = TensorPictures(folder, PUBLISHED, said, max_soft_tokens=max_soft_tokens)
        super().__init__(model, None, frames.told["max_soft_tokens"])  # type: ignore[call-arg]  # of the tower
        self.processor, self.max_seconds = frames, max_seconds
        self.num_frames: int | None = num_frames or (None if fps else said.get("num_frames", PUBLISHED_FRAMES))
        self.fps: float | None = fps or said.get("fps")

    def choose(self, clip: Footage) -> list[int]:
        """Frames, evenly from the first one on: `default_sample_indices_fn`."""
        count = self.num_frames
        if count is None:
            count = max(1, int(clip.frames / clip.rate * self.fps)) if self.fps else clip.frames
        if count > clip.frames:
            raise BadMedia(f"it has {clip.frames} frames, fewer than num_frames {count}, an option of video")
        return [i * clip.frames // count for i in range(count)]

    def sample(self: Any, media: Media) -> tuple[Footage, list[int], tuple[int, int]]:
        """The clip, its frames, and height and width as the tower sees them."""
        clip = footage_of(media, RATE, self.max_seconds)
        try:
            return clip, self.choose(clip), self.fitted(media, clip.height, clip.width)
        except BadMedia as bad:
            raise BadMedia(str(bad) if media.name in str(bad) else f"{media.name}: {bad}") from None

    def measure(self: Any, media: Media) -> Size:
        clip, chosen, (height, width) = self.sample(media)
        frame = self.frame_size(height, width)
        layout: list[str | int] = []
        for index in chosen:
            seconds = index / clip.rate
            time = f"{int(seconds // 60):02d}:{int(seconds % 60):02d}"
            layout += [f"{' ' if layout else ''}{time} {BEGIN}", frame.places, END]
        return Size(frame.places * len(chosen), frame.cost * len(chosen), layout=tuple(layout))

    def prepare(self: Any, media: Media) -> Inputs:
        clip, chosen, (height, width) = self.sample(media)
        frames = read_frames(media, clip.shown(chosen), RATE)
        pixels = [torch.from_numpy(np.array(frame, np.uint8)).permute(2, 0, 1).contiguous() for frame in frames]
        shown = [self.processor.values(self.processor.resize(frame, height, width)) for frame in pixels]
        rows, columns = torch.arange(height // self.square), torch.arange(width // self.square)
        places = torch.cartesian_prod(rows, columns).flip(1)
        return {
            "pixels": torch.stack([to_patches(frame.permute(1, 2, 0), self.square) for frame in shown]),
            "positions": places.expand(len(frames), -1, -1).clone(),
        }

    def parts(self, size: Size, inputs: Inputs) -> list[tuple[Size, Inputs]]:
        frames = len(inputs["pixels"])
        if frames <= MOST_FRAMES:
            return [(size, inputs)]
        parts = []
        for first in range(0, frames, MOST_FRAMES):
            own = {name: value[first : first + MOST_FRAMES].clone() for name, value in inputs.items()}
            share = len(own["pixels"]) / frames
            parts.append((replace(size, places=round(size.places * share), cost=size.cost * share), own))
        return parts

    def preview(self: Any, media: Media) -> str:
        clip, chosen, _ = self.sample(media)
        times = clip.shown(chosen[:: -(-len(chosen) // 8)])
        frames = read_frames(media, times, RATE)
        return "".join(thumbnail(frame, f"{time:.1f} s", 96) for frame, time in zip(frames, times, strict=True))


class PooledClips(_Clips, PoolTower):
    """Of a model with a tower."""

    item_options = CLIP_OPTIONS
    kind = "video"


class RawClips(_Clips, RawPatches):
    """Of a model without one."""

    item_options = CLIP_OPTIONS
    kind = "video"
