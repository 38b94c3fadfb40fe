"""Video encoders of Gemma 4.

Each frame is an image with fewer placeholder tokens, preceded by its time as text. Frames attend to each other only in
the language model.
"""

from typing import Any

import torch
from transformers import PreTrainedModel

from omnizoo.modalities.files.decoding import VIDEO_OPTIONS
from omnizoo.modalities.files.image import to_bytes
from omnizoo.modalities.files.video import VideoInfo, read_frames, video_info
from omnizoo.modalities.item import Inputs, MediaSize
from omnizoo.modalities.media import BadMedia, Media
from omnizoo.recipes.shared.encoders import check_frame_options, checked_settings, preview_frames
from omnizoo.recipes.shared.gemma_encoders import BEGIN, END, PooledImageEncoder, RawImageEncoder, image_patches
from omnizoo.recipes.shared.tensor_images import BICUBIC, TensorImageProcessor

PUBLISHED = {"max_soft_tokens": 70, "resample": BICUBIC, "image_mean": [0.0], "image_std": [1.0]}
PUBLISHED_FRAMES = 32
RATE = 24.0  # assumed frames per second of frame lists without a rate
FRAMES_PER_PART = 8  # frames per part: longer videos are split, so that several ranks can encode them


class _VideoMixin:
    """Mixin that turns an image encoder of Gemma 4 into a video encoder. It must be the first base class.

    A video is sampled as `num_frames` frames, or as `fps` frames per second, each of at most `max_soft_tokens`
    placeholder tokens. For options that are None, the setting of the folder or the default of the family is used.
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
        processor = TensorImageProcessor(folder, PUBLISHED, "video", max_soft_tokens=max_soft_tokens)
        super().__init__(model, None, processor.settings["max_soft_tokens"])  # type: ignore[call-arg]  # of the tower
        self.processor = processor
        self.max_seconds = max_seconds
        settings, _ = checked_settings(folder, "video_processor")
        default_frames = None if fps else settings.get("num_frames", PUBLISHED_FRAMES)
        self.num_frames: int | None = num_frames or default_frames
        self.fps: float | None = fps or settings.get("fps")

    def choose(self, video: VideoInfo) -> list[int]:
        """Return the indices of evenly spaced frames, beginning with the first, as `default_sample_indices_fn` does."""
        count = self.num_frames
        if count is None and self.fps:
            count = max(1, int(video.frames / video.rate * self.fps))
        elif count is None:
            count = video.frames
        if count > video.frames:
            raise BadMedia(
                f"{video.name}: the video has only {video.frames} frames, but num_frames or fps requires {count}"
            )
        return [i * video.frames // count for i in range(count)]

    def sample(self: Any, media: Media) -> tuple[VideoInfo, list[int], tuple[int, int]]:
        """Return the video's metadata, the indices of its frames, and the height and width that the tower receives."""
        video = video_info(media, RATE, self.max_seconds)
        return video, self.choose(video), self.fitted(media, video.height, video.width)

    def measure(self: Any, media: Media) -> MediaSize:
        video, indices, (height, width) = self.sample(media)
        frame = self.frame_size(height, width)
        layout: list[str | int] = []
        for index in indices:
            seconds = index / video.rate
            time = f"{int(seconds // 60):02d}:{int(seconds % 60):02d}"
            separator = " " if layout else ""
            layout += [f"{separator}{time} {BEGIN}", frame.num_placeholders, END]
        return MediaSize(frame.num_placeholders * len(indices), frame.cost * len(indices), layout=tuple(layout))

    def prepare(self: Any, media: Media) -> Inputs:
        video, indices, (height, width) = self.sample(media)
        frames = read_frames(media, video.display_times(indices), RATE)
        prepared = [image_patches(self.processor, to_bytes(frame), height, width, self.square) for frame in frames]
        return {name: torch.stack([frame[name] for frame in prepared]) for name in ("pixels", "positions")}

    def split(self, size: MediaSize, inputs: Inputs) -> list[tuple[MediaSize, Inputs]]:
        frames = len(inputs["pixels"])
        parts = []
        for first in range(0, frames, FRAMES_PER_PART):
            part = {name: value[first : first + FRAMES_PER_PART].clone() for name, value in inputs.items()}
            share = len(part["pixels"]) / frames
            parts.append((size.part(share), part))
        return parts

    def preview(self: Any, media: Media) -> str:
        video, indices, _ = self.sample(media)
        return preview_frames(media, video.display_times(indices), RATE)


class PooledVideoEncoder(_VideoMixin, PooledImageEncoder):
    """Video encoder for models with a tower."""

    item_options = VIDEO_OPTIONS
    kind = "video"


class RawVideoEncoder(_VideoMixin, RawImageEncoder):
    """Video encoder for models without a tower."""

    item_options = VIDEO_OPTIONS
    kind = "video"
