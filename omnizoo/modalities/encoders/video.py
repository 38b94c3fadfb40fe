"""Video encoder. A vision tower encodes frames, sampled at a given rate within a budget, together with their times."""

import html
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import PretrainedConfig

from omnizoo.config.errors import UserError
from omnizoo.modalities.encoders.image import PatchGrid, VisionEncoder
from omnizoo.modalities.encoders.projector import Grid
from omnizoo.modalities.files.decoding import VIDEO_OPTIONS
from omnizoo.modalities.files.video import read_frames, sample_times, video_info
from omnizoo.modalities.item import Inputs, MediaSize
from omnizoo.modalities.media import Media

FEATURES_PER_FRAME = 256
PREVIEW_FRAMES = 8


class VideoEncoder(VisionEncoder):
    """Encoder for videos. It accepts the options of `VisionEncoder`; the pixel budgets apply to each frame.

    Args:
        width: Width of the foundation.
        config: Config of the tower, or of a model that contains it.
        folder: Model folder with the preprocessor config.
        projector: `kind` and options of the projector.
        fps: Frames per second, sampled evenly over the video.
        max_frames: Maximum number of frames.
        max_seconds: Maximum length in seconds. Longer videos raise an error.
        times: Whether to write the times of frames as text between them.
        time_embedding: Whether to add an embedding of the time to the features.
        image_options: Other options of `VisionEncoder`.
    """

    item_options = VIDEO_OPTIONS

    def __init__(
        self,
        width: int,
        config: PretrainedConfig | None = None,
        folder: str | None = None,
        projector: dict[str, Any] | None = None,
        fps: float = 2.0,
        max_frames: int = 64,
        max_seconds: float = 3600.0,
        times: bool = False,
        time_embedding: bool = True,
        **image_options: Any,
    ) -> None:
        for name, value in {"fps": fps, "max_frames": max_frames, "max_seconds": max_seconds}.items():
            if not value > 0:
                raise UserError(f"encoder.{name}: {value!r} is out of range; expected a number greater than 0")
        self.has_times = time_embedding
        self.fps = fps
        self.max_frames = max_frames
        self.max_seconds = max_seconds
        self.writes_times = times
        super().__init__(width, config, folder, projector, **image_options)
        if isinstance(self.kind, PatchGrid) and image_options.get("max_pixels") is None:
            # Published budgets are for single images.
            self.kind.max_pixels = max(self.kind.min_pixels, FEATURES_PER_FRAME * self.kind.unit**2)

    def measure(self, media: Media) -> MediaSize:
        video = video_info(media, self.fps, self.max_seconds)
        frames = sample_times(video.seconds, self.fps, self.max_frames)
        size = self.size_of(media, len(frames), video.height, video.width)
        if not self.writes_times:
            return size
        step_times = self._step_times(frames)
        placeholders_per_step = size.num_placeholders // len(step_times)
        layout: list[str | int] = []
        for time in step_times:
            layout += [f"<{time:.1f} s>", placeholders_per_step]
        return replace(size, layout=tuple(layout))

    def prepare(self, media: Media) -> Inputs:
        times, frames, grid = self._frames(media)
        # Times are stored as integers, because floats would be cast to the precision of the computation.
        milliseconds = torch.tensor([round(1000 * time) for time in self._step_times(times)])
        return {"pixel_values": self.kind.frame_values(frames, grid), "milliseconds": milliseconds}

    def dummy_input(self) -> Inputs:
        return super().dummy_input() | {"milliseconds": torch.zeros(1, dtype=torch.int64)}

    def encode(self, items: Sequence[Inputs]) -> torch.Tensor:
        features, grids = self.kind.run(self.tower, [item["pixel_values"] for item in items])
        milliseconds = torch.cat([item["milliseconds"] for item in items])
        projected: torch.Tensor = self.projector(features, grids, milliseconds)
        return projected

    def preview(self, media: Media) -> str:
        times, frames, _ = self._frames(media)
        shown = range(0, len(frames), -(-len(frames) // PREVIEW_FRAMES))
        strip = "".join(self.show(frames[i], f"{times[i]:.1f} s", 96) for i in shown)
        return f'<div title="{html.escape(media.name)}">{strip}</div>'

    def _frames(self, media: Media) -> tuple[list[float], list[Any], Grid]:
        """Return the times and images of the sampled frames, and the grid of each frame."""
        video = video_info(media, self.fps, self.max_seconds)
        times = sample_times(video.seconds, self.fps, self.max_frames)
        frames = read_frames(media, times, self.fps, self.kind.pixel_format.channels)
        return times, frames, self.kind.grid(video.height, video.width)

    def _step_times(self, times: Sequence[float]) -> list[float]:
        """Return the mean time of the frames that the tower merges into each step."""
        num_steps = self.kind.steps(len(times))
        frames_per_step = -(-len(times) // num_steps)
        step_times = []
        for step in range(num_steps):
            frame_times = times[step * frames_per_step : (step + 1) * frames_per_step]
            step_times.append(sum(frame_times) / len(frame_times))
        return step_times
