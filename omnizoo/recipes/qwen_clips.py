"""Clips in the published Qwen models and their like: which frames are taken, as each published video processor takes
them, and the settings of the model's folder that say how many.

A rule gives indices of frames from what a clip's header says of it. Where a clip is too short for the published rule to
give a single one, its first frame is taken.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize

from omnizoo.config.errors import UserError
from omnizoo.modalities.base import Inputs, Size
from omnizoo.modalities.files import CLIP_OPTIONS, Footage, footage_of, read_frames
from omnizoo.modalities.image import thumbnail
from omnizoo.modalities.item import BadMedia, Media
from omnizoo.models.artefact import read_json
from omnizoo.recipes.qwen_towers import BEGIN, END, ImageTower, InterpolatedTower, WindowedTower

MOST_PATCHES = 2048  # of a part of a clip: ranks share out what is longer
FILES = ("processor_config.json", "video_preprocessor_config.json")  # in the order in which transformers asks them
OWN_SOUND = "use_audio_in_video"  # the option of clips: of one in its row, or of all of a run
Steps = npt.NDArray[np.int64]  # [steps, frames of a step]: which frames


class VideoTower(ImageTower):
    """Clips as `fps` frames a second, `min_frames` to `max_frames` of them, or as `num_frames`; a few frames together
    become a step. What is not given is as the folder says, else as published."""

    item_options = CLIP_OPTIONS
    counted: ClassVar[tuple[str, ...]] = ("fps", "num_frames", "min_frames", "max_frames")  # what its rule goes by
    may_sound: ClassVar[bool] = False  # with what is heard in them
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
            raise UserError(
                f"model.modalities.video.encoder.options.{OWN_SOUND}: {type(model).__name__} hears nothing in clips"
            )
        given = {"fps": fps, "num_frames": num_frames, "min_frames": min_frames, "max_frames": max_frames}
        for name, value in {**given, "max_seconds": max_seconds}.items():
            if value is not None and not value > 0:
                raise UserError(f"model.modalities.video.encoder.options.{name}: {value!r} is not above 0")
            if value is not None and name in given and name not in self.counted:
                raise UserError(
                    f"model.modalities.video.encoder.options.{name}: {type(model).__name__} goes by "
                    f"{', '.join(self.counted)}"
                )
        if fps is not None and num_frames is not None:
            raise UserError("model.modalities.video.encoder.options: fps and num_frames are both given; give one")
        said = video_settings(folder)
        if fps is not None or (said.get("fps") is not None and num_frames is None):
            said = said | {"num_frames": None}  # frames by the second, as whoever speaks last says
        settings = self.published_clips | {name: value for name, value in said.items() if value is not None}
        settings |= {name: value for name, value in given.items() if value is not None}
        size = settings["size"]
        max_pixels = max_pixels or settings.get("max_pixels") or size["longest_edge"]
        min_pixels = min_pixels or min(settings.get("min_pixels") or size["shortest_edge"], max_pixels)
        super().__init__(model, folder, min_pixels, max_pixels)
        for name in ("image_mean", "image_std"):
            setattr(self.processor, name, settings.get(name, getattr(self.processor, name)))
        self.settings, self.fps, self.max_seconds = settings, float(settings["fps"]), max_seconds
        self.use_audio_in_video = use_audio_in_video
        self.together: int = self.vision.temporal_patch_size

    def choose(self, clip: Footage) -> list[int]:
        """Frames, evenly from the first one on, a whole number of steps: `Qwen2VLVideoProcessor`."""
        together, count = self.together, self.settings.get("num_frames")
        if count is None:
            most = min(self.settings["max_frames"], clip.frames) // together * together
            count = min(max(clip.frames / clip.rate * self.fps, self.settings["min_frames"]), most)
            count = math.floor(count / together) * together
        else:
            count = round(count / together) * together
        if count > clip.frames:
            raise BadMedia(f"it has {clip.frames} frames, fewer than num_frames {count}")
        return [int(i) for i in torch.arange(0, clip.frames, clip.frames / max(count, 1)).int().tolist()]

    def seconds_of_step(self, clip: Footage, chosen: Sequence[int]) -> float:
        """As positions count them."""
        return self.together / self.fps

    def sample(self, media: Media) -> tuple[Footage, Steps, tuple[int, int]]:
        """The clip, its steps, and height and width as the tower sees them."""
        clip = footage_of(media, self.fps, self.max_seconds)
        try:
            chosen = self.choose(clip)
        except BadMedia as bad:
            raise BadMedia(f"{media.name}: {bad}") from None
        # the last frame again and again, until steps are whole
        steps = np.pad(chosen, (0, -len(chosen) % self.together), mode="edge").reshape(-1, self.together)
        return clip, steps, self.resized(len(chosen), clip.height, clip.width, media)

    def measure(self, media: Media) -> Size:
        clip, steps, size = self.sample(media)
        measured = self.size_of(len(steps), *size)
        layout = self.layout(steps / clip.rate, measured.places // len(steps))
        seconds = self.seconds_of_step(clip, self.choose(clip))
        return replace(measured, layout=layout, shape=(*measured.shape, seconds))

    def layout(self, times: npt.NDArray[np.float64], places: int) -> tuple[str | int, ...]:
        """Of a clip with steps of `places`, whose frames are at `times [steps, frames]`: one run."""
        return ()

    def prepare(self, media: Media) -> Inputs:
        clip, steps, (height, width) = self.sample(media)
        frames = read_frames(media, clip.shown(steps.flatten().tolist()), self.fps)
        resized = [frame.resize((width, height), self.processor.resample) for frame in frames]
        out = self.processor(images=resized, do_resize=False, return_tensors="pt")
        # The processor makes a step of every frame by itself: what is wanted of a step's t-th frame is its t-th part.
        values = (self.vision.in_channels, self.together, self.vision.patch_size**2)
        parts = out["pixel_values"].view(*steps.shape, -1, *values).diagonal(dim1=1, dim2=4)
        grid = torch.tensor([len(steps), *out["image_grid_thw"][0, 1:].tolist()])
        return self.with_places(parts.movedim(-1, 3).flatten(2).flatten(0, 1), grid)

    def parts(self, size: Size, inputs: Inputs) -> list[tuple[Size, Inputs]]:
        """Patches see those of their own step."""
        steps, patches, _ = inputs["positions"].shape
        together = max(1, MOST_PATCHES // patches)
        if steps <= together:
            return [(size, inputs)]
        split = {name: inputs[name].split(together * patches) for name in self.by_patch}
        split |= {name: inputs[name].split(together) for name in self.by_step}
        parts = []
        for number, positions in enumerate(split["positions"]):
            share = len(positions) / steps
            own = {name: pieces[number].clone() for name, pieces in split.items()}  # a view would travel whole
            own["grid"] = torch.cat([torch.full_like(inputs["grid"][:1], len(positions)), inputs["grid"][1:]])
            parts.append((replace(size, places=round(size.places * share), cost=size.cost * share), own))
        return parts

    def preview(self, media: Media) -> str:
        clip, steps, _ = self.sample(media)
        times = clip.shown(sorted({*steps.flatten().tolist()}))
        few = times[:: -(-len(times) // 8)]
        frames = read_frames(media, few, self.fps)
        return "".join(thumbnail(frame, f"{time:.1f} s", 96) for frame, time in zip(frames, few, strict=True))


class InterpolatedClips(InterpolatedTower, VideoTower):
    """Of a model whose patches have a table of positions."""

    published_clips = VideoTower.published_clips | {"size": {"shortest_edge": 128 * 32**2, "longest_edge": 768 * 32**2}}


class TimedClips(InterpolatedClips):
    """Steps stand between their times, written as text; `min_pixels` and `max_pixels` are of all frames of a clip
    together: Qwen3-VL and later."""

    def choose(self, clip: Footage) -> list[int]:
        """Frames, evenly from the first one to the last: `Qwen3VLVideoProcessor`."""
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
        """A step's time is the middle of its first and its last frame."""
        return tuple(part for at in times[:, [0, -1]].mean(1) for part in (f"<{at:.1f} seconds>{BEGIN}", places, END))


class WindowedClips(WindowedTower, VideoTower):
    """Of a tower that attends in windows."""


class PacedClips(WindowedClips):
    """Positions follow the rate at which frames were really taken: Qwen2.5-VL."""

    def seconds_of_step(self, clip: Footage, chosen: Sequence[int]) -> float:
        return self.together / (len(chosen) / clip.frames * clip.rate)


def video_settings(folder: str | None) -> dict[str, Any]:
    """What the model's folder says of clips; nothing, where there is no folder or it does not say."""
    for name in FILES:
        file = Path(folder or "") / name
        if folder is None or not file.is_file():
            continue
        said = read_json(file)
        found = said.get("video_processor") if name == FILES[0] else said
        if isinstance(found, dict):
            for key in ("fps", "num_frames", "min_frames", "max_frames"):
                value = found.get(key)
                if value is not None and not (isinstance(value, int | float) and value > 0):
                    raise UserError(f"{file}: {key} is {value!r}; expected a number above 0")
            return found
    return {}
