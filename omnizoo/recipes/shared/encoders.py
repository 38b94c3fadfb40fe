"""Code shared by the encoders in recipes. These encoders use a tower of a multimodal HF model.

Such an encoder has no weights, but calls the model that it was built for. The features of a media item do not depend on
the other items in the batch. To avoid host syncs, everything that depends on sizes is computed in `prepare` or from
tensor shapes.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from inspect import signature
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import FeatureExtractionMixin, PreTrainedModel
from transformers.vision_utils import get_vision_interpolation_indices_and_weights

from omnizoo.config.errors import UserError, first_line
from omnizoo.modalities.base import Encoder, Modality, SharedTower
from omnizoo.modalities.encoders.tower import TowerFlops
from omnizoo.modalities.files.audio import audio_length, read_audio
from omnizoo.modalities.files.decoding import AUDIO_OPTIONS, IMAGE_OPTIONS
from omnizoo.modalities.files.image import read_image
from omnizoo.modalities.files.preview import thumbnail
from omnizoo.modalities.files.video import read_frames
from omnizoo.modalities.flop_count import FlopCounter
from omnizoo.modalities.item import Inputs
from omnizoo.modalities.media import Media
from omnizoo.modalities.processor_files import processor_settings
from omnizoo.models.hf_private import PACKED, attend_packed, attention_name
from omnizoo.models.media.features import Features, insert_features
from omnizoo.models.media.media_model import MediaModule
from omnizoo.models.recipe import Options

log = logging.getLogger(__name__)
HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}  # normalization that several families share
SHARE = 2**62  # integer that represents an interpolation weight of 1
PREVIEW_FRAMES = 8  # frames of a video in a preview
POSITIVE_AUDIO = ("sampling_rate", "hop_length", "n_fft", "feature_size")
POSITIVE_VIDEO = ("rescale_factor", "fps", "num_frames", "min_frames", "max_frames")


class UsesModel:
    """Mixin for encoders, decoders and followers that call the model they were built for."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        # A tuple prevents torch from registering the model as a submodule of its own encoder.
        self._model = (model,)

    @property
    def model(self) -> Any:
        return self._model[0]


class TowerEncoder(UsesModel, SharedTower, Encoder):
    """Encoder that calls a tower of the model, and a separate projector if `projector` names one."""

    # Whether the items of a call are packed into one sequence, with attention within each item.
    packs_items: ClassVar[bool] = False

    def __init__(self, model: PreTrainedModel, tower: str, projector: str = "") -> None:
        super().__init__(model)
        self.tower_name = tower
        self.projector_name = projector
        self.is_packed = self.packs_items and attention_name(model) == PACKED
        if self.is_packed:
            attend_packed(self.tower)

    @property
    def tower(self) -> Any:
        return self.model.get_submodule(self.tower_name)

    @property
    def projector(self) -> Any:
        return self.model.get_submodule(self.projector_name)

    def tower_work(self) -> TowerFlops:
        """Return the FLOPs of the tower. Subclasses override it if `TowerFlops.of` does not apply."""
        return TowerFlops.of(self.tower)

    @cached_property
    def work(self) -> tuple[TowerFlops, float]:
        """FLOPs of the tower, and FLOPs of one placeholder token in the projector."""
        work = self.tower_work()
        token = FlopCounter(work.trained)
        if self.projector_name:
            token.run(self.projector, 1)
        return work, token.flops

    def flops(self, patches: int, placeholders: int) -> float:
        """Return the FLOPs of an item with this number of patches, all of which attend to each other."""
        tower, per_placeholder = self.work
        return tower.flops(patches) + placeholders * per_placeholder


class ImageTowerEncoder(TowerEncoder):
    """Base class of image encoders that call a tower."""

    item_options = IMAGE_OPTIONS

    def preview(self, media: Media) -> str:
        return thumbnail(read_image(media), media.name)


class AudioTowerEncoder(TowerEncoder):
    """Encoder for audio of at most `max_seconds`, prepared by `extractor`. Subclasses set both."""

    item_options = AUDIO_OPTIONS
    extractor: Any
    max_seconds: float

    @property
    def rate(self) -> int:
        """Sampling rate in Hz."""
        return int(self.extractor.sampling_rate)

    def num_samples(self, media: Media) -> int:
        """Return the number of audio samples, computed from the header."""
        return audio_length(media, self.rate, self.max_seconds)

    def read_samples(self, media: Media) -> Any:
        """Return the audio samples at `rate`."""
        return read_audio(media, self.rate, self.max_seconds)


@dataclass(frozen=True)
class EncoderSpec:
    """Encoder of a modality, and the special tokens around its items."""

    encoder: Callable[..., Encoder]  # called with the model, its folder and the options in the config
    placeholder: str
    marks: Sequence[str] = ()  # special tokens in `MediaSize.layout`
    begin: str = ""
    end: str = ""
    in_chat: str = "{item}"  # see `Modality`


def build_modalities(
    specs: Mapping[str, EncoderSpec], model: PreTrainedModel, folder: str | None, options: Options
) -> dict[str, Modality]:
    """Build the encoders of a model. Returns the modalities, keyed by name."""
    modalities = {}
    for name, spec in specs.items():
        encoder = build_with_options(spec.encoder, options, name, model, folder)
        modalities[name] = Modality(
            name=name,
            encoder=encoder,
            decoder=None,
            begin=spec.begin,
            placeholder=spec.placeholder,
            end=spec.end,
            marks=tuple(spec.marks),
            in_chat=spec.in_chat,
        )
    return modalities


def visual_modules(tower: str, *projectors: str) -> tuple[MediaModule, MediaModule]:
    """Return the modules of a model that encodes images and videos with one tower."""
    image = MediaModule("image", "encoder", tower, projectors)
    video = MediaModule("video", "encoder", tower, projectors)
    return image, video


def build_with_options(build: Callable[..., Any], options: Options, name: str, *args: Any) -> Any:
    """Call `build` with `args` and the options in the config.

    Args:
        name: A modality for its encoder, or "MODALITY/decoder".

    Raises:
        UserError: If `build` does not accept one of the options. The message contains the key of this option.
    """
    user_options = options.get(name, {})
    try:
        signature(build).bind(*args, **user_options)
    except TypeError as error:
        modality, _, role = name.partition("/")
        raise UserError(f"model.modalities.{modality}.{role or 'encoder'}.options: {error}") from error
    return build(*args, **user_options)


def check_positive(key: str, **options: float | None) -> None:
    """Raise a `UserError` if an option is set to 0 or less. `key` is the config key of the options."""
    for name, value in options.items():
        if value is not None and not value > 0:
            raise UserError(f"{key}.{name}: {value!r} is out of range; expected a number greater than 0")


def check_frame_options(fps: float | None, num_frames: int | None, **options: float | None) -> None:
    """Check the options of video encoders that select frames."""
    key = "model.modalities.video.encoder.options"
    check_positive(key, fps=fps, num_frames=num_frames, **options)
    if fps is not None and num_frames is not None:
        raise UserError(f"{key}: fps {fps} and num_frames {num_frames} exclude each other. Set one of them.")


def checked_settings(folder: str | None, kind: str) -> tuple[dict[str, Any], str]:
    """Return the result of `processor_settings`. Raise a `UserError` for invalid numbers that processors would
    accept."""
    settings, file = processor_settings(folder, kind)
    for name in POSITIVE_AUDIO + POSITIVE_VIDEO:
        value = settings.get(name)
        if value is not None and not (isinstance(value, int | float) and value > 0):
            raise UserError(f"{file}: {name} is {value!r}; expected a number greater than 0")
    for name in ("image_mean", "image_std"):
        value = settings.get(name)
        if value is None:
            continue
        numbers = list(value) if isinstance(value, list | tuple | str) else [value]
        is_numeric = all(isinstance(number, int | float) for number in numbers)
        if len(numbers) not in (1, 3) or not is_numeric:
            raise UserError(f"{file}: {name} is {value!r}; expected three numbers")
    return settings, file


def load_processor(processor: Any, folder: str | None, defaults: Mapping[str, Any], **overrides: Any) -> Any:
    """Build a processor of transformers with the settings of the model's folder. Without settings, use `defaults`.

    Args:
        overrides: Settings from the model or from options. If None, the setting of the folder is used.
    """
    kind = "feature_extractor" if issubclass(processor, FeatureExtractionMixin) else "image_processor"
    overrides = {name: value for name, value in overrides.items() if value is not None}
    settings, file = checked_settings(folder, kind)
    if not settings:
        if folder is not None and any(Path(folder).glob("*.safetensors")):
            log.warning("%s not found: %s uses the default settings of the model family", file, processor.__name__)
        return processor(**{**defaults, **overrides})
    try:
        # `from_pretrained(folder, **overrides)` would ignore overrides that the file does not contain.
        return processor.from_dict(settings | overrides)
    except (ValueError, TypeError, KeyError, ArithmeticError, AttributeError) as error:
        raise UserError(f"{file}: invalid settings of {processor.__name__}: {first_line(error)}") from error


def merge_features(model: PreTrainedModel, inputs: dict[str, Any], features: Mapping[str, Features]) -> dict[str, Any]:
    """Insert features by index, because the masks that the model would use cause a host sync.

    Features of every modality are inserted, even if a batch has none, so that all ranks build the same graph.
    """
    embeddings = inputs.get("inputs_embeds")
    if embeddings is None:
        embeddings = model.get_input_embeddings()(inputs["input_ids"])
    for media_features in features.values():
        embeddings = insert_features(embeddings, media_features)
    return inputs | {"input_ids": None, "inputs_embeds": embeddings}


def boundaries(segments: Sequence[tuple[int, int]], device: torch.device) -> torch.Tensor:
    """Return cumulative sequence lengths of items. An item is a pair (length, length of its attention windows).

    They are computed on the device, so there is no copy from the host.
    """
    window_starts = []
    end = 0
    for length, window in segments:
        start = end
        end += length
        window_starts.append(torch.arange(start, end, window, device=device, dtype=torch.int32))
    return torch.cat([*window_starts, torch.full((1,), end, device=device, dtype=torch.int32)])


def interpolation_inputs(grid: torch.Tensor, table: Any, **options: Any) -> Inputs:
    """Return the indices and weights that interpolate the tower's position table for the patches of `grid [1, 3]`.

    Weights are stored as integers, because floats would be cast to the dtype of the model. They keep the precision of
    fp32.
    """
    indices, weights = get_vision_interpolation_indices_and_weights(
        grid,
        num_grid_per_side=table.num_grid_per_side,
        mode=table.interpolation_mode,
        align_corners=table.interpolation_align_corners,
        **options,
    )
    return {"taps": indices.int(), "shares": (weights.double() * SHARE).long()}


def read_interpolation(items: Sequence[Inputs]) -> dict[str, torch.Tensor]:
    """Return arguments of the tower from the `interpolation_inputs` of all items."""
    indices = torch.cat([item["taps"] for item in items])
    weights = torch.cat([item["shares"] for item in items])
    return {"interp_indices": indices, "interp_weights": weights.to(torch.float32) / SHARE}


def preview_frames(media: Media, times: Sequence[float], rate: float) -> str:
    """Return HTML that shows a few of the frames at `times`, in seconds."""
    shown_times = times[:: -(-len(times) // PREVIEW_FRAMES)]
    frames = read_frames(media, shown_times, rate)
    return "".join(thumbnail(frame, f"{time:.1f} s", 96) for frame, time in zip(frames, shown_times, strict=True))
