"""Shared pieces of modalities/test_decoders.py and other tests."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import soundfile
import torch
from PIL import Image
from transformers import AutoConfig, PreTrainedConfig

from omnizoo.modalities.base import Decoder
from omnizoo.modalities.decoders.audio_codec import AudioCodec
from omnizoo.modalities.decoders.flow import FlowHead
from omnizoo.modalities.decoders.image_tokenizers import fit_patch_codebook, save_patch_codebook
from omnizoo.modalities.decoders.image_tokens import ImageCodes
from omnizoo.modalities.media import Media

WIDTH = 24
CONVOLUTIONS = {"embed_dim": 4, "latent_channels": 4, "base_channels": 32, "channel_multiplier": [1, 1]}
CONVOLUTIONS |= {"num_res_blocks": 1}
BLOCKS: dict[str, Any] = {"block_out_channels": [8, 8], "norm_num_groups": 4, "latent_channels": 4}
BLOCKS |= {"down_block_types": ["DownEncoderBlock2D"] * 2, "up_block_types": ["UpDecoderBlock2D"] * 2}
CODEC = {"codebook_size": 16, "sampling_rate": 8000}
SEANET = {"num_filters": 4, "hidden_size": 16, "upsampling_ratios": [4, 2]}
CONFIGS: dict[str, dict[str, Any]] = {
    "chameleon_vqgan": {**CONVOLUTIONS, "num_embeddings": 16, "resolution": 16},
    "janus_vqgan": {**CONVOLUTIONS, "num_embeddings": 16, "num_patches": 8},
    "emu3_vqgan": {**CONVOLUTIONS, "codebook_size": 16, "attn_resolutions": [], "temporal_downsample_factor": 1}
    | {"hidden_size": 32},
    "encodec": {**CODEC, **SEANET, "num_lstm_layers": 1, "target_bandwidths": [4.0, 16.0]},
    "dac": {**CODEC, "encoder_hidden_size": 4, "decoder_hidden_size": 16, "downsampling_ratios": [2, 4]}
    | {"n_codebooks": 4, "codebook_dim": 4},
    "mimi": {**CODEC, **SEANET, "codebook_dim": 8, "vector_quantization_hidden_dimension": 8, "num_quantizers": 4}
    | {"num_hidden_layers": 1, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    | {"upsample_groups": 16},
}
PICTURES = ("chameleon_vqgan", "janus_vqgan", "emu3_vqgan")
CODECS = ("encodec", "dac", "mimi")


def config(name: str) -> PreTrainedConfig:
    return AutoConfig.for_model(name, **CONFIGS[name])


def picture(seed: int, *size: int) -> Media:
    pixels = np.random.default_rng(seed).integers(0, 256, size or (16, 16, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return Media("image", file.getvalue(), {}, seed)


def sound(seed: int, samples: int = 90) -> Media:
    file = io.BytesIO()
    soundfile.write(file, np.random.default_rng(seed).uniform(-1, 1, samples), 8000, format="WAV")
    return Media("audio", file.getvalue(), {}, seed)


def digits(folder: Path) -> str:
    """A codebook of 2 x 2 patches for pictures of 8 x 8."""
    images = [np.asarray(Image.open(io.BytesIO(picture(i, 8, 8).value))) // 64 * 64 for i in range(20)]
    save_patch_codebook(folder, fit_patch_codebook(images, 2, 32, seed=0), 2, 8)
    return str(folder)


def saved(model_class: Any, folder: Path, **changes: Any) -> str:
    torch.manual_seed(1)
    model_class(**BLOCKS, sample_size=16, **changes).save_pretrained(folder)
    return str(folder)


FOLDERS: dict[str, Callable[[Path], str]] = {
    "vq of diffusers": lambda folder: saved(diffusers.VQModel, folder, num_vq_embeddings=16),
    "patches": digits,
    "flow of latents": lambda folder: saved(diffusers.AutoencoderKL, folder),
}
SMALL = {"hidden": 16, "layers": 1, "steps": 2}
MAKERS: dict[str, Callable[[str | None], Decoder]] = {
    **{name: lambda folder, name=name: ImageCodes(WIDTH, config(name), size=16) for name in PICTURES},
    "vq of diffusers": lambda folder: ImageCodes(WIDTH, folder=folder),
    "patches": lambda folder: ImageCodes(WIDTH, folder=folder, head="mlp"),
    **{name: lambda folder, name=name: AudioCodec(WIDTH, config(name), codebooks=3) for name in CODECS},
    "one codebook": lambda folder: AudioCodec(WIDTH, config("dac"), codebooks=1),
    "flow of pixels": lambda folder: FlowHead(WIDTH, size=[8, 4], patch=2, **SMALL),
    "flow of latents": lambda folder: FlowHead(WIDTH, size=16, folder=folder, patch=2, **SMALL),
    "flow of a series": lambda folder: FlowHead(WIDTH, size=[6], patch=3, channels=2, **SMALL),
}


def item(name: str, seed: int) -> Media:
    if name == "flow of a series":
        return Media("series", np.random.default_rng(seed).normal(size=(6, 2)).tolist(), {}, seed)
    if name in CODECS or name == "one codebook":
        return sound(seed)
    return picture(seed, *((8, 8) if name == "patches" else (16, 16, 3)))
