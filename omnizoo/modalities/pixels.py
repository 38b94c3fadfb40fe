"""Between a picture's bytes, the values a model takes, and patches: what decoders of pictures share, and encoders whose
processors take tensors."""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.functional import interpolate

from omnizoo.config.errors import UserError
from omnizoo.modalities.files import optional, read_picture
from omnizoo.modalities.item import Media
from omnizoo.modalities.tower import preprocessor_settings

Array = np.ndarray[Any, np.dtype[Any]]
FILTERS = {2: "bilinear", 3: "bicubic"}  # by Pillow's numbers, which published settings have


@dataclass(frozen=True)
class PixelScale:
    """Pixels 0..255 <-> what a model takes: (pixels * rescale - mean) / std. By default -1..1."""

    rescale: float = 1 / 255
    mean: Sequence[float] = (0.5,)
    std: Sequence[float] = (0.5,)

    @classmethod
    def of(cls, folder: str | None) -> "PixelScale":
        """As the model was fed that is in the folder, if it says so."""
        settings = preprocessor_settings(folder, "image_processor")
        fields = {"rescale": "rescale_factor", "mean": "image_mean", "std": "image_std"}
        return cls(**{field: settings[key] for field, key in fields.items() if key in settings})

    def values(self, pixels: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """`[C, H, W]` bytes -> floats with the dtype and device of `like`."""
        mean, std = (like.new_tensor(x).view(-1, 1, 1) for x in (self.mean, self.std))
        return (pixels.to(like) * self.rescale - mean) / std

    def pixels(self, values: torch.Tensor) -> Array:
        """`[C, H, W]` floats -> `[H, W, C]` bytes."""
        mean, std = (values.new_tensor(x).view(-1, 1, 1) for x in (self.mean, self.std))
        pixels = ((values * std + mean) / self.rescale).round().clamp(0, 255)
        return pixels.to(torch.uint8).permute(1, 2, 0).cpu().numpy()


def to_patches(values: torch.Tensor, patch: int) -> torch.Tensor:
    """`[*size, C]` -> `[patches in raster order, patch**dims * C]`, for any number of dims."""
    *size, channels = values.shape
    split = values.reshape(*(part for side in size for part in (side // patch, patch)), channels)
    dims = len(size)
    split = split.permute(*range(0, 2 * dims, 2), *range(1, 2 * dims, 2), 2 * dims)
    return split.reshape(-1, patch**dims * channels)


def from_patches(patches: torch.Tensor, grid: Sequence[int], patch: int) -> torch.Tensor:
    """The inverse: `[patches, patch**dims * C]` -> `[*size, C]`."""
    dims = len(grid)
    split = patches.reshape(*grid, *[patch] * dims, -1)
    split = split.permute(*(axis for dim in range(dims) for axis in (dim, dims + dim)), 2 * dims)
    return split.reshape(*(side * patch for side in grid), -1)


def read_pixels(media: Media, size: Sequence[int], channels: int) -> torch.Tensor:
    """Bytes `[C, H, W]`: the middle of the picture that has the shape of `size`, scaled to it."""
    height, width = size
    fitted = optional("PIL.ImageOps").fit(read_picture(media, channels), (width, height))
    return torch.from_numpy(np.atleast_3d(np.array(fitted, np.uint8))).permute(2, 0, 1)


def resize(pixels: torch.Tensor, height: int, width: int, resample: int) -> torch.Tensor:
    """Bytes `[C, H, W]` -> bytes of another size, by torch's own filters for bytes.

    That is what torchvision does with tensors on a CPU. It rounds otherwise than Pillow: by one level, or by more where
    a sharp filter goes beyond black or white.
    """
    if pixels.shape[1:] == (height, width):
        return pixels
    if resample not in FILTERS:
        known = ", ".join(f"{number} ({name})" for number, name in FILTERS.items())
        raise UserError(f"preprocessor_config.json: resample {resample!r} is not known for tensors; use {known}")
    scaled = interpolate(pixels[None], (height, width), mode=FILTERS[resample], align_corners=False, antialias=True)
    return scaled[0]


def to_picture(pixels: Array) -> Any:
    """Bytes `[H, W, C]` -> a PIL image."""
    return optional("PIL.Image").fromarray(pixels.squeeze(-1) if pixels.shape[-1] == 1 else pixels)


def picture_html(media: Media, channels: int = 3) -> str:
    """A thumbnail, in the page itself."""
    image, file = read_picture(media, channels), io.BytesIO()
    image.thumbnail((256, 256))
    image.save(file, "PNG")
    return f'<img src="data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}">'
