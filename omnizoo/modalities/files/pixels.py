"""Conversions between image bytes, model inputs and patches.

They are used by image decoders, and by encoders whose processors accept tensors.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.functional import interpolate

from omnizoo.config.errors import UserError
from omnizoo.modalities.files.decoding import optional
from omnizoo.modalities.files.image import read_image
from omnizoo.modalities.media import Media
from omnizoo.modalities.processor_files import processor_settings

Array = np.ndarray[Any, np.dtype[Any]]
FILTERS = {2: "bilinear", 3: "bicubic"}  # keys: Pillow's filter numbers, as in preprocessor_config.json


@dataclass(frozen=True)
class PixelScale:
    """Converts pixels in 0..255 to model inputs, (pixels * rescale - mean) / std, and back.

    The default range is -1..1.
    """

    rescale: float = 1 / 255
    mean: Sequence[float] = (0.5,)
    std: Sequence[float] = (0.5,)

    @classmethod
    def of(cls, folder: str | None) -> "PixelScale":
        """Return the scale in the image processor settings of a model folder. Missing settings keep their defaults."""
        settings, _ = processor_settings(folder, "image_processor")
        fields = {"rescale": "rescale_factor", "mean": "image_mean", "std": "image_std"}
        known = {field: settings[key] for field, key in fields.items() if key in settings}
        return cls(**known)

    def values(self, pixels: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Convert bytes `[C, H, W]` to floats with the dtype and device of `like`."""
        mean = like.new_tensor(self.mean).view(-1, 1, 1)
        std = like.new_tensor(self.std).view(-1, 1, 1)
        return (pixels.to(like) * self.rescale - mean) / std

    def pixels(self, values: torch.Tensor) -> Array:
        """Convert floats `[C, H, W]` to bytes `[H, W, C]`."""
        mean = values.new_tensor(self.mean).view(-1, 1, 1)
        std = values.new_tensor(self.std).view(-1, 1, 1)
        pixels = ((values * std + mean) / self.rescale).round().clamp(0, 255)
        return pixels.to(torch.uint8).permute(1, 2, 0).cpu().numpy()


def to_patches(values: torch.Tensor, patch: int) -> torch.Tensor:
    """Convert `[*size, C]` to `[patches in raster order, patch**dims * C]`, for any number of dims."""
    *size, channels = values.shape
    dims = len(size)
    split_size: list[int] = []
    for side in size:
        split_size += [side // patch, patch]
    split = values.reshape(*split_size, channels)
    split = split.permute(*range(0, 2 * dims, 2), *range(1, 2 * dims, 2), 2 * dims)
    return split.reshape(-1, patch**dims * channels)


def from_patches(patches: torch.Tensor, grid: Sequence[int], patch: int) -> torch.Tensor:
    """Convert `[patches, patch**dims * C]` to `[*size, C]`, the inverse of `to_patches`."""
    dims = len(grid)
    split = patches.reshape(*grid, *[patch] * dims, -1)
    order: list[int] = []
    for dim in range(dims):
        order += [dim, dims + dim]
    split = split.permute(*order, 2 * dims)
    return split.reshape(*(side * patch for side in grid), -1)


def read_pixels(media: Media, size: Sequence[int], channels: int) -> torch.Tensor:
    """Return the image as bytes `[C, H, W]`, center-cropped to the aspect ratio of `size` and resized to `size`."""
    height, width = size
    fitted = optional("PIL.ImageOps").fit(read_image(media, channels), (width, height))
    return torch.from_numpy(np.atleast_3d(np.array(fitted, np.uint8))).permute(2, 0, 1)


def resize(pixels: torch.Tensor, height: int, width: int, resample: int) -> torch.Tensor:
    """Resize bytes `[C, H, W]` with torch's filters for bytes.

    The result equals that of torchvision on CPU tensors. Compared to Pillow, rounding differs by one level, or by more
    where a sharp filter overshoots black or white.
    """
    if pixels.shape[1:] == (height, width):
        return pixels
    if resample not in FILTERS:
        supported = ", ".join(f"{number} ({name})" for number, name in FILTERS.items())
        raise UserError(f"preprocessor_config.json: resample {resample!r} is not supported. Use {supported}.")
    scaled = interpolate(pixels[None], (height, width), mode=FILTERS[resample], align_corners=False, antialias=True)
    return scaled[0]


def to_pil_image(pixels: Array) -> Any:
    """Convert bytes `[H, W, C]` to a PIL image."""
    if pixels.shape[-1] == 1:
        pixels = pixels.squeeze(-1)
    return optional("PIL.Image").fromarray(pixels)
