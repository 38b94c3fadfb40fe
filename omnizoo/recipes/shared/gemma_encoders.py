"""Image and audio encoders of Gemma 3 and 4.

Gemma 3 encodes square tiles. Gemma 4 encodes patches of images of any shape and pools them into placeholder tokens;
four mel frames of audio become one placeholder token. Models without towers (12B, "unified") project raw pixels or raw
audio samples to placeholder tokens.

The submodules of Gemma 4's image tower are called one by one. Its own `forward` expects images padded to one length. It
selects their tokens by a mask, and this causes a host sync.
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
from omnizoo.recipes.shared.image_encoders import PatchEncoder, TileEncoder
from omnizoo.recipes.shared.tensor_images import BICUBIC, TensorImageProcessor

BEGIN, END = "<|image>", "<image|>"
AUDIO_BEGIN, AUDIO_END = "<|audio>", "<audio|>"
RAW = {"max_soft_tokens": 280, "resample": BICUBIC, "do_normalize": False, "image_mean": [0.0], "image_std": [1.0]}
CROP_BEGIN, CROP_END = "\n\n<start_of_image>", "<end_of_image>\n\n"
# Values that the processor of Gemma 3 uses if the folder does not set them.
SCANNING = {
    "pan_and_scan_min_crop_size": 256,
    "pan_and_scan_max_num_crops": 4,
    "pan_and_scan_min_ratio_to_activate": 1.2,
}
SOFT_TOKENS = (70, 140, 280, 560, 1120)  # numbers of placeholder tokens per image that the model was trained with


class PanAndScanEncoder(TileEncoder):
    """Image encoder of Gemma 3, with optional pan and scan.

    With `pan_and_scan`, an elongated image is encoded as a whole and then as crops. If `pan_and_scan` is None, the
    setting of the folder's preprocessor is used.
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
            processor=processor,
            edge=edge,
            patches=patches,
            placeholders=config.mm_tokens_per_image,
        )

    def tiles(self, height: int, width: int) -> int:
        if not self.processor.do_pan_and_scan:
            return 1
        empty = np.broadcast_to(np.uint8(0), (3, height, width))  # `pan_and_scan` reads only the shape
        return 1 + len(self.processor.pan_and_scan(empty, **self.scanning))

    def layout(self, tiles: int) -> tuple[str | int, ...]:
        tile = (CROP_BEGIN, self.tile_placeholders, CROP_END)
        if tiles == 1:
            return tile
        crops: list[str | int] = [" ", *tile] * (tiles - 1)
        return ("Here is the original image ", *tile, " and here are some crops to help you see better ", *crops[1:])


class SoftTokenEncoder(PatchEncoder):
    """Base class of encoders for images with a limited number of placeholder tokens (`max_soft_tokens`)."""

    kind: ClassVar[str] = "image"
    square: int  # side of a patch, in pixels
    pooled: int = 1  # side of the square that a placeholder token covers, in patches
    max_soft_tokens: int

    def fitted(self, media: Media, height: int, width: int) -> tuple[int, int]:
        """Return the height and width that an image is resized to."""
        patches = self.max_soft_tokens * self.pooled**2
        try:
            size: tuple[int, int] = get_aspect_ratio_preserving_size(height, width, self.square, patches, self.pooled)
        except ValueError as error:
            raise BadMedia(f"{media.name}: an image of {width} x {height} pixels cannot be resized: {error}") from None
        return size

    def frame_size(self, height: int, width: int) -> MediaSize:
        """Return the size of a fitted image."""
        placeholders = height * width // (self.square * self.pooled) ** 2
        return self.size_of(placeholders * self.pooled**2, placeholders, (BEGIN, placeholders, END))

    def measure(self, media: Media) -> MediaSize:
        height, width = image_size(media)
        fitted_height, fitted_width = self.fitted(media, height, width)
        return self.frame_size(fitted_height, fitted_width)

    def dummy_input(self) -> Inputs:
        edge = torch.arange(self.pooled)
        return {
            "pixels": torch.zeros(self.pooled**2, 3 * self.square**2),
            "positions": torch.cartesian_prod(edge, edge).flip(1),
        }

    def count_placeholders(self, inputs: Inputs) -> int:
        return inputs["pixels"].shape[:-1].numel() // self.pooled**2


class PooledImageEncoder(SoftTokenEncoder):
    """Image encoder of Gemma 4 models with a tower.

    An image has at most `max_soft_tokens` placeholder tokens. If `max_soft_tokens` is None, the folder's preprocessor
    config sets the limit.
    """

    def __init__(self, model: PreTrainedModel, folder: str | None, max_soft_tokens: int | None = None) -> None:
        super().__init__(model, "model.vision_tower", "model.embed_vision")
        if max_soft_tokens is not None:
            check_soft_tokens(self.kind, max_soft_tokens)
        config: Any = model.config
        self.square = config.vision_config.patch_size
        self.pooled = config.vision_config.pooling_kernel_size
        self.processor = load_processor(
            Gemma4ImageProcessorPil,
            folder,
            {},
            patch_size=self.square,
            pooling_kernel_size=self.pooled,
            max_soft_tokens=max_soft_tokens,
        )
        self.max_soft_tokens = self.processor.max_soft_tokens

    def tower_work(self) -> TowerFlops:
        """Return the FLOPs of the tower, corrected for the position table and the pooling.

        The position table is a lookup, not a matmul. Pooling multiplies the patches of an image by a constant matrix
        `[placeholder tokens, patches]` without gradient.
        """
        work = TowerFlops.of(self.tower)
        with_table = FlopCounter()
        with_table.run(self.tower.patch_embedder, 1)
        without_table = FlopCounter()
        without_table.run(self.tower.patch_embedder.input_proj, 1)
        per_token = work.per_token + without_table.flops - with_table.flops
        pooling = 2 * self.tower.config.hidden_size / self.pooled**2 * (1 + work.trained)
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
        pixels = torch.cat([item["pixels"].flatten(0, -2) for item in items])[None]
        positions = torch.cat([item["positions"].flatten(0, -2) for item in items])[None]
        is_padding = torch.zeros(positions.shape[:2], dtype=torch.bool, device=pixels.device)

        embedded = tower.patch_embedder(pixels, positions, is_padding)
        mask, attention_inputs = self.attention_inputs(lengths, pixels.device)
        hidden = tower.encoder(embedded, mask, positions, **attention_inputs).last_hidden_state

        states = hidden.split(lengths, 1)
        by_frame = zip(states, positions.split(lengths, 1), is_padding.split(lengths, 1), strict=True)
        pooled_frames = []
        for frame_states, frame_positions, frame_padding in by_frame:
            num_placeholders = frame_states.shape[1] // self.pooled**2
            output = tower.pooler(frame_states, frame_positions, frame_padding, num_placeholders)
            pooled_frames.append(output[0][0])
        pooled = torch.cat(pooled_frames)
        if tower.config.standardize:
            pooled = (pooled - tower.std_bias.float()) * tower.std_scale.float()
        features: torch.Tensor = self.projector(pooled.to(states[0].dtype))
        return features

    def attention_inputs(
        self, lengths: Sequence[int], device: torch.device
    ) -> tuple[torch.Tensor | None, dict[str, Any]]:
        """Return the attention mask and the keyword arguments that limit attention to each frame."""
        if self.is_packed:
            ends = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32).to(device, non_blocking=True)
            return None, {"cu_seq_lens_q": ends, "max_length_q": max(lengths)}
        frame_numbers = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).to(device)
        is_same_frame = frame_numbers[:, None] == frame_numbers
        return is_same_frame[None, None], {}


class RawImageEncoder(SoftTokenEncoder):
    """Image encoder of Gemma 4 models without a tower: a placeholder token is a square of pixels.

    An image has at most `max_soft_tokens` placeholder tokens. If `max_soft_tokens` is None, the folder's preprocessor
    config sets the limit. The processor of transformers needs torchvision, so `TensorImageProcessor` replaces it.
    """

    packs_items = False

    def __init__(self, model: PreTrainedModel, folder: str | None, max_soft_tokens: int | None = None) -> None:
        super().__init__(model, "model.embed_vision", "model.embed_vision.multimodal_embedder")
        config: Any = model.config.vision_config
        self.square = config.model_patch_size
        self.processor = TensorImageProcessor(folder, RAW, max_soft_tokens=max_soft_tokens)
        self.max_soft_tokens = self.processor.settings["max_soft_tokens"]
        check_soft_tokens(self.kind, self.max_soft_tokens, config.mm_posemb_size)

    @cached_property
    def per_placeholder(self) -> float:
        """FLOPs of one placeholder token."""
        counter = FlopCounter()
        counter.run(self.tower.patch_ln1, 1)  # if it is trained, the modules after it must propagate gradients
        counter.run(self.tower.patch_dense, 1)
        counter.run(self.projector, 1)
        return counter.flops

    def size_of(self, patches: int, placeholders: int, layout: tuple[str | int, ...]) -> MediaSize:
        return MediaSize(placeholders, self.per_placeholder * placeholders, layout=layout)

    def prepare(self, media: Media) -> Inputs:
        pixels = self.processor.read(media)
        height, width = self.fitted(media, *pixels.shape[1:])
        return image_patches(self.processor, pixels, height, width, self.square)

    def encode(self, items: Sequence[Inputs]) -> torch.Tensor:
        """Encode images `[placeholders, values]` and videos `[frames, placeholders, values]`."""
        pixels = torch.cat([item["pixels"].flatten(0, -2) for item in items])
        positions = torch.cat([item["positions"].flatten(0, -2) for item in items])
        features: torch.Tensor = self.tower(pixels, positions, return_dict=True).pooler_output
        return features


class RawAudioEncoder(AudioTowerEncoder):
    """Audio encoder of Gemma 4 models without a tower: a placeholder token is a segment of raw samples.

    Audio is limited to `max_seconds`. The default is the length that the model was trained with.
    """

    def __init__(self, model: PreTrainedModel, folder: str | None, max_seconds: float = 30.0) -> None:
        super().__init__(model, "model.embed_audio", "model.embed_audio")
        self.samples: int = model.config.audio_config.audio_samples_per_token  # samples of a placeholder token
        self.extractor = load_processor(
            Gemma4UnifiedAudioFeatureExtractor,
            folder,
            {},
            feature_size=self.samples,
            audio_samples_per_token=self.samples,
        )
        self.max_seconds = max_seconds

    @cached_property
    def per_placeholder(self) -> float:
        """FLOPs of one placeholder token."""
        counter = FlopCounter()
        counter.run(self.tower, 1)
        return counter.flops

    def measure(self, media: Media) -> MediaSize:
        placeholders = -(-self.num_samples(media) // self.samples)
        cost = self.per_placeholder * placeholders
        return MediaSize(placeholders, cost, layout=(AUDIO_BEGIN, placeholders, AUDIO_END))

    def prepare(self, media: Media) -> Inputs:
        samples = self.read_samples(media)
        return {"samples": self.extractor([samples], return_tensors="pt")["input_features"][0]}

    def dummy_input(self) -> Inputs:
        return {"samples": torch.zeros(1, self.samples)}

    def count_placeholders(self, inputs: Inputs) -> int:
        return len(inputs["samples"])

    def encode(self, items: Sequence[Inputs]) -> torch.Tensor:
        features: torch.Tensor = self.tower(torch.cat([item["samples"] for item in items]))
        return features


class MelAudioEncoder(AudioTowerEncoder):
    """Audio encoder of Gemma 4 models with a tower.

    Audio is limited to `max_seconds`. The default is the length that the model was trained with.
    """

    def __init__(self, model: PreTrainedModel, folder: str | None, max_seconds: float = 30.0) -> None:
        super().__init__(model, "model.audio_tower", "model.embed_audio")
        # This is also the number of mel bins, for which the config has no separate field.
        bins = self.tower.config.subsampling_conv_channels[0]
        self.extractor = load_processor(Gemma4AudioFeatureExtractor, folder, {}, feature_size=bins)
        self.max_seconds = max_seconds

    def measure(self, media: Media) -> MediaSize:
        samples = self.num_samples(media)
        # Half a frame of padding precedes the first sample.
        first_frame_end = self.extractor.frame_length - self.extractor.frame_length // 2
        frames = max(0, (samples - 1 - first_frame_end) // self.extractor.hop_length + 1)
        if not frames:
            raise BadMedia(f"{media.name}: the audio of {samples / self.rate:.3f} s is too short for a mel frame")
        placeholders = count_audio_placeholders(frames)
        cost = self.per_placeholder * placeholders
        return MediaSize(placeholders, cost, layout=(AUDIO_BEGIN, placeholders, AUDIO_END))

    @cached_property
    def per_placeholder(self) -> float:
        """FLOPs of one placeholder token.

        The two convolutions process the four frames of the token. In the layers, the token attends to itself and to the
        tokens just before it.
        """
        tower = self.tower
        convolutions = tower.subsample_conv_projection
        bins = self.extractor.feature_size
        counter = FlopCounter()
        counter.multiply(convolutions.layer0.conv.weight, 2 * bins // 2)
        counter.multiply(convolutions.layer1.conv.weight, bins // 4)
        counter.run(convolutions.input_proj_linear, 1)
        counter.run(tower.layers, 1)
        counter.attend(len(tower.layers) * tower.config.attention_context_left, tower.config.hidden_size)
        counter.run(tower.output_proj, 1)
        counter.run(self.projector, 1)
        return counter.flops

    def prepare(self, media: Media) -> Inputs:
        samples = self.read_samples(media)
        out = self.extractor([samples], truncation=False, return_tensors="pt")
        is_audio = out["input_features_mask"][0]  # False for padding; padding comes last
        return {"mels": out["input_features"][0][is_audio]}

    def dummy_input(self) -> Inputs:
        return {"mels": torch.zeros(1, self.extractor.feature_size)}

    def count_placeholders(self, inputs: Inputs) -> int:
        return count_audio_placeholders(len(inputs["mels"]))

    def encode(self, items: Sequence[Inputs]) -> torch.Tensor:
        """Encode audio clips, padded to the longest one.

        In the tower, frames attend only to earlier, unmasked frames, so padding does not change the features.
        """
        mels = pad_sequence([item["mels"] for item in items], batch_first=True)
        frames = torch.tensor([len(item["mels"]) for item in items])
        mask = (torch.arange(mels.shape[1]) < frames[:, None]).to(mels.device, non_blocking=True)
        out = self.tower(mels, mask, return_dict=True).last_hidden_state
        unpadded = [out[n, : self.count_placeholders(item)] for n, item in enumerate(items)]
        features: torch.Tensor = self.projector(torch.cat(unpadded))
        return features


def image_patches(
    processor: TensorImageProcessor, pixels: torch.Tensor, height: int, width: int, square: int
) -> Inputs:
    """Resize bytes `[3, H, W]` and cut them into squares. Positions are (column, row)."""
    values = processor.values(processor.resize(pixels, height, width))
    rows, columns = torch.arange(height // square), torch.arange(width // square)
    return {
        "pixels": to_patches(values.permute(1, 2, 0), square),
        "positions": torch.cartesian_prod(rows, columns).flip(1),
    }


def check_soft_tokens(kind: str, max_soft_tokens: int, position_limit: int = SOFT_TOKENS[-1]) -> None:
    """Raise a `UserError` if the model was not trained with `max_soft_tokens`, or has too few positions."""
    allowed = [str(count) for count in SOFT_TOKENS if count <= position_limit]
    if str(max_soft_tokens) not in allowed:
        key = f"model.modalities.{kind}.encoder.options"
        raise UserError(f"{key}: max_soft_tokens is {max_soft_tokens}. Use one of {', '.join(allowed)}.")


def count_audio_placeholders(frames: int) -> int:
    """Return the number of placeholder tokens for `frames`, after two convolutions of stride 2."""
    return -(-frames // 4)
