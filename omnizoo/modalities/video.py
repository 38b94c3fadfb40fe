"""Video in: frames sampled at a rate within a budget, through a vision tower, with the times they were taken at."""

import html
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import PretrainedConfig

from omnizoo.config.errors import UserError
from omnizoo.modalities.base import Inputs, Size
from omnizoo.modalities.files import CLIP_OPTIONS, read_frames, sample_times, video_size
from omnizoo.modalities.image import PatchGrid, VisionEncoder
from omnizoo.modalities.item import Media
from omnizoo.modalities.projector import Grid

FEATURES_PER_FRAME = 256


class VideoEncoder(VisionEncoder):
    """Options of `VisionEncoder`, its budgets per frame, and: `fps` and `max_frames` (frames are taken evenly over the
    clip); `max_seconds`, above which a clip is refused; `times`, to write the times of frames between them as text;
    `time_embedding`, to add an embedding of the time to their features.
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
        ):  # what is published is for single pictures
            self.kind.most = max(self.kind.least, FEATURES_PER_FRAME * self.kind.unit**2)

    def measure(self, media: Media) -> Size:
        seconds, height, width = video_size(media, self.fps, self.max_seconds)
        frames = sample_times(seconds, self.fps, self.max_frames)
        size = self.size_of(media, len(frames), height, width)
        if not self.written:
            return size
        steps = self._steps(frames)
        each = size.places // len(steps)
        return replace(size, layout=tuple(part for time in steps for part in (f"<{time:.1f} s>", each)))

    def prepare(self, media: Media) -> Inputs:
        times, frames, grid = self._frames(media)
        steps = torch.tensor([round(1000 * time) for time in self._steps(times)])
        # Integers keep their precision where floats are cast to that of the computation.
        return {"pixel_values": self.kind.clip(frames, grid), "milliseconds": steps}

    def blank(self) -> Inputs:
        return super().blank() | {"milliseconds": torch.zeros(1, dtype=torch.int64)}

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
        seconds, height, width = video_size(media, self.fps, self.max_seconds)
        times = sample_times(seconds, self.fps, self.max_frames)
        return times, read_frames(media, times, self.fps, self.kind.look.channels), self.kind.grid(height, width)

    def _steps(self, times: Sequence[float]) -> list[float]:
        """The mean time of the frames that the tower merges into one step."""
        count = self.kind.steps(len(times))
        each = -(-len(times) // count)
        parts = [times[i * each : (i + 1) * each] for i in range(count)]
        return [sum(part) / len(part) for part in parts]
