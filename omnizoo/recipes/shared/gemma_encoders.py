"""Encoders for images and audio of Gemma 3 and 4.

Gemma 3 encodes square tiles. Gemma 4 encodes patches of images of any shape and pools them into placeholder tokens;
four mel frames of audio become one placeholder token. Models without towers (12B, "unified") project raw pixels or raw
audio samples to placeholder tokens.

The submodules of Gemma 4's image tower are called one by one. Its own `forward` expects images padded to one length and
selects their tokens by a mask, which causes a host sync.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor
from transformers.models.gemma4.image_processing_pil_gemma4 import (
    Gemma4ImageProcessorPil,
    get_aspect_ratio_preserving_size,
)
from transformers.models.gemma4_unified.feature_extraction_gemma4_unified import Gemma4UnifiedAudioFeatureExtractor

from omnizoo.config.errors import UserError
from omnizoo.modalities.encoders.tower import TowerFlops
from omnizoo.modalities.files.image import image_size, read_image
from omnizoo.modalities.files.pixels import to_patches
from omnizoo.modalities.flop_count import FlopCounter
from omnizoo.modalities.item import Inputs, MediaSize
from omnizoo.modalities.media import BadMedia, Media
from omnizoo.recipes.shared.encoders import AudioTowerEncoder, load_processor
from omnizoo.recipes.shared.image_encoders import PatchTower, TileTower
from omnizoo.recipes.shared.tensor_images import BICUBIC, TensorPictures

BEGIN, END = "<|image>", "<image|>"
SOUND_BEGIN, SOUND_END = "<|audio>", "<audio|>"
RAW = {"max_soft_tokens": 280, "resample": BICUBIC, "do_normalize": False, "image_mean": [0.0], "image_std": [1.0]}
CROP_BEGIN, CROP_END = "\n\n<start_of_image>", "<end_of_image>\n\n"
# Values that the processor of Gemma 3 uses if the folder does not set them.
SCANNING = {
    "pan_and_scan_min_crop_size": 256,
    "pan_and_scan_max_num_crops": 4,
    "pan_and_scan_min_ratio_to_activate": 1.2,
}
PLACES = (70, 140, 280, 560, 1120)  # numbers of placeholder tokens per image that the model was trained with


class PanTower(TileTower):
    """Image encoder of Gemma 3, with optional pan and scan.

    With `pan_and_scan`, a long image is encoded as a whole and then as crops. None uses the setting of the folder's
    preprocessor.
    """

    def __init__(self, model: PreTrainedModel, folder: str | None, pan_and_scan: bool | None = None) -> None:
        config: Any = model.config
        edge = config.vision_config.image_size
        processor = load_processor(
            Gemma3ImageProcessorPil, folder, {}, size={"height": edge, "width": edge}, do_pan_and_scan=pan_and_scan
        )
        self.scanning = {key: getattr(processor, key) or value for key, value in SCANNING.items()}
        for key, value in self.scanning.items():
            setattr(processor, key, value)
        patches = (edge // config.vision_config.patch_size) ** 2
        super().__init__(
            model,
            "model.vision_tower",
            "model.multi_modal_projector",
            processor,
            edge,
            patches,
            config.mm_tokens_per_image,
        )

    def tiles(self, height: int, width: int) -> int:
        if not self.processor.do_pan_and_scan:
            return 1
        empty = np.broadcast_to(np.uint8(0), (3, height, width))  # `pan_and_scan` reads only the shape
        return 1 + len(self.processor.pan_and_scan(empty, **self.scanning))

    def layout(self, tiles: int) -> tuple[str | int, ...]:
        whole = (CROP_BEGIN, self.each, CROP_END)
        if tiles == 1:
            return whole
        crops = [part for _ in range(tiles - 1) for part in (" ", *whole)][1:]
        return ("Here is the original image ", *whole, " and here are some crops to help you see better ", *crops)


class SoftTokenTower(PatchTower):
    """Base class for images of at most `most` placeholder tokens of `pooled` x `pooled` patches of `square` pixels."""

    kind: ClassVar[str] = "image"
    square: int
    pooled: int = 1
    most: int

    def fitted(self, media: Media, height: int, width: int) -> tuple[int, int]:
        """Return the height and width that an image is resized to."""
        patches = self.most * self.pooled**2
        try:
            size: tuple[int, int] = get_aspect_ratio_preserving_size(height, width, self.square, patches, self.pooled)
        except ValueError as error:
            raise BadMedia(f"{media.name} is {width} x {height} pixels: {error}") from None
        return size

    def frame_size(self, height: int, width: int) -> MediaSize:
        """Return the size of a fitted image."""
        places = height * width // (self.square * self.pooled) ** 2
        return self.size_of(places * self.pooled**2, places, (BEGIN, places, END))

    def measure(self, media: Media) -> MediaSize:
        return self.frame_size(*self.fitted(media, *image_size(media)))

    def dummy_input(self) -> Inputs:
        edge = torch.arange(self.pooled)
        return {
            "pixels": torch.zeros(self.pooled**2, 3 * self.square**2),
            "positions": torch.cartesian_prod(edge, edge).flip(1),
        }

    def count_placeholders(self, inputs: Inputs) -> int:
        return inputs["pixels"].shape[:-1].numel() // self.pooled**2


class PoolTower(SoftTokenTower):
    """Image encoder of Gemma 4 models with a tower.

    An image has at most `max_soft_tokens` placeholder tokens. None uses the setting of the folder's preprocessor.
    """

    def __init__(self, model: PreTrainedModel, folder: str | None, max_soft_tokens: int | None = None) -> None:
        super().__init__(model, "model.vision_tower", "model.embed_vision")
        if max_soft_tokens is not None:
            check_places(self.kind, max_soft_tokens)
        config: Any = model.config
        self.square: int = config.vision_config.patch_size  # patch size in pixels
        self.pooled: int = config.vision_config.pooling_kernel_size  # edge of a placeholder token's square, in patches
        self.processor = load_processor(
            Gemma4ImageProcessorPil,
            folder,
            {},
            patch_size=self.square,
            pooling_kernel_size=self.pooled,
            max_soft_tokens=max_soft_tokens,
        )
        self.most: int = self.processor.max_soft_tokens

    def tower_work(self) -> TowerFlops:
        """Return the FLOPs of the tower, corrected for the position table and the pooling.

        The table of positions is looked up, not multiplied. Pooling is a matmul of all placeholder tokens with all
        patches of an image, with constant weights that need no gradient.
        """
        work, embedder = TowerFlops.of(self.tower), self.tower.patch_embedder
        counted, right = FlopCounter(), FlopCounter()
        counted.run(embedder, 1)
        right.run(embedder.input_proj, 1)
        pooling = 2 * self.tower.config.hidden_size / self.pooled**2 * (1 + work.trained)
        per_token = work.per_token + right.flops - counted.flops
        return replace(work, per_token=per_token, per_pair=work.per_pair + pooling)

    def prepare(self, media: Media) -> Inputs:
        out = self.processor(images=read_image(media), return_tensors="pt")
        count = int(out["num_soft_tokens_per_image"][0]) * self.pooled**2  # patches, without the padding at the end
        return {
            "pixels": out["pixel_values"][0, :count].clone(),
            "positions": out["image_position_ids"][0, :count].clone(),
        }

    def encode(self, items: Sequence[Inputs]) -> torch.Tensor:
        """Encode images `[patches, values]` and videos `[frames, patches, values]`.

        Frames of a video do not attend to each other.
        """
        tower = self.tower
        shapes = [(1, *item["pixels"].shape)[-3:-1] for item in items]
        lengths = [patches for frames, patches in shapes for _ in range(frames)]
        pixels, positions = (
            torch.cat([item[name].flatten(0, -2) for item in items])[None] for name in ("pixels", "positions")
        )
        # Padding mask: False everywhere.
        nothing = torch.zeros(positions.shape[:2], dtype=torch.bool, device=pixels.device)
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


class RawPatches(SoftTokenTower):
    """Image encoder of Gemma 4 models without a tower: a placeholder token is a square of pixels.

    An image has at most `max_soft_tokens` placeholder tokens. None uses the setting of the folder's preprocessor. The
    processor of transformers takes tensors and needs torchvision, so `TensorPictures` replaces it.
    """

    packs_items = False

    def __init__(self, model: PreTrainedModel, folder: str | None, max_soft_tokens: int | None = None) -> None:
        super().__init__(model, "model.embed_vision", "model.embed_vision.multimodal_embedder")
        config: Any = model.config.vision_config
        self.square: int = config.model_patch_size
        self.processor = TensorPictures(folder, RAW, max_soft_tokens=max_soft_tokens)
        self.most: int = self.processor.settings["max_soft_tokens"]
        check_places(self.kind, self.most, config.mm_posemb_size)

    @cached_property
    def per_place(self) -> float:
        tally = FlopCounter()
        tally.run(self.tower.patch_ln1, 1)  # gradients flow back to it if it is trained
        tally.run(self.tower.patch_dense, 1)
        tally.run(self.projector, 1)
        return tally.flops

    def size_of(self, patches: int, places: int, layout: tuple[str | int, ...]) -> MediaSize:
        return MediaSize(places, self.per_place * places, layout=layout)

    def prepare(self, media: Media) -> Inputs:
        pixels = self.processor.read(media)
        height, width = self.fitted(media, *pixels.shape[1:])
        return patches_of(self.processor, pixels, height, width, self.square)

    def encode(self, items: Sequence[Inputs]) -> torch.Tensor:
        """Encode images `[placeholders, values]` and videos `[frames, placeholders, values]`."""
        pixels, positions = (
            torch.cat([item[name].flatten(0, -2) for item in items]) for name in ("pixels", "positions")
        )
        features: torch.Tensor = self.tower(pixels, positions, return_dict=True).pooler_output
        return features


class RawSound(AudioTowerEncoder):
    """Audio encoder of Gemma 4 models without a tower: a placeholder token is a segment of raw samples.

    Audio is limited to `max_seconds`. The default is the length that the model was trained with.
    """

    def __init__(self, model: PreTrainedModel, folder: str | None, max_seconds: float = 30.0) -> None:
        super().__init__(model, "model.embed_audio", "model.embed_audio")
        self.samples: int = model.config.audio_config.audio_samples_per_token
        self.extractor = load_processor(
            Gemma4UnifiedAudioFeatureExtractor,
            folder,
            {},
            feature_size=self.samples,
            audio_samples_per_token=self.samples,
        )
        self.max_seconds = max_seconds

    @cached_property
    def per_place(self) -> float:
        tally = FlopCounter()
        tally.run(self.tower, 1)
        return tally.flops

    def measure(self, media: Media) -> MediaSize:
        places = -(-self.num_samples(media) // self.samples)
        return MediaSize(places, self.per_place * places, layout=(SOUND_BEGIN, places, SOUND_END))

    def prepare(self, media: Media) -> Inputs:
        sound = self.read_samples(media)
        return {"samples": self.extractor([sound], return_tensors="pt")["input_features"][0]}

    def dummy_input(self) -> Inputs:
        return {"samples": torch.zeros(1, self.samples)}

    def count_placeholders(self, inputs: Inputs) -> int:
        return len(inputs["samples"])

    def encode(self, items: Sequence[Inputs]) -> torch.Tensor:
        features: torch.Tensor = self.tower(torch.cat([item["samples"] for item in items]))
        return features


class MelTower(AudioTowerEncoder):
    """Audio encoder of Gemma 4 models with a tower.

    Audio is limited to `max_seconds`. The default is the length that the model was trained with.
    """

    def __init__(self, model: PreTrainedModel, folder: str | None, max_seconds: float = 30.0) -> None:
        super().__init__(model, "model.audio_tower", "model.embed_audio")
        # The number of mel bins, for which the config has no other field.
        bins = self.tower.config.subsampling_conv_channels[0]
        self.extractor = load_processor(Gemma4AudioFeatureExtractor, folder, {}, feature_size=bins)
        self.max_seconds = max_seconds

    def measure(self, media: Media) -> MediaSize:
        samples = self.num_samples(media)
        # Half a frame of padding precedes the first sample.
        whole = self.extractor.frame_length - self.extractor.frame_length // 2
        frames = max(0, (samples - 1 - whole) // self.extractor.hop_length + 1)
        if not frames:
            raise BadMedia(f"{media.name} is {samples / self.rate:.3f} s long: too short for a single mel frame")
        places = count_places(frames)
        return MediaSize(places, self.per_place * places, layout=(SOUND_BEGIN, places, SOUND_END))

    @cached_property
    def per_place(self) -> float:
        """FLOPs of one placeholder token.

        The two convolutions process its four frames. In the layers it attends to itself and to the tokens just before
        it.
        """
        tower, config = self.tower, self.tower.config
        tally, bins = FlopCounter(), self.extractor.feature_size
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
        sound = self.read_samples(media)
        out = self.extractor([sound], truncation=False, return_tensors="pt")
        return {"mels": out["input_features"][0][out["input_features_mask"][0]]}  # without padding, which comes last

    def dummy_input(self) -> Inputs:
        return {"mels": torch.zeros(1, self.extractor.feature_size)}

    def count_placeholders(self, inputs: Inputs) -> int:
        return count_places(len(inputs["mels"]))

    def encode(self, items: Sequence[Inputs]) -> torch.Tensor:
        """Encode audio clips, padded to the longest one.

        The tower attends only backwards and not to masked frames, so padding does not change the features.
        """
        mels = pad_sequence([item["mels"] for item in items], batch_first=True)
        frames = torch.tensor([len(item["mels"]) for item in items])
        mask = (torch.arange(mels.shape[1]) < frames[:, None]).to(mels.device, non_blocking=True)
        out = self.tower(mels, mask, return_dict=True).last_hidden_state
        kept = torch.cat([out[n, : self.count_placeholders(item)] for n, item in enumerate(items)])
        features: torch.Tensor = self.projector(kept)
        return features


def patches_of(processor: TensorPictures, pixels: torch.Tensor, height: int, width: int, square: int) -> Inputs:
    """Resize bytes `[3, H, W]` and cut them into squares. Positions are (column, row)."""
    values = processor.values(processor.resize(pixels, height, width))
    rows, columns = torch.arange(height // square), torch.arange(width // square)
    return {
        "pixels": to_patches(values.permute(1, 2, 0), square),
        "positions": torch.cartesian_prod(rows, columns).flip(1),
    }


def check_places(kind: str, most: int, known: int = PLACES[-1]) -> None:
    allowed = [str(places) for places in PLACES if places <= known]
    if str(most) not in allowed:
        raise UserError(
            f"model.modalities.{kind}.encoder.options: max_soft_tokens is {most}; expected {', '.join(allowed)}"
        )


def count_places(frames: int) -> int:
    """Return the number of placeholder tokens for `frames`, after two convolutions of stride 2."""
    return -(-frames // 4)
