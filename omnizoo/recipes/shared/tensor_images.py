"""Image preparation for families whose processor needs torchvision. OmniZoo does not use torchvision.

It reads the settings of the processor, resizes uint8 images and converts them to floats like the processor. All other
steps depend on the family.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.functional import pad

from omnizoo.config.errors import UserError
from omnizoo.modalities.files.image import read_image, to_bytes
from omnizoo.modalities.files.pixels import resize
from omnizoo.modalities.media import Media
from omnizoo.recipes.shared.encoders import checked_settings

BILINEAR, BICUBIC = 2, 3
DEFAULTS = {"do_resize": True, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True}


class TensorImageProcessor:
    """Image processor with the settings of the model's folder.

    Args:
        folder: Folder of the model.
        defaults: Settings that are used if the folder does not contain them.
        modality: "image", or "video" to prepare frames of videos.
        overrides: Settings from the model or from options. If None, the setting of the folder is used.
    """

    def __init__(
        self, folder: str | None, defaults: Mapping[str, Any], modality: str = "image", **overrides: Any
    ) -> None:
        defaults = {**DEFAULTS, **defaults}
        overrides = {name: value for name, value in overrides.items() if value is not None}
        settings, file = checked_settings(folder, f"{modality}_processor")
        known = {name: value for name, value in settings.items() if name in defaults}
        self.settings = {**defaults, **known, **overrides}
        for name, value in self.settings.items():
            source = f"model.modalities.{modality}.encoder.options" if name in overrides else file
            if not isinstance(value, type(defaults[name])) or (name.startswith("max_") and value < 1):
                raise UserError(f"{source}: {name} is {value!r}. Use a value such as {defaults[name]!r}.")
        if not (self.settings["do_resize"] and self.settings["do_rescale"]):
            raise UserError(
                f"{file}: do_resize or do_rescale is false, but the model was trained with both. Set both to true."
            )
        self.mean = self._by_channel("image_mean")
        self.std = self._by_channel("image_std")

    def _by_channel(self, name: str) -> torch.Tensor:
        """Return a setting with one number, or one per channel, as `[3, 1, 1]`."""
        return torch.tensor(self.settings[name], dtype=torch.float32).expand(3).view(3, 1, 1)

    def read(self, media: Media) -> torch.Tensor:
        """Return the uint8 pixels `[3, H, W]` of an image."""
        return to_bytes(read_image(media))

    def resize(self, pixels: torch.Tensor, height: int, width: int) -> torch.Tensor:
        """Resize uint8 pixels with the filter in the settings."""
        return resize(pixels, height, width, self.settings["resample"])

    def tiles(self, pixels: torch.Tensor, size: tuple[int, int], grid: tuple[int, int], edge: int) -> torch.Tensor:
        """Resize uint8 pixels to `size`, pad with black to `grid` squares, and return squares `[N, 3, edge, edge]`."""
        height, width = size
        rows, columns = grid
        padded = pad(self.resize(pixels, height, width), (0, columns * edge - width, 0, rows * edge - height))
        return padded.view(3, rows, edge, columns, edge).permute(1, 3, 0, 2, 4).flatten(0, 1)

    def values(self, pixels: torch.Tensor) -> torch.Tensor:
        """Convert uint8 pixels to floats. Mean and standard deviation are scaled to 0..255, as in torchvision."""
        factor: float = self.settings["rescale_factor"]
        if not self.settings["do_normalize"]:
            return pixels * factor
        mean = self.mean * (1 / factor)
        std = self.std * (1 / factor)
        return (pixels.float() - mean) / std

    def values_in(self, pixels: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Convert uint8 pixels to floats, with every operation in `dtype`."""
        factor: float = self.settings["rescale_factor"]
        scaled = pixels.to(dtype) * factor
        if not self.settings["do_normalize"]:
            return scaled
        return (scaled - self.mean.to(dtype)) / self.std.to(dtype)
