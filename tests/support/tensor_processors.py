"""transformers' own picture processors for tensors, which import torchvision. It is not needed here: the few functions
of it that they call stand below, in plain torch, by torchvision's documented behaviour on a CPU."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from importlib import import_module
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
import transformers.image_processing_backends as backends
from PIL.Image import Resampling
from transformers.image_utils import SizeDict

from omnizoo.modalities.media import Media

# The class of a family's processor, and what the sizes of its example make of it.
PROCESSORS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama4": ("Llama4ImageProcessor", {"size": {"height": 32, "width": 32}, "max_patches": 4}),
    "gemma4_unified": ("Gemma4UnifiedImageProcessor", {"patch_size": 4, "max_soft_tokens": 70}),
    "kimi_k25": ("Kimi_K25ImageProcessor", {"patch_size": 8, "max_patches": 64}),
}


class InterpolationMode(Enum):
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    LANCZOS = "lanczos"


FILTERS = {Resampling[mode.name]: mode for mode in InterpolationMode}


def resize(
    image: torch.Tensor, size: Sequence[int], interpolation: InterpolationMode | int, antialias: bool = True
) -> torch.Tensor:
    """Bytes stay bytes: torch has filters for them. A filter may be given by Pillow's number."""
    interpolation = interpolation if isinstance(interpolation, InterpolationMode) else FILTERS[interpolation]
    batch = image.reshape(-1, *image.shape[-3:])
    out = F.interpolate(batch, tuple(size), mode=interpolation.value, align_corners=False, antialias=antialias)
    return out.reshape(*image.shape[:-2], *size)


def pad(image: torch.Tensor, padding: Sequence[int], fill: Any = 0, padding_mode: str = "constant") -> torch.Tensor:
    left, top, right, bottom = padding
    fills = {fill} if isinstance(fill, int) else set(fill)
    assert fills == {0}
    assert padding_mode == "constant"
    return F.pad(image, (left, right, top, bottom))


def normalize(image: torch.Tensor, mean: Any, std: Any, inplace: bool = False) -> torch.Tensor:
    mean, std = (torch.as_tensor(value, dtype=image.dtype).view(-1, 1, 1) for value in (mean, std))
    return (image - mean) / std


# The same of clips, by what they are prepared with.
CLIPS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma4": ("Gemma4VideoProcessor", {"patch_size": 4, "pooling_kernel_size": 3}),
    "gemma4_unified": ("Gemma4UnifiedVideoProcessor", {"patch_size": 4, "pooling_kernel_size": 3}),
}


@contextmanager
def processor_class(family: str, name: str, kind: str = "image") -> Iterator[Any]:
    """The class `name` of the family's own image processor, or video processor, able to run inside of the block."""
    functional: Any = ModuleType("torchvision.transforms.v2.functional")
    functional.InterpolationMode, functional.resize = InterpolationMode, resize
    functional.pad, functional.normalize = pad, normalize
    functional.grayscale_to_rgb = lambda image: image
    v2: Any = ModuleType("torchvision.transforms.v2")
    v2.functional = functional
    packages = {f"torchvision{end}": ModuleType(f"torchvision{end}") for end in ("", ".transforms")}
    path = f"transformers.models.{family}.{kind}_processing_{family}"
    with (
        patch.dict(sys.modules, packages | {v2.__name__: v2, functional.__name__: functional}),  # and forget `path`
        patch.object(backends, "tvF", functional, create=True),
        patch("transformers.utils.is_torchvision_v2_available", lambda: True),
        patch("transformers.utils.is_torchvision_available", lambda: True),
        patch.object(backends, "pil_torch_interpolation_mapping", FILTERS),
    ):
        yield getattr(import_module(path), name)


def published_tensors(family: str, pictures: Sequence[Media]) -> Any:
    """What the family's own processor makes of pictures, with the sizes of its example."""
    with processor_class(family, PROCESSORS[family][0]) as kind:
        own = kind(**PROCESSORS[family][1])
        values = [media.value for media in pictures]
        return own(images=values, return_tensors="pt", input_data_format="channels_last")


def published_video(family: str, frames: Sequence[Any]) -> Any:
    """What the family's own video processor makes of frames `[frames, height, width, 3]` of clips that are chosen."""
    name, sizes = CLIPS[family]
    with processor_class(family, name, "video") as kind:
        own = object.__new__(kind)  # its constructor wants torchvision itself
        settings = {"resample": InterpolationMode.BICUBIC, "rescale_factor": 1 / 255, "max_soft_tokens": 70}
        settings |= {key: getattr(kind, key) for key in ("do_resize", "do_rescale", "do_normalize")}
        settings |= {key: tuple(getattr(kind, key)) for key in ("image_mean", "image_std")}
        videos = [torch.as_tensor(each).permute(0, 3, 1, 2).contiguous() for each in frames]
        return kind._preprocess(own, videos, return_tensors="pt", **settings | sizes)


def published_canvases(
    sizes: Sequence[Sequence[int]], edge: int, most: int, grows: bool
) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Of pictures of these sizes, by Llama 4's own functions: rows and columns of squares, and the size on them."""
    found = []
    with processor_class("llama4", PROCESSORS["llama4"][0]) as kind:
        own = sys.modules[kind.__module__]
        canvases = torch.tensor(own.find_supported_resolutions(most, SizeDict(height=edge, width=edge)))
        for height, width in sizes:
            best = own.get_best_fit((height, width), canvases, grows)
            limits = best if grows else (min(max(height, edge), best[0]), min(max(width, edge), best[1]))
            fitted = own.get_max_res_without_distortion((height, width), limits)
            rows, columns = (best // edge).tolist()
            found.append(((rows, columns), (max(int(fitted[0]), 1), max(int(fitted[1]), 1))))
    return found
