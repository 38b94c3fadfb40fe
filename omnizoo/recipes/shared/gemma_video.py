"""Encoders for videos of Gemma 4.

Each frame is an image with fewer placeholder tokens, preceded by its time as text. Frames attend to each other only in
the language model.
"""

from typing import Any

import torch
from transformers import PreTrainedModel

from omnizoo.modalities.files.decoding import CLIP_OPTIONS
from omnizoo.modalities.files.image import to_bytes
from omnizoo.modalities.files.video import VideoInfo, read_frames, video_info
from omnizoo.modalities.item import Inputs, MediaSize
from omnizoo.modalities.media import BadMedia, Media
from omnizoo.recipes.shared.encoders import check_frame_options, checked_settings, preview_frames
from omnizoo.recipes.shared.gemma_encoders import BEGIN, END, PoolTower, RawPatches, patches_of
from omnizoo.recipes.shared.tensor_images import BICUBIC, TensorPictures

PUBLISHED = {"max_soft_tokens": 70, "resample": BICUBIC, "image_mean": [0.0], "image_std": [1.0]}
PUBLISHED_FRAMES = 32
RATE = 24.0  # assumed frames per second of frames that come without a rate
MOST_FRAMES = 8  # frames per part: longer videos are split, so that several ranks can encode them


class _Clips:
    """Mixin that turns an image encoder of Gemma 4 into a video encoder; it comes first among the base classes.

    A video is sampled as `num_frames` frames, or as `fps` frames per second, each of at most `max_soft_tokens`
    placeholder tokens. None uses the setting of the folder, or the default of the family.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        folder: str | None,
        max_soft_tokens: int | None = None,
        num_frames: int | None = None,
        fps: float | None = None,
        max_seconds: float = 3600.0,
    ) -> None:
        check_frame_options(fps, num_frames, max_seconds=max_seconds)
        processor = TensorPictures(folder, PUBLISHED, "video", max_soft_tokens=max_soft_tokens)
        super().__init__(model, None, processor.settings["max_soft_tokens"])  # type: ignore[call-arg]  # of the tower
        self.processor, self.max_seconds = processor, max_seconds
        settings, _ = checked_settings(folder, "video_processor")
        self.num_frames: int | None = num_frames or (None if fps else settings.get("num_frames", PUBLISHED_FRAMES))
        self.fps: float | None = fps or settings.get("fps")

    def choose(self, clip: VideoInfo) -> list[int]:
        """Return indices of evenly spaced frames from the first one on, as `default_sample_indices_fn` does."""
        count = self.num_frames
        if count is None:
            count = max(1, int(clip.frames / clip.rate * self.fps)) if self.fps else clip.frames
        if count > clip.frames:
            raise BadMedia(f"{clip.name}: it has {clip.frames} frames, fewer than num_frames {count}")
        return [i * clip.frames // count for i in range(count)]

    def sample(self: Any, media: Media) -> tuple[VideoInfo, list[int], tuple[int, int]]:
        """Return the video's metadata, the indices of its frames, and the height and width that the tower receives."""
        clip = video_info(media, RATE, self.max_seconds)
        return clip, self.choose(clip), self.fitted(media, clip.height, clip.width)

    def measure(self: Any, media: Media) -> MediaSize:
        clip, chosen, (height, width) = self.sample(media)
        frame = self.frame_size(height, width)
        layout: list[str | int] = []
        for index in chosen:
            seconds = index / clip.rate
            time = f"{int(seconds // 60):02d}:{int(seconds % 60):02d}"
            layout += [f"{' ' if layout else ''}{time} {BEGIN}", frame.num_placeholders, END]
        return MediaSize(frame.num_placeholders * len(chosen), frame.cost * len(chosen), layout=tuple(layout))

    def prepare(self: Any, media: Media) -> Inputs:
        clip, chosen, (height, width) = self.sample(media)
        frames = read_frames(media, clip.shown(chosen), RATE)
        prepared = [patches_of(self.processor, to_bytes(frame), height, width, self.square) for frame in frames]
        return {name: torch.stack([frame[name] for frame in prepared]) for name in ("pixels", "positions")}

    def split(self, size: MediaSize, inputs: Inputs) -> list[tuple[MediaSize, Inputs]]:
        frames = len(inputs["pixels"])
        parts = []
        for first in range(0, frames, MOST_FRAMES):
            own = {name: value[first : first + MOST_FRAMES].clone() for name, value in inputs.items()}
            parts.append((size.part(len(own["pixels"]) / frames), own))
        return parts

    def preview(self: Any, media: Media) -> str:
        clip, chosen, _ = self.sample(media)
        return preview_frames(media, clip.shown(chosen), RATE)


class PooledClips(_Clips, PoolTower):
    """Video encoder for models with a tower."""

    item_options = CLIP_OPTIONS
    kind = "video"


class RawClips(_Clips, RawPatches):
    """Video encoder for models without a tower."""

    item_options = CLIP_OPTIONS
    kind = "video"
