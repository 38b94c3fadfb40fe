"""Shared pieces of modalities/test_encoders.py and other tests."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig

from omnizoo.modalities.base import Encoder
from omnizoo.modalities.encoders.audio import AudioEncoder
from omnizoo.modalities.encoders.image import VisionEncoder
from omnizoo.modalities.encoders.video import VideoEncoder
from omnizoo.modalities.media import Media

WIDTH = 24
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
FIXED = SMALL | {"image_size": 32, "patch_size": 8}
QWEN = {"depth": 2, "intermediate_size": 48, "num_heads": 4, "patch_size": 4, "spatial_merge_size": 2}
QWEN |= {"hidden_size": 32, "out_hidden_size": 20}
TEXT = {"hidden_size": 20, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION: dict[str, dict[str, Any]] = {
    "siglip_vision_model": FIXED,
    "clip": {"vision_config": FIXED, "text_config": TEXT},
    "dinov2_with_registers": FIXED,
    "convnext": {"image_size": 64, "hidden_sizes": [8, 8, 8, 16], "depths": [1, 1, 1, 1]},
    "siglip2_vision_model": SMALL | {"patch_size": 8, "num_patches": 16},
    "qwen2_vl": {"vision_config": QWEN | {"embed_dim": 32, "hidden_size": 20}, "text_config": TEXT},
    "qwen2_5_vl_vision": QWEN | {"window_size": 16, "fullatt_block_indexes": [1]},
    "qwen3_vl_vision": QWEN | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
}
WHISPER: dict[str, Any] = {"d_model": 32, "encoder_attention_heads": 4, "encoder_ffn_dim": 48, "encoder_layers": 2}
WHISPER |= {"num_mel_bins": 16, "max_source_positions": 25}
AUDIO: dict[str, dict[str, Any]] = {"whisper": WHISPER | {"decoder_layers": 1}, "qwen2_audio_encoder": WHISPER}


def vision(name: str, cls: type[VisionEncoder] = VisionEncoder, **options: Any) -> VisionEncoder:
    torch.manual_seed(0)
    return cls(WIDTH, config=AutoConfig.for_model(name, **VISION[name]), **options)


def audio(name: str = "whisper", **options: Any) -> AudioEncoder:
    torch.manual_seed(0)
    return AudioEncoder(WIDTH, config=AutoConfig.for_model(name, **AUDIO[name]), **options)


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def picture(value: Any) -> Media:
    return Media("image", value, {})


def tone(rate: int, seconds: float, pitch: float = 440.0) -> np.ndarray:
    return (0.5 * np.sin(2 * np.pi * pitch * np.arange(round(rate * seconds)) / rate)).astype(np.float32)


ENCODERS: dict[str, Callable[[], Encoder]] = {
    "siglip": lambda: vision("siglip_vision_model", projector={"kind": "linear"}),
    "clip": lambda: vision("clip", projector={"kind": "mlp"}),
    "dinov2": lambda: vision("dinov2_with_registers", projector={"kind": "pixel_shuffle", "factor": 3}),
    "convnext": lambda: vision("convnext"),
    "siglip2": lambda: vision("siglip2_vision_model", projector={"kind": "pixel_shuffle"}),
    "qwen2_vl": lambda: vision("qwen2_vl", projector={"kind": "linear"}),
    "qwen2_5_vl": lambda: vision("qwen2_5_vl_vision"),
    "qwen3_vl": lambda: vision("qwen3_vl_vision", projector={"kind": "resampler", "rows": 5}),
    "video of fixed size": lambda: vision("clip", VideoEncoder, fps=2),
    "video as grids": lambda: vision("qwen2_5_vl_vision", VideoEncoder, fps=4, max_pixels=600),
    "video as lists": lambda: vision("siglip2_vision_model", VideoEncoder, projector={"kind": "pixel_shuffle"}),
    "whisper": lambda: audio(),
    "whisper, stacked": lambda: audio(projector={"kind": "pixel_shuffle", "factor": 4}),
    "qwen2_audio": lambda: audio("qwen2_audio_encoder"),
}


def some_media(encoder: Encoder) -> list[Media]:
    if isinstance(encoder, AudioEncoder):
        return [Media("audio", tone(16000, seconds), {}) for seconds in (0.2, 1.3, 0.5, 0.001)]
    if isinstance(encoder, VideoEncoder):
        return [Media("video", noise(frames, 40, 50, 3), {"fps": 4}) for frames in (5, 1, 8)]
    return [picture(noise(*size, 3)) for size in ((40, 33), (90, 30), (40, 33), (16, 16))]
