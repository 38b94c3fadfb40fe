"""Image encoder around any Hugging Face vision tower, with images of a fixed size or of variable resolution.

The arguments of a tower's forward determine how it takes images (`TowerInput`). An image is a video of one frame, so
the video encoder shares all code here except the times of its frames.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from omnizoo.config.errors import UserError, first_line
from omnizoo.modalities.base import Encoder
from omnizoo.modalities.encoders.projector import Grid, build_projector
from omnizoo.modalities.encoders.tower import TowerFlops, takes, tower_skeleton
from omnizoo.modalities.files.decoding import PICTURE_OPTIONS
from omnizoo.modalities.files.image import image_size, read_image, to_bytes
from omnizoo.modalities.files.pixels import to_patches
from omnizoo.modalities.files.preview import thumbnail
from omnizoo.modalities.flop_count import is_trained, measured_flops
from omnizoo.modalities.item import Inputs, MediaSize
from omnizoo.modalities.media import BadMedia, Media
from omnizoo.modalities.processor_files import processor_settings

if TYPE_CHECKING:
    from PIL.Image import Image

FITS = ("stretch", "crop", "pad")
LONGEST_ASPECT = 200  # maximum ratio of the sides of an image; beyond it, the shorter side rounds to 0


@dataclass(frozen=True)
class Look:
    """Normalization and resizing of pixels for a tower."""

    mean: Sequence[float]
    std: Sequence[float]
    resample: int  # filter number of Pillow
    channels: int

    def __post_init__(self) -> None:
        if not all(value > 0 for value in self.std):
            raise UserError(f"encoder.std: {list(self.std)}: numbers above 0 were expected")

    def resize(self, image: "Image", height: int, width: int) -> "Image":
        return image.resize((width, height), self.resample)

    def tensor(self, images: "Sequence[Image]") -> torch.Tensor:
        """Return the normalized images `[T, C, H, W]`."""
        values = torch.stack([to_bytes(image) / 255 for image in images])
        return (values - torch.tensor(self.mean).view(-1, 1, 1)) / torch.tensor(self.std).view(-1, 1, 1)


class TowerInput:
    """Base class: how a tower takes images. Videos are tensors whose first dimension is time."""

    look: Look
    width: int  # width of the features

    def grid(self, height: int, width: int) -> Grid:
        """Return the grid of features for an image of this size."""
        raise NotImplementedError

    def tokens(self, grid: Grid) -> int:
        """Return the number of tower tokens that attend to each other, for a grid of features."""
        return math.prod(grid)

    def work(self, tower: PreTrainedModel) -> TowerFlops:
        """Return the FLOPs of the tower as a function of its tokens."""
        return TowerFlops.of(tower)

    def steps(self, frames: int) -> int:
        """Return the number of grids of a video with `frames` frames."""
        return frames

    def fitted(self, image: "Image", grid: Grid) -> "Image":
        """Return the image resized for the tower, before normalization."""
        raise NotImplementedError

    def clip(self, images: "Sequence[Image]", grid: Grid) -> torch.Tensor:
        """Return the normalized frames `[T, C, H, W]`."""
        return self.look.tensor([self.fitted(image, grid) for image in images])

    def dummy_input(self) -> torch.Tensor:
        raise NotImplementedError

    def run(self, tower: PreTrainedModel, clips: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[Grid]]:
        """Call the tower once for all videos. Return features `[N, width]` and the grid of each step, in order."""
        raise NotImplementedError


class FixedSize(TowerInput):
    """Input of towers that take `pixel_values [B, C, H, W]` of one size."""

    def __init__(self, skeleton: PreTrainedModel, look: Look, size: tuple[int, int], fit: str, edge: int) -> None:
        self.look, self.size, self.fit, self.edge = look, size, fit, edge
        native = _pair(getattr(skeleton.config, "image_size", None) or size)
        self.interpolate = size != native and takes(skeleton, "interpolate_pos_encoding")
        picture = torch.zeros(1, look.channels, *size, device="meta")
        try:
            with torch.no_grad():
                seen = self._see(skeleton, picture)
        except (ValueError, RuntimeError) as error:
            reason = first_line(error)
            raise UserError(f"encoder.image_size: the tower cannot take pictures of {list(size)}: {reason}") from error
        self.measured = measured_flops(lambda: self._see(skeleton, picture))
        self.width = seen.shape[-1]
        patch = getattr(skeleton.config, "patch_size", None)
        self._grid: Grid = (size[0] // _pair(patch)[0], size[1] // _pair(patch)[1]) if patch else (0, 0)
        self.extra = seen.shape[1] - math.prod(self._grid)  # class token and registers, before the patches
        if patch is None or self.extra < 0:  # the tower merges its patches
            side = math.isqrt(seen.shape[1])
            self._grid, self.extra = (side, side) if side**2 == seen.shape[1] else (1, seen.shape[1]), 0

    def grid(self, height: int, width: int) -> Grid:
        return self._grid

    def tokens(self, grid: Grid) -> int:
        return math.prod(grid) + self.extra

    def work(self, tower: PreTrainedModel) -> TowerFlops:
        """Return the measured FLOPs, which are constant because all images have the same size."""
        return TowerFlops(is_trained(tower), per_item=self.measured[is_trained(tower)])

    def dummy_input(self) -> torch.Tensor:
        return torch.zeros(1, self.look.channels, *self.size)

    def run(self, tower: PreTrainedModel, clips: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[Grid]]:
        seen = self._see(tower, torch.cat(list(clips)))[:, self.extra :]
        return seen.flatten(0, 1), [self._grid] * seen.shape[0]

    def _see(self, tower: PreTrainedModel, values: torch.Tensor) -> torch.Tensor:
        given = {"interpolate_pos_encoding": True} if self.interpolate else {}
        seen: torch.Tensor = tower(pixel_values=values, **given).last_hidden_state
        return seen.flatten(2).transpose(1, 2) if seen.ndim == 4 else seen

    def fitted(self, image: "Image", grid: Grid) -> "Image":
        height, width = self.size
        if self.fit == "stretch":
            return self.look.resize(image, height, width)
        if self.fit == "crop":  # resize the shorter side to `edge`, then crop the center
            short = min(image.height, image.width)
            image = self.look.resize(image, self.edge * image.height // short, self.edge * image.width // short)
        else:
            scale = min(height / image.height, width / image.width)
            image = self.look.resize(image, max(1, round(image.height * scale)), max(1, round(image.width * scale)))
        left, top = (image.width - width) // 2, (image.height - height) // 2
        return image.crop((left, top, left + width, top + height))  # PIL fills areas outside the image with black


class PatchList(TowerInput):
    """Input of towers that take `pixel_values [B, N, patch]` and `spatial_shapes [B, 2]`, up to a number of patches."""

    def __init__(self, skeleton: PreTrainedModel, look: Look, most_patches: int) -> None:
        config = skeleton.config
        self.look, self.patch, self.most, self.width = look, config.patch_size, most_patches, config.hidden_size

    def grid(self, height: int, width: int) -> Grid:
        def scaled(scale: float) -> Grid:
            return tuple(max(1, math.ceil(side * scale / self.patch)) for side in (height, width))

        fits, too_large = 0.0, 100.0  # largest scale within the budget; small images are enlarged, as in pretraining
        while too_large - fits > 1e-6 * too_large:
            middle = (fits + too_large) / 2
            fits, too_large = (middle, too_large) if math.prod(scaled(middle)) <= self.most else (fits, middle)
        return scaled(fits)

    def fitted(self, image: "Image", grid: Grid) -> "Image":
        return self.look.resize(image, grid[0] * self.patch, grid[1] * self.patch)

    def clip(self, images: "Sequence[Image]", grid: Grid) -> torch.Tensor:
        """Return the patches `[T, h, w, patch]`, whose shape contains the grid."""
        frames = super().clip(images, grid).movedim(1, -1)
        return torch.stack([to_patches(frame, self.patch).unflatten(0, grid) for frame in frames])

    def dummy_input(self) -> torch.Tensor:
        return torch.zeros(1, 1, 1, self.patch**2 * self.look.channels)

    def run(self, tower: PreTrainedModel, clips: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[Grid]]:
        frames = [frame for clip in clips for frame in clip]
        grids: list[Grid] = [tuple(frame.shape[:2]) for frame in frames]
        lengths = [math.prod(grid) for grid in grids]
        device = frames[0].device
        values = torch.nn.utils.rnn.pad_sequence([frame.flatten(0, 1) for frame in frames], batch_first=True)
        mask = torch.arange(max(lengths), device=device) < torch.tensor(lengths, device=device)[:, None]
        shapes = torch.tensor(grids, device=device)
        seen = tower(pixel_values=values, pixel_attention_mask=mask.int(), spatial_shapes=shapes).last_hidden_state
        return torch.cat([of[:length] for of, length in zip(seen, lengths, strict=True)]), grids


class PatchGrid(TowerInput):
    """Input of towers that take the patches of all videos as one sequence, with `grid_thw`.

    A feature covers `merge` x `merge` patches of `temporal_patch_size` frames.
    """

    def __init__(
        self, skeleton: PreTrainedModel, look: Look, least_pixels: int | None, most_pixels: int | None
    ) -> None:
        config = skeleton.config
        self.look = look
        self.patch: int = config.patch_size
        self.merge: int = config.spatial_merge_size
        self.frames: int = config.temporal_patch_size
        self.unit = self.patch * self.merge  # side of the area of a feature, in pixels
        self.width = getattr(config, "out_hidden_size", None) or config.hidden_size
        self.least, self.most = least_pixels or 4 * self.unit**2, most_pixels or 1280 * self.unit**2
        if not self.unit**2 <= self.least <= self.most:
            raise UserError(
                f"encoder.max_pixels: {self.least} (min_pixels) to {self.most} leaves no size; "
                f"a feature takes {self.unit} x {self.unit} pixels"
            )

    def grid(self, height: int, width: int) -> Grid:
        """Return the grid of the size rounded to multiples of `unit`, scaled into the pixel budget if necessary."""
        nearest = round(height / self.unit), round(width / self.unit)
        area = math.prod(nearest) * self.unit**2
        if area > self.most:
            scale = math.sqrt(height * width / self.most)
            return tuple(max(1, math.floor(side / scale / self.unit)) for side in (height, width))
        if area < self.least:
            scale = math.sqrt(self.least / (height * width))
            return tuple(math.ceil(side * scale / self.unit) for side in (height, width))
        return nearest

    def tokens(self, grid: Grid) -> int:
        return math.prod(grid) * self.merge**2

    def steps(self, frames: int) -> int:
        return -(-frames // self.frames)

    def fitted(self, image: "Image", grid: Grid) -> "Image":
        return self.look.resize(image, grid[0] * self.unit, grid[1] * self.unit)

    def clip(self, images: "Sequence[Image]", grid: Grid) -> torch.Tensor:
        """Return `[t, h, w, values of the patches of a feature]`, whose shape contains the grid."""
        h, w = grid
        values = super().clip(images, grid)
        values = torch.cat([values, values[-1:].expand(-len(values) % self.frames, -1, -1, -1)])
        values = values.view(-1, self.frames, self.look.channels, h, self.merge, self.patch, w, self.merge, self.patch)
        return values.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).flatten(3)

    def dummy_input(self) -> torch.Tensor:
        return torch.zeros(1, 1, 1, self.unit**2 * self.look.channels * self.frames)

    def run(self, tower: PreTrainedModel, clips: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[Grid]]:
        patches = torch.cat([clip.reshape(-1, clip.shape[-1] // self.merge**2) for clip in clips])
        grids = torch.tensor([[len(clip), *(side * self.merge for side in clip.shape[1:3])] for clip in clips])
        seen = tower(patches, grid_thw=grids.to(patches.device)).pooler_output
        return seen, [tuple(clip.shape[1:3]) for clip in clips for _ in clip]


class VisionEncoder(Encoder):
    """Encoder for images.

    Unset options come from the preprocessor config of the folder, or from the config of the tower.

    Args:
        width: Width of the foundation.
        config: Config of the tower, or of a model that contains it.
        folder: Model folder with the preprocessor config.
        projector: `kind` and options of the projector.
        image_size: Height and width in pixels, or one number. Only for towers of a fixed size.
        fit: `stretch`, `crop` or `pad`. Only for towers of a fixed size.
        min_pixels: Minimum number of pixels after resizing. Only for towers with `grid_thw`.
        max_pixels: Maximum number of pixels after resizing. Only for towers of variable resolution.
        mean: Mean of each channel, for normalization.
        std: Standard deviation of each channel, for normalization.
    """

    item_options = PICTURE_OPTIONS
    has_times = False  # whether the projector embeds the times of frames

    def __init__(
        self,
        width: int,
        config: PretrainedConfig | None = None,
        folder: str | None = None,
        projector: dict[str, Any] | None = None,
        image_size: int | Sequence[int] | None = None,
        fit: str | None = None,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        skeleton = tower_skeleton(config, "image")
        options: dict[str, Any] = {"image_size": image_size, "fit": fit, "mean": mean, "std": std}
        options |= {"min_pixels": min_pixels, "max_pixels": max_pixels}
        self.kind = _kind(skeleton, processor_settings(folder, "image_processor")[0], options)
        self.tower: PreTrainedModel = type(skeleton)(skeleton.config)
        self.projector = build_projector(projector, self.kind.width, width, 2, self.has_times)

    @property
    def pretrained(self) -> PreTrainedModel:
        return self.tower

    @cached_property
    def work(self) -> TowerFlops:
        return self.kind.work(self.tower)

    def measure(self, media: Media) -> MediaSize:
        return self.size_of(media, 1, *image_size(media))

    def size_of(self, media: Media, frames: int, height: int, width: int) -> MediaSize:
        if max(height, width) >= LONGEST_ASPECT * min(height, width):
            raise BadMedia(f"{media.name}: {width} x {height} is too long and thin to be seen")
        grid, steps = self.kind.grid(height, width), self.kind.steps(frames)
        cost = self.work.flops(self.kind.tokens(grid)) + self.projector.flops(grid, self.work.trained)
        return MediaSize(steps * self.projector.places(grid), steps * cost)

    def prepare(self, media: Media) -> Inputs:
        image = read_image(media, self.kind.look.channels)
        return {"pixel_values": self.kind.clip([image], self.kind.grid(image.height, image.width))}

    def dummy_input(self) -> Inputs:
        return {"pixel_values": self.kind.dummy_input()}

    def encode(self, items: Sequence[Inputs]) -> torch.Tensor:
        features: torch.Tensor = self.projector(*self.kind.run(self.tower, [item["pixel_values"] for item in items]))
        return features

    def preview(self, media: Media) -> str:
        return self.seen(read_image(media, self.kind.look.channels), media.name)

    def seen(self, image: "Image", title: str, side: int = 128) -> str:
        """Return HTML that shows an image as the tower receives it."""
        fitted = self.kind.fitted(image, self.kind.grid(image.height, image.width))
        return thumbnail(
            fitted, f"{title}: {image.width} x {image.height}, seen as {fitted.width} x {fitted.height}", side
        )


def _kind(skeleton: PreTrainedModel, settings: dict[str, Any], options: dict[str, Any]) -> TowerInput:
    """Return how the tower takes images, from the options, else the settings of the folder, else the tower's config."""
    config = skeleton.config
    look = _look(config, settings, options)
    if takes(skeleton, "grid_thw"):
        _refuse(options, ("image_size", "fit"), "its tower takes pictures of any size; give min_pixels and max_pixels")
        size = _edges(settings.get("size"))
        least = options["min_pixels"] or settings.get("min_pixels") or size.get("shortest_edge")
        most = options["max_pixels"] or settings.get("max_pixels") or size.get("longest_edge")
        return PatchGrid(skeleton, look, least, most)
    if takes(skeleton, "spatial_shapes"):
        _refuse(options, ("image_size", "fit", "min_pixels"), "its tower takes as many patches as max_pixels allows")
        most = (options["max_pixels"] or 0) // config.patch_size**2 or settings.get("max_num_patches")
        return PatchList(skeleton, look, most or config.num_patches)
    _refuse(options, ("min_pixels", "max_pixels"), "its tower takes pictures of one size; give image_size")
    return _fixed_size(skeleton, look, settings, options)


def _look(config: Any, settings: dict[str, Any], options: dict[str, Any]) -> Look:
    channels = getattr(config, "num_channels", None) or getattr(config, "in_channels", None) or 3
    if settings.get("do_normalize", True):
        mean, std = (settings.get(name, [0.5] * channels) for name in ("image_mean", "image_std"))
    else:
        mean, std = [0.0] * channels, [1.0] * channels
    mean = options["mean"] or mean
    std = options["std"] or std
    if len(mean) != channels or len(std) != channels:
        raise UserError(f"encoder.mean: the tower has {channels} channels; give as many numbers in mean and std")
    return Look(mean, std, settings.get("resample", 3), channels)


def _fixed_size(skeleton: PreTrainedModel, look: Look, settings: dict[str, Any], options: dict[str, Any]) -> TowerInput:
    size = _edges(settings.get("size"))
    crop = _edges(settings.get("crop_size")) if settings.get("do_center_crop") else {}
    shape = crop or size
    published = (shape["height"], shape["width"]) if "height" in shape else getattr(skeleton.config, "image_size", None)
    image_size = options["image_size"] or published
    if image_size is None:
        raise UserError("encoder.image_size: the tower's config has none; give it")
    height, width = _pair(image_size)
    fit = options["fit"] or ("crop" if crop else "stretch")
    if fit not in FITS:
        raise UserError(f"encoder.fit: {fit!r} is none of {', '.join(FITS)}")
    edge = size.get("shortest_edge") if crop and not options["image_size"] else None
    return FixedSize(skeleton, look, (height, width), fit, edge or max(height, width))


def _edges(size: Any) -> dict[str, int]:
    """Return a size in processor settings as a mapping by name. A number is the edge of a square."""
    if isinstance(size, dict):
        return size
    return {"height": size, "width": size} if size else {}


def _refuse(options: dict[str, Any], names: Sequence[str], reason: str) -> None:
    for name in names:
        if options[name] is not None:
            raise UserError(f"encoder.{name}: {reason}")


def _pair(value: Any) -> tuple[int, int]:
    height, width = (value, value) if isinstance(value, int) else value
    return height, width
