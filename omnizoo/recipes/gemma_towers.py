"""How pictures and sound enter Gemma 4: patches of any shape, pooled into places; mel frames, four to a place. Where
there are no towers (12B, "unified"), raw pixels and raw samples of sound, each place by itself.

The tower's parts are called one by one: as a whole it takes pictures padded to one length, and picks what is theirs by
a mask that the host would have to wait for.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from inspect import signature
from typing import Any, ClassVar

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel
from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor
from transformers.models.gemma4.image_processing_pil_gemma4 import (
    Gemma4ImageProcessorPil,
    get_aspect_ratio_preserving_size,
)
from transformers.models.gemma4_unified.feature_extraction_gemma4_unified import Gemma4UnifiedAudioFeatureExtractor

from omnizoo.config.errors import UserError
from omnizoo.modalities.base import Inputs, Size
from omnizoo.modalities.files import (
    PICTURE_OPTIONS,
    SOUND_OPTIONS,
    picture_size,
    read_picture,
    read_sound,
    sound_length,
)
from omnizoo.modalities.item import BadMedia, Media
from omnizoo.modalities.pixels import to_patches
from omnizoo.modalities.tally import Tally
from omnizoo.modalities.tower import Work, preprocessor_settings
from omnizoo.recipes.tensor_pictures import BICUBIC, TensorPictures
from omnizoo.recipes.vision_towers import PatchTower, VisionTower, image_processor

BEGIN, END = "<|image>", "<image|>"
SOUND_BEGIN, SOUND_END = "<|audio>", "<audio|>"
RAW = {"max_soft_tokens": 280, "resample": BICUBIC, "do_normalize": False, "image_mean": [0.0], "image_std": [1.0]}
PLACES = (70, 140, 280, 560, 1120)  # limits that it was trained with


class PoolTower(PatchTower):
    """Pictures of at most `max_soft_tokens` places; by default what the folder's preprocessor says."""

    item_options = PICTURE_OPTIONS
    kind: ClassVar[str] = "image"

    def __init__(self, model: PreTrainedModel, folder: str | None, max_soft_tokens: int | None = None) -> None:
        super().__init__(model, "model.vision_tower", "model.embed_vision")
        if max_soft_tokens is not None:
            check_places(self.kind, max_soft_tokens)
        config: Any = model.config
        self.square: int = config.vision_config.patch_size  # pixels along the edge of a patch
        self.pooled: int = config.vision_config.pooling_kernel_size  # patches along the edge of a place's square
        self.processor = image_processor(
            *(Gemma4ImageProcessorPil, folder, {}),
            patch_size=self.square,
            pooling_kernel_size=self.pooled,
            max_soft_tokens=max_soft_tokens,
        )
        self.most: int = self.processor.max_soft_tokens

    def tower_work(self) -> Work:
        """Its table of positions is looked up, not multiplied with. Patches are pooled by a product, of places with all
        patches of a picture, whose weights need no gradient."""
        work, embedder = Work.of(self.tower), self.tower.patch_embedder
        counted, right = Tally(), Tally()
        counted.run(embedder, 1)
        right.run(embedder.input_proj, 1)
        pooling = 2 * self.tower.config.hidden_size / self.pooled**2 * (1 + work.trained)
        per_token = work.per_token + right.flops - counted.flops
        return replace(work, per_token=per_token, per_pair=work.per_pair + pooling)

    def fitted(self, media: Media, height: int, width: int) -> tuple[int, int]:
        return fitted(media, height, width, self.square, self.most, self.pooled)

    def frame_size(self, height: int, width: int) -> Size:
        """Of a picture that is fitted."""
        places = height * width // (self.square * self.pooled) ** 2
        return self.size_of(places * self.pooled**2, places, (BEGIN, places, END))

    def measure(self, media: Media) -> Size:
        return self.frame_size(*self.fitted(media, *picture_size(media)))

    def prepare(self, media: Media) -> Inputs:
        out = self.processor(images=read_picture(media), return_tensors="pt")
        count = int(out["num_soft_tokens_per_image"][0]) * self.pooled**2  # what follows is padding
        return {
            "pixels": out["pixel_values"][0, :count].clone(),
            "positions": out["image_position_ids"][0, :count].clone(),
        }

    def blank(self) -> Inputs:
        edge = torch.arange(self.pooled)
        return {
            "pixels": torch.zeros(self.pooled**2, 3 * self.square**2),
            "positions": torch.cartesian_prod(edge, edge).flip(1),
        }

    def places(self, inputs: Inputs) -> int:
        return inputs["pixels"].shape[:-1].numel() // self.pooled**2

    def encode(self, items: Sequence[Inputs]) -> torch.Tensor:
        """Pictures `[patches, pixels]`, and clips `[frames, patches, pixels]`, whose frames do not see each other."""
        tower = self.tower
        shapes = [(1, *item["pixels"].shape)[-3:-1] for item in items]
        lengths = [patches for frames, patches in shapes for _ in range(frames)]
        pixels, positions = (
            torch.cat([item[name].flatten(0, -2) for item in items])[None] for name in ("pixels", "positions")
        )
        nothing = torch.zeros(positions.shape[:2], dtype=torch.bool, device=pixels.device)  # is padding
        if self.is_packed:
            ends = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32).to(pixels.device, non_blocking=True)
            told: dict[str, Any] = {"cu_seq_lens_q": ends, "max_length_q": max(lengths)}
            seen = None
        else:
            told, numbers = {}, torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).to(pixels.device)
            seen = (numbers[:, None] == numbers)[None, None]
        hidden = tower.encoder(tower.patch_embedder(pixels, positions, nothing), seen, positions, **told)
        states = hidden.last_hidden_state.split(lengths, 1)
        each = zip(states, positions.split(lengths, 1), nothing.split(lengths, 1), lengths, strict=True)
        pooled = torch.cat([tower.pooler(s, p, n, length // self.pooled**2)[0][0] for s, p, n, length in each])
        if tower.config.standardize:
            pooled = (pooled - tower.std_bias.float()) * tower.std_scale.float()
        features: torch.Tensor = self.projector(pooled.to(states[0].dtype))
        return features


class RawPatches(VisionTower):
    """Pictures of at most `max_soft_tokens` places, each a square of pixels; by default what the folder's preprocessor
    says. The published processor takes tensors."""

    kind: ClassVar[str] = "image"

    def __init__(self, model: PreTrainedModel, folder: str | None, max_soft_tokens: int | None = None) -> None:
        super().__init__(model, "model.embed_vision", "model.embed_vision.multimodal_embedder")
        config: Any = model.config.vision_config
        self.square: int = config.model_patch_size
        self.processor = TensorPictures(folder, RAW, max_soft_tokens=max_soft_tokens)
        self.most: int = self.processor.told["max_soft_tokens"]
        check_places(self.kind, self.most, config.mm_posemb_size)

    @cached_property
    def per_place(self) -> float:
        tally = Tally()
        tally.run(self.tower.patch_ln1, 1)  # which gradients flow back to, if it is trained
        tally.run(self.tower.patch_dense, 1)
        tally.run(self.projector, 1)
        return tally.flops

    def fitted(self, media: Media, height: int, width: int) -> tuple[int, int]:
        return fitted(media, height, width, self.square, self.most, 1)

    def frame_size(self, height: int, width: int) -> Size:
        """Of a picture that is fitted."""
        places = height * width // self.square**2
        return Size(places, self.per_place * places, layout=(BEGIN, places, END))

    def measure(self, media: Media) -> Size:
        return self.frame_size(*self.fitted(media, *picture_size(media)))

    def prepare(self, media: Media) -> Inputs:
        pixels = self.processor.read(media)
        height, width = self.fitted(media, *pixels.shape[1:])
        values = self.processor.values(self.processor.resize(pixels, height, width))
        rows, columns = torch.arange(height // self.square), torch.arange(width // self.square)
        return {
            "pixels": to_patches(values.permute(1, 2, 0), self.square),
            "positions": torch.cartesian_prod(rows, columns).flip(1),  # along the row, then which row
        }

    def blank(self) -> Inputs:
        return {"pixels": torch.zeros(1, 3 * self.square**2), "positions": torch.zeros(1, 2, dtype=torch.int64)}

    def places(self, inputs: Inputs) -> int:
        return inputs["pixels"].shape[:-1].numel()

    def encode(self, items: Sequence[Inputs]) -> torch.Tensor:
        """Pictures `[places, pixels]`, and clips `[frames, places, pixels]`."""
        pixels, positions = (
            torch.cat([item[name].flatten(0, -2) for item in items]) for name in ("pixels", "positions")
        )
        features: torch.Tensor = self.tower(pixels, positions, return_dict=True).pooler_output
        return features


class RawSound(VisionTower):
    """Sound of at most `max_seconds`, which is what the model was made for; a place is a stretch of raw samples."""

    item_options = SOUND_OPTIONS

    def __init__(self, model: PreTrainedModel, folder: str | None, max_seconds: float = 30.0) -> None:
        super().__init__(model, "model.embed_audio", "model.embed_audio")
        self.samples: int = model.config.audio_config.audio_samples_per_token
        told = preprocessor_settings(folder, "feature_extractor")
        known = {key: told[key] for key in ("sampling_rate", "padding_value") if key in told}
        self.extractor = Gemma4UnifiedAudioFeatureExtractor(
            **known, feature_size=self.samples, audio_samples_per_token=self.samples
        )
        self.rate: int = self.extractor.sampling_rate
        self.max_seconds = max_seconds

    @cached_property
    def per_place(self) -> float:
        tally = Tally()
        tally.run(self.tower, 1)
        return tally.flops

    def measure(self, media: Media) -> Size:
        places = -(-sound_length(media, self.rate, self.max_seconds) // self.samples)
        return Size(places, self.per_place * places, layout=(SOUND_BEGIN, places, SOUND_END))

    def prepare(self, media: Media) -> Inputs:
        sound = read_sound(media, self.rate, self.max_seconds)
        return {"samples": self.extractor([sound], return_tensors="pt")["input_features"][0]}

    def blank(self) -> Inputs:
        return {"samples": torch.zeros(1, self.samples)}

    def places(self, inputs: Inputs) -> int:
        return len(inputs["samples"])

    def encode(self, items: Sequence[Inputs]) -> torch.Tensor:
        features: torch.Tensor = self.tower(torch.cat([item["samples"] for item in items]))
        return features

    def preview(self, media: Media) -> str:
        return media.name


class MelTower(VisionTower):
    """Sound of at most `max_seconds`, which is what the model was made for."""

    item_options = SOUND_OPTIONS

    def __init__(self, model: PreTrainedModel, folder: str | None, max_seconds: float = 30.0) -> None:
        super().__init__(model, "model.audio_tower", "model.embed_audio")
        bins = self.tower.config.subsampling_conv_channels[0]  # the model has no other word for them
        told = preprocessor_settings(folder, "feature_extractor")
        known = {key: told[key] for key in signature(Gemma4AudioFeatureExtractor).parameters if key in told}
        self.extractor = Gemma4AudioFeatureExtractor(**known | {"feature_size": bins})
        self.rate: int = self.extractor.sampling_rate
        self.max_seconds = max_seconds

    def measure(self, media: Media) -> Size:
        samples = sound_length(media, self.rate, self.max_seconds)
        whole = self.extractor.frame_length - self.extractor.frame_length // 2  # half of a frame comes before the first
        frames = max(0, (samples - 1 - whole) // self.extractor.hop_length + 1)
        if not frames:
            raise BadMedia(f"{media.name} is {samples / self.rate:.3f} s long: too short for a single mel frame")
        places = count_places(frames)
        return Size(places, self.per_place * places, layout=(SOUND_BEGIN, places, SOUND_END))

    @cached_property
    def per_place(self) -> float:
        """FLOPs: two convolutions see four frames, layers a place and those just before it."""
        tower, config = self.tower, self.tower.config
        tally, bins = Tally(), self.extractor.feature_size
        first, second = tower.subsample_conv_projection.layer0, tower.subsample_conv_projection.layer1
        tally.multiply(first.conv.weight, 2 * bins // 2)
        tally.multiply(second.conv.weight, bins // 4)
        tally.run(tower.subsample_conv_projection.input_proj_linear, 1)
        tally.run(tower.layers, 1)
        tally.attend(len(tower.layers) * config.attention_context_left, config.hidden_size)
        tally.run(tower.output_proj, 1)
        tally.run(self.projector, 1)
        return tally.flops

    def prepare(self, media: Media) -> Inputs:
        sound = read_sound(media, self.rate, self.max_seconds)
        out = self.extractor([sound], truncation=False, return_tensors="pt")
        return {"mels": out["input_features"][0][out["input_features_mask"][0]]}  # what is padding comes last

    def blank(self) -> Inputs:
        return {"mels": torch.zeros(1, self.extractor.feature_size)}

    def places(self, inputs: Inputs) -> int:
        return count_places(len(inputs["mels"]))

    def encode(self, items: Sequence[Inputs]) -> torch.Tensor:
        """Sounds are padded to the longest; the tower looks back only, and at nothing that is masked."""
        mels = pad_sequence([item["mels"] for item in items], batch_first=True)
        frames = torch.tensor([len(item["mels"]) for item in items])
        mask = (torch.arange(mels.shape[1]) < frames[:, None]).to(mels.device, non_blocking=True)
        out = self.tower(mels, mask, return_dict=True).last_hidden_state
        kept = torch.cat([out[n, : self.places(item)] for n, item in enumerate(items)])
        features: torch.Tensor = self.projector(kept)
        return features

    def preview(self, media: Media) -> str:
        return media.name


def check_places(kind: str, most: int, known: int = PLACES[-1]) -> None:
    allowed = [str(places) for places in PLACES if places <= known]
    if str(most) not in allowed:
        raise UserError(
            f"model.modalities.{kind}.encoder.options: max_soft_tokens is {most}; expected {', '.join(allowed)}"
        )


def fitted(media: Media, height: int, width: int, square: int, places: int, pooled: int) -> tuple[int, int]:
    """The height and width that a picture is resized to, for at most so many places of `pooled` x `pooled` squares."""
    try:
        size: tuple[int, int] = get_aspect_ratio_preserving_size(height, width, square, places * pooled**2, pooled)
    except ValueError as error:
        raise BadMedia(f"{media.name} is {width} x {height} pixels: {error}") from None
    return size


def count_places(frames: int) -> int:
    """Two convolutions of stride 2."""
    return -(-frames // 4)
