"""Encoders for videos of Qwen and similar models: frames are selected as each family's video processor selects them.

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
from omnizoo.modalities.files.decoding import CLIP_OPTIONS
from omnizoo.modalities.files.video import VideoInfo, read_frames, video_info
from omnizoo.modalities.item import Inputs, MediaSize
from omnizoo.modalities.media import BadMedia, Media
from omnizoo.recipes.shared.encoders import EncoderSpec, check_frame_options, checked_settings, preview_frames
from omnizoo.recipes.shared.qwen_image import BEGIN, END, ImageTower, InterpolatedTower, WindowedTower

MOST_PATCHES = 2048  # patches per part: longer videos are split, so that several ranks can encode them
OPTIONS = "model.modalities.video.encoder.options"
OWN_SOUND = "use_audio_in_video"  # option of a video in its row, or of all videos of a run
TimeSteps = npt.NDArray[np.int64]  # [steps, frames per step], indices of frames


def visual_specs(image: type[ImageTower], video: type["VideoTower"]) -> dict[str, EncoderSpec]:
    return {
        "image": EncoderSpec(image, "<|image_pad|>", begin=BEGIN, end=END),
        "video": EncoderSpec(video, "<|video_pad|>", begin=BEGIN, end=END),
    }


class VideoTower(ImageTower):
    """Video encoder of Qwen2-VL, and base class for later models.

    A video is sampled at `fps` frames per second, limited to `min_frames` and `max_frames`, or as `num_frames` frames.
    `temporal_patch_size` consecutive frames form one step. None uses the setting of the folder, or the default of the
    family.
    """

    item_options = CLIP_OPTIONS
    # Options that `choose` reads.
    counted: ClassVar[tuple[str, ...]] = ("fps", "num_frames", "min_frames", "max_frames")
    may_sound: ClassVar[bool] = False  # whether the audio of videos can be encoded too
    published_clips: ClassVar[dict[str, Any]] = {
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
        if use_audio_in_video and not self.may_sound:
            raise UserError(f"{OPTIONS}.{OWN_SOUND}: {type(model).__name__} does not read the audio of videos")
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
        self.settings, self.fps, self.max_seconds = settings, float(settings["fps"]), max_seconds
        self.use_audio_in_video = use_audio_in_video
        self.together: int = self.vision.temporal_patch_size

    def sampling_settings(self, model: PreTrainedModel, folder: str | None, options: dict[str, Any]) -> dict[str, Any]:
        """Return the settings: options first, then the folder, then the defaults of the family."""
        for name in options:
            if name not in self.counted:
                family = type(model).__name__
                raise UserError(f"{OPTIONS}.{name}: {family} does not use it. Use {', '.join(self.counted)}.")
        settings, _ = checked_settings(folder, "video_processor")
        settings = {name: value for name, value in settings.items() if value is not None}
        if "fps" in options or ("fps" in settings and "num_frames" not in options):
            settings.pop("num_frames", None)
        return self.published_clips | settings | options

    def choose(self, clip: VideoInfo) -> list[int]:
        """Return indices of evenly spaced frames from the first one on, as `Qwen2VLVideoProcessor` does.

        Their number is a multiple of the frames per step.
        """
        together, count = self.together, self.settings.get("num_frames")
        if count is None:
            most = min(self.settings["max_frames"], clip.frames) // together * together
            count = min(max(clip.frames / clip.rate * self.fps, self.settings["min_frames"]), most)
            count = math.floor(count / together) * together
        else:
            count = round(count / together) * together
        if count > clip.frames:
            raise BadMedia(f"{clip.name}: it has {clip.frames} frames, fewer than num_frames {count}")
        return [int(i) for i in torch.arange(0, clip.frames, clip.frames / max(count, 1)).int().tolist()]

    def seconds_of_step(self, clip: VideoInfo, chosen: Sequence[int]) -> float:
        """Return the seconds per step from which positions are computed."""
        return self.together / self.fps

    def sample(self, media: Media) -> tuple[VideoInfo, TimeSteps, tuple[int, int]]:
        """Return the video's metadata, the frames of each step, and the height and width that the tower receives."""
        clip = video_info(media, self.fps, self.max_seconds)
        chosen = self.choose(clip)
        # Repeat the last frame to fill the last step.
        steps = np.pad(chosen, (0, -len(chosen) % self.together), mode="edge").reshape(-1, self.together)
        return clip, steps, self.resized(len(chosen), clip.height, clip.width, media)

    def measure(self, media: Media) -> MediaSize:
        clip, steps, size = self.sample(media)
        measured = self.size_of(len(steps), *size)
        layout = self.layout(steps / clip.rate, measured.num_placeholders // len(steps))
        seconds = self.seconds_of_step(clip, self.choose(clip))
        return replace(measured, layout=layout, shape=(*measured.shape, seconds))

    def layout(self, times: npt.NDArray[np.float64], places: int) -> tuple[str | int, ...]:
        """Return `MediaSize.layout` of a video; an empty tuple means one run of placeholder tokens.

        Args:
            times: Times of the frames in seconds, `[steps, frames per step]`.
            places: Number of placeholder tokens per step.
        """
        return ()

    def prepare(self, media: Media) -> Inputs:
        clip, steps, (height, width) = self.sample(media)
        frames = read_frames(media, clip.shown(steps.flatten().tolist()), self.fps)
        resized = [frame.resize((width, height), self.processor.resample) for frame in frames]
        out = self.processor(images=resized, do_resize=False, return_tensors="pt")
        # The processor repeats every frame to form a step. Of the t-th frame of a step, keep only the t-th copy.
        values = (self.vision.in_channels, self.together, self.vision.patch_size**2)
        parts = out["pixel_values"].view(*steps.shape, -1, *values).diagonal(dim1=1, dim2=4)
        grid = torch.tensor([len(steps), *out["image_grid_thw"][0, 1:].tolist()])
        return self.with_places(parts.movedim(-1, 3).flatten(2).flatten(0, 1), grid)

    def split(self, size: MediaSize, inputs: Inputs) -> list[tuple[MediaSize, Inputs]]:
        """Split a video between steps, because patches attend only within their step."""
        steps, patches, _ = inputs["positions"].shape
        together = max(1, MOST_PATCHES // patches)
        split = {name: inputs[name].split(together * patches) for name in self.by_patch}
        split |= {name: inputs[name].split(together) for name in self.by_step}
        parts = []
        for number, positions in enumerate(split["positions"]):
            share = len(positions) / steps
            # A view would be sent with its whole storage.
            own = {name: pieces[number].clone() for name, pieces in split.items()}
            own["grid"] = torch.cat([torch.full_like(inputs["grid"][:1], len(positions)), inputs["grid"][1:]])
            parts.append((size.part(share), own))
        return parts

    def preview(self, media: Media) -> str:
        clip, steps, _ = self.sample(media)
        return preview_frames(media, clip.shown(sorted({*steps.flatten().tolist()})), self.fps)


class InterpolatedClips(InterpolatedTower, VideoTower):
    """Video encoder of models with a learned table of positions."""

    published_clips = VideoTower.published_clips | {"size": {"shortest_edge": 128 * 32**2, "longest_edge": 768 * 32**2}}


class TimedClips(InterpolatedClips):
    """Video encoder of Qwen3-VL and later, which writes the time before each step as text.

    `min_pixels` and `max_pixels` limit the sum over all frames of a video.
    """

    def choose(self, clip: VideoInfo) -> list[int]:
        """Return indices of evenly spaced frames from the first to the last, as `Qwen3VLVideoProcessor` does."""
        count, settings = self.settings.get("num_frames"), self.settings
        if count is None:
            count = max(int(clip.frames / clip.rate * self.fps), settings["min_frames"])
            count = min(count, settings["max_frames"], clip.frames)
        return [int(i) for i in np.linspace(0, clip.frames - 1, count).round().astype(int)]

    def fit(self, frames: int, height: int, width: int) -> tuple[int, int]:
        frames = max(frames, self.together)
        fitted: tuple[int, int] = smart_resize(frames, height, width, self.together, self.factor, *self.pixels)
        return fitted

    def layout(self, times: npt.NDArray[np.float64], places: int) -> tuple[str | int, ...]:
        """Return the layout. The time of a step is the mean of its first and last frame."""
        return tuple(part for at in times[:, [0, -1]].mean(1) for part in (f"<{at:.1f} seconds>{BEGIN}", places, END))


class WindowedClips(WindowedTower, VideoTower):
    """Video encoder of models with windowed attention."""


class PacedClips(WindowedClips):
    """Video encoder of Qwen2.5-VL: positions depend on the actual rate of the sampled frames."""

    def seconds_of_step(self, clip: VideoInfo, chosen: Sequence[int]) -> float:
        return self.together / (len(chosen) / clip.frames * clip.rate)
