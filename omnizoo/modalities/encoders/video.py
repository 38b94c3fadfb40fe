"""Video encoder: a vision tower encodes frames, sampled at a rate within a budget, together with their times."""

import html
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import PretrainedConfig

from omnizoo.config.errors import UserError
from omnizoo.modalities.encoders.image import PatchGrid, VisionEncoder
from omnizoo.modalities.encoders.projector import Grid
from omnizoo.modalities.files.decoding import CLIP_OPTIONS
from omnizoo.modalities.files.video import read_frames, sample_times, video_info
from omnizoo.modalities.item import Inputs, MediaSize
from omnizoo.modalities.media import Media

FEATURES_PER_FRAME = 256


class VideoEncoder(VisionEncoder):
    """Encoder for videos. Takes the options of `VisionEncoder`, whose pixel budgets apply to each frame.

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
        picture: Other options of `VisionEncoder`.
    """

    item_options = CLIP_OPTIONS

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
        **picture: Any,
    ) -> None:
        for name, value in {"fps": fps, "max_frames": max_frames, "max_seconds": max_seconds}.items():
            if not value > 0:
                raise UserError(f"encoder.{name}: {value!r} is not above 0")
        self.has_times = time_embedding
        self.fps, self.max_frames, self.max_seconds, self.written = fps, max_frames, max_seconds, times
        super().__init__(width, config, folder, projector, **picture)
        if (
            isinstance(self.kind, PatchGrid) and picture.get("max_pixels") is None
        ):  # published budgets are for single images
            self.kind.most = max(self.kind.least, FEATURES_PER_FRAME * self.kind.unit**2)

    def measure(self, media: Media) -> MediaSize:
        video = video_info(media, self.fps, self.max_seconds)
        frames = sample_times(video.seconds, self.fps, self.max_frames)
        size = self.size_of(media, len(frames), video.height, video.width)
        if not self.written:
            return size
        steps = self._steps(frames)
        each = size.num_placeholders // len(steps)
        return replace(size, layout=tuple(part for time in steps for part in (f"<{time:.1f} s>", each)))

    def prepare(self, media: Media) -> Inputs:
        times, frames, grid = self._frames(media)
        steps = torch.tensor([round(1000 * time) for time in self._steps(times)])
        # Integers, because floats are cast to the precision of the computation.
        return {"pixel_values": self.kind.clip(frames, grid), "milliseconds": steps}

    def dummy_input(self) -> Inputs:
        return super().dummy_input() | {"milliseconds": torch.zeros(1, dtype=torch.int64)}

    def encode(self, items: Sequence[Inputs]) -> torch.Tensor:
        features, grids = self.kind.run(self.tower, [item["pixel_values"] for item in items])
        projected: torch.Tensor = self.projector(features, grids, torch.cat([item["milliseconds"] for item in items]))
        return projected

    def preview(self, media: Media) -> str:
        times, frames, _ = self._frames(media)
        chosen = range(0, len(frames), -(-len(frames) // 8))
        strip = "".join(self.seen(frames[i], f"{times[i]:.1f} s", 96) for i in chosen)
        return f'<div title="{html.escape(media.name)}">{strip}</div>'

    def _frames(self, media: Media) -> tuple[list[float], list[Any], Grid]:
        video = video_info(media, self.fps, self.max_seconds)
        times = sample_times(video.seconds, self.fps, self.max_frames)
        frames = read_frames(media, times, self.fps, self.kind.look.channels)
        return times, frames, self.kind.grid(video.height, video.width)

    def _steps(self, times: Sequence[float]) -> list[float]:
        """Return the mean time of the frames that the tower merges into each step."""
        count = self.kind.steps(len(times))
        each = -(-len(times) // count)
        parts = [times[i * each : (i + 1) * each] for i in range(count)]
        return [sum(part) / len(part) for part in parts]
