"""How pictures are prepared where the published processor takes tensors and needs torchvision, which we do not: its
settings, its filters for bytes, its way from bytes to floats. What becomes of the pixels is the family's own."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from omnizoo.config.errors import UserError
from omnizoo.modalities.files import read_picture
from omnizoo.modalities.item import Media
from omnizoo.modalities.pixels import resize
from omnizoo.modalities.tower import preprocessor_settings

BILINEAR, BICUBIC = 2, 3


class TensorPictures:
    """Settings as the folder has them, else as `published`; `own` is what the model itself, or an option, decides.
    `clips`: what the folder says of clips, where it is their frames that are prepared."""

    def __init__(
        self, folder: str | None, published: Mapping[str, Any], clips: Mapping[str, Any] | None = None, **own: Any
    ) -> None:
        known = {"do_resize": True, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True, **published}
        kind, file = (
            ("image", "preprocessor_config.json") if clips is None else ("video", "video_preprocessor_config.json")
        )
        told = preprocessor_settings(folder, "image_processor") if clips is None else clips
        own = {key: value for key, value in own.items() if value is not None}
        self.told = known | {key: value for key, value in told.items() if key in known} | own
        where = file if folder is None else f"{folder}: {file}"
        for key, value in self.told.items():
            like = f"model.modalities.{kind}.encoder.options" if key in own else where
            if not isinstance(value, type(known[key])) or (key.startswith("max_") and value < 1):
                raise UserError(f"{like}: {key} is {value!r}; expected something like {known[key]!r}")
        if not (self.told["do_resize"] and self.told["do_rescale"]):
            raise UserError(f"{where}: do_resize and do_rescale have to be true: the model was made for such pictures")
        self.mean, self.std = (self._of_channels(where, key) for key in ("image_mean", "image_std"))

    def _of_channels(self, where: str, key: str) -> torch.Tensor:
        try:
            return torch.tensor(self.told[key], dtype=torch.float32).expand(3).view(3, 1, 1)
        except (TypeError, ValueError, RuntimeError):
            raise UserError(f"{where}: {key} is {self.told[key]!r}; expected three numbers") from None

    def read(self, media: Media) -> torch.Tensor:
        """Bytes `[3, H, W]`."""
        return torch.from_numpy(np.array(read_picture(media), np.uint8)).permute(2, 0, 1).contiguous()

    def resize(self, pixels: torch.Tensor, height: int, width: int) -> torch.Tensor:
        return resize(pixels, height, width, self.told["resample"])

    def values(self, pixels: torch.Tensor) -> torch.Tensor:
        """Bytes -> floats. Mean and deviation are brought to the scale of bytes, and not the other way round."""
        factor: float = self.told["rescale_factor"]
        if not self.told["do_normalize"]:
            return pixels * factor
        return (pixels.float() - self.mean * (1 / factor)) / (self.std * (1 / factor))

    def values_in(self, pixels: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Bytes -> floats of a precision in which every step is taken."""
        factor: float = self.told["rescale_factor"]
        scaled = pixels.to(dtype) * factor
        return (scaled - self.mean.to(dtype)) / self.std.to(dtype) if self.told["do_normalize"] else scaled
