"""Video encoders of Qwen and similar models. Frames are selected as each family's video processor selects them.

The rule of a family computes frame indices from the header of a video. Its parameters are settings in the model's
folder. If a video is too short for the rule to select a frame, the first frame is used.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize

from omnizoo.config.errors import UserError
from omnizoo.modalities.base import Modality
from omnizoo.modalities.files.decoding import VIDEO_OPTIONS
from omnizoo.modalities.files.video import VideoInfo, read_frames, video_info
from omnizoo.modalities.item import Inputs, MediaSize
from omnizoo.modalities.media import BadMedia, Media
from omnizoo.models.recipe import Options
from omnizoo.recipes.shared.encoders import (
    EncoderSpec,
    build_modalities,
    check_frame_options,
    checked_settings,
    preview_frames,
)
from omnizoo.recipes.shared.qwen_image import (
    BEGIN,
    END,
    InterpolatedImageEncoder,
    QwenImageEncoder,
    WindowedImageEncoder,
)

PATCHES_PER_PART = 2048  # patches per part: longer videos are split, so that several ranks can encode them
OPTIONS = "model.modalities.video.encoder.options"
AUDIO_IN_VIDEO = "use_audio_in_video"  # option of a video in its row, or of all videos of a run
TimeSteps = npt.NDArray[np.int64]  # [steps, frames per step], indices of frames


def visual_specs(image: type[QwenImageEncoder], video: type["QwenVideoEncoder"]) -> dict[str, EncoderSpec]:
    """Return the specs of a model with the special tokens of Qwen-VL."""
    return {
        "image": EncoderSpec(image, "<|image_pad|>", begin=BEGIN, end=END),
        "video": EncoderSpec(video, "<|video_pad|>", begin=BEGIN, end=END),
    }


class QwenVideoEncoder(QwenImageEncoder):
    """Video encoder of Qwen2-VL, and base class for later models.

    A video is sampled at `fps` frames per second, limited to `min_frames` and `max_frames`, or as `num_frames` frames.
    `temporal_patch_size` consecutive frames form one step. If an option is None, the setting of the folder or the
    default of the family is used.
    """

    item_options = VIDEO_OPTIONS
    # Options that `choose` reads.
    sampling_options: ClassVar[tuple[str, ...]] = ("fps", "num_frames", "min_frames", "max_frames")
    supports_audio: ClassVar[bool] = False  # whether the audio of videos can also be encoded
    published_video: ClassVar[dict[str, Any]] = {
        "size": {"shortest_edge": 128 * 28**2, "longest_edge": 768 * 28**2},
        "fps": 2.0,
        "min_frames": 4,
        "max_frames": 768,
    }

    def __init__(
        self,
        model: PreTrainedModel,
        folder: str | None,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        fps: float | None = None,
        num_frames: int | None = None,
        min_frames: int | None = None,
        max_frames: int | None = None,
        max_seconds: float = 3600.0,
        use_audio_in_video: bool = False,
    ) -> None:
        if use_audio_in_video and not self.supports_audio:
            raise UserError(
                f"{OPTIONS}.{AUDIO_IN_VIDEO}: {type(model).__name__} does not support this option. Set it to false."
            )
        check_frame_options(fps, num_frames, min_frames=min_frames, max_frames=max_frames, max_seconds=max_seconds)
        options = {"fps": fps, "num_frames": num_frames, "min_frames": min_frames, "max_frames": max_frames}
        options = {name: value for name, value in options.items() if value is not None}
        settings = self.sampling_settings(model, folder, options)
        size = settings["size"]
        max_pixels = max_pixels or settings.get("max_pixels") or size["longest_edge"]
        min_pixels = min_pixels or min(settings.get("min_pixels") or size["shortest_edge"], max_pixels)
        super().__init__(model, folder, min_pixels, max_pixels)
        for name in ("image_mean", "image_std"):
            setattr(self.processor, name, settings.get(name, getattr(self.processor, name)))
        self.settings = settings
        self.fps = float(settings["fps"])
        self.max_seconds = max_seconds
        self.use_audio_in_video = use_audio_in_video
        self.frames_per_step: int = self.vision.temporal_patch_size

    def sampling_settings(self, model: PreTrainedModel, folder: str | None, options: dict[str, Any]) -> dict[str, Any]:
        """Return the settings for sampling frames.

        Options take precedence over the folder, and the folder over the defaults of the family.
        """
        for name in options:
            if name not in self.sampling_options:
                family = type(model).__name__
                raise UserError(
                    f"{OPTIONS}.{name}: {family} does not use this option. Use {', '.join(self.sampling_options)}."
                )
        settings, _ = checked_settings(folder, "video_processor")
        settings = {name: value for name, value in settings.items() if value is not None}
        if "fps" in options or ("fps" in settings and "num_frames" not in options):
            settings.pop("num_frames", None)
        return self.published_video | settings | options

    def choose(self, video: VideoInfo) -> list[int]:
        """Return the indices of evenly spaced frames, beginning with the first, as `Qwen2VLVideoProcessor` does.

        Their number is a multiple of the frames per step.
        """
        per_step = self.frames_per_step
        count = self.settings.get("num_frames")
        if count is None:
            max_count = min(self.settings["max_frames"], video.frames) // per_step * per_step
            target_count = max(video.frames / video.rate * self.fps, self.settings["min_frames"])
            count = math.floor(min(target_count, max_count) / per_step) * per_step
        else:
            count = round(count / per_step) * per_step
        if count > video.frames:
            raise BadMedia(f"{video.name}: the video has only {video.frames} frames, but num_frames requires {count}")
        indices = torch.arange(0, video.frames, video.frames / max(count, 1)).int()
        return [int(index) for index in indices.tolist()]

    def seconds_of_step(self, video: VideoInfo, indices: Sequence[int]) -> float:
        """Return the duration of a step in seconds, from which positions are computed."""
        return self.frames_per_step / self.fps

    def sample(self, media: Media) -> tuple[VideoInfo, TimeSteps, tuple[int, int]]:
        """Return the video's metadata, the frames of each step, and the height and width that the tower receives."""
        video = video_info(media, self.fps, self.max_seconds)
        indices = self.choose(video)
        # Repeat the last frame to fill the last step.
        padding = -len(indices) % self.frames_per_step
        steps = np.pad(indices, (0, padding), mode="edge").reshape(-1, self.frames_per_step)
        return video, steps, self.resized(len(indices), video.height, video.width, media)

    def measure(self, media: Media) -> MediaSize:
        video, steps, (height, width) = self.sample(media)
        size = self.size_of(len(steps), height, width)
        layout = self.layout(steps / video.rate, size.num_placeholders // len(steps))
        seconds = self.seconds_of_step(video, self.choose(video))
        return replace(size, layout=layout, shape=(*size.shape, seconds))

    def layout(self, times: npt.NDArray[np.float64], placeholders: int) -> tuple[str | int, ...]:
        """Return `MediaSize.layout` of a video; an empty tuple means one run of placeholder tokens.

        Args:
            times: Times of the frames in seconds, `[steps, frames per step]`.
            placeholders: Number of placeholder tokens per step.
        """
        return ()

    def prepare(self, media: Media) -> Inputs:
        video, steps, (height, width) = self.sample(media)
        frames = read_frames(media, video.display_times(steps.flatten().tolist()), self.fps)
        resized = [frame.resize((width, height), self.processor.resample) for frame in frames]
        out = self.processor(images=resized, do_resize=False, return_tensors="pt")
        # The processor repeats every frame to form a step. Keep only the t-th copy of the t-th frame of a step.
        patch_shape = (self.vision.in_channels, self.frames_per_step, self.vision.patch_size**2)
        copies = out["pixel_values"].view(*steps.shape, -1, *patch_shape)
        patches = copies.diagonal(dim1=1, dim2=4).movedim(-1, 3).flatten(2).flatten(0, 1)
        grid = torch.tensor([len(steps), *out["image_grid_thw"][0, 1:].tolist()])
        return self.with_positions(patches, grid)

    def split(self, size: MediaSize, inputs: Inputs) -> list[tuple[MediaSize, Inputs]]:
        """Split a video at step boundaries, because patches attend only within their step."""
        steps, patches, _ = inputs["positions"].shape
        steps_per_part = max(1, PATCHES_PER_PART // patches)
        pieces_by_name = {name: inputs[name].split(steps_per_part * patches) for name in self.by_patch}
        pieces_by_name |= {name: inputs[name].split(steps_per_part) for name in self.by_step}
        parts = []
        for number, positions in enumerate(pieces_by_name["positions"]):
            # Clone the tensors, because a view would be sent with its whole storage.
            part = {name: pieces[number].clone() for name, pieces in pieces_by_name.items()}
            num_steps = torch.full_like(inputs["grid"][:1], len(positions))
            part["grid"] = torch.cat([num_steps, inputs["grid"][1:]])
            parts.append((size.part(len(positions) / steps), part))
        return parts

    def preview(self, media: Media) -> str:
        video, steps, _ = self.sample(media)
        distinct_frames = sorted(set(steps.flatten().tolist()))
        return preview_frames(media, video.display_times(distinct_frames), self.fps)


class InterpolatedVideoEncoder(InterpolatedImageEncoder, QwenVideoEncoder):
    """Video encoder of models with a learned table of positions."""

    published_video = QwenVideoEncoder.published_video | {
        "size": {"shortest_edge": 128 * 32**2, "longest_edge": 768 * 32**2}
    }


class TimedVideoEncoder(InterpolatedVideoEncoder):
    """Video encoder of Qwen3-VL and later. It inserts the time as text before each step.

    `min_pixels` and `max_pixels` limit the total number of pixels of all frames.
    """

    def choose(self, video: VideoInfo) -> list[int]:
        """Return indices of evenly spaced frames from the first to the last, as `Qwen3VLVideoProcessor` does."""
        settings = self.settings
        count = settings.get("num_frames")
        if count is None:
            count = max(int(video.frames / video.rate * self.fps), settings["min_frames"])
            count = min(count, settings["max_frames"], video.frames)
        indices = np.linspace(0, video.frames - 1, count).round().astype(int)
        return [int(index) for index in indices]

    def fit(self, frames: int, height: int, width: int) -> tuple[int, int]:
        per_step = self.frames_per_step
        fitted: tuple[int, int] = smart_resize(
            max(frames, per_step), height, width, per_step, self.factor, *self.pixels
        )
        return fitted

    def layout(self, times: npt.NDArray[np.float64], placeholders: int) -> tuple[str | int, ...]:
        """Return the layout. The time of a step is the mean of the times of its first and last frame."""
        layout: list[str | int] = []
        for seconds in times[:, [0, -1]].mean(1):
            layout += [f"<{seconds:.1f} seconds>{BEGIN}", placeholders, END]
        return tuple(layout)


def timed_modalities(model: PreTrainedModel, folder: str | None, options: Options) -> dict[str, Modality]:
    """Build the encoders of Qwen3-VL.

    The option `outer_markers` of videos sets whether vision markers surround the whole video, in addition to the
    markers of each step. transformers keeps the outer pair since version 5; version 4.57 and vLLM replace it.
    """
    video_options = dict(options.get("video", {}))
    outer_markers = video_options.pop("outer_markers", True)
    if not isinstance(outer_markers, bool):
        raise UserError(f"{OPTIONS}.outer_markers: {outer_markers!r}; expected true or false")
    specs = visual_specs(InterpolatedImageEncoder, TimedVideoEncoder)
    if not outer_markers:
        specs["video"] = replace(specs["video"], begin="", end="", marks=(BEGIN, END))
    return build_modalities(specs, model, folder, {**options, "video": video_options})


class WindowedVideoEncoder(WindowedImageEncoder, QwenVideoEncoder):
    """Video encoder of models with windowed attention."""


class PacedVideoEncoder(WindowedVideoEncoder):
    """Video encoder of Qwen2.5-VL: positions depend on the actual rate of the sampled frames."""

    def seconds_of_step(self, video: VideoInfo, indices: Sequence[int]) -> float:
        sampled_rate = len(indices) / video.frames * video.rate
        return self.frames_per_step / sampled_rate
