"""Pictures in, through any Hugging Face vision tower: of a fixed size, or with as many patches as the picture has.

What a tower's forward takes tells the kinds apart. To all of them a picture is a clip of one frame, so video shares
everything here but the times of its frames.
"""

import base64
import html
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import torch
from transformers import PretrainedConfig, PreTrainedModel

from omnizoo.config.errors import UserError, first_line
from omnizoo.modalities.base import Encoder, Inputs, Size
from omnizoo.modalities.files import PICTURE_OPTIONS, picture_size, pixels, read_picture
from omnizoo.modalities.item import BadMedia, Media
from omnizoo.modalities.projector import Grid, build_projector
from omnizoo.modalities.tally import is_trained, measured_flops
from omnizoo.modalities.tower import Work, preprocessor_settings, takes, tower_skeleton

if TYPE_CHECKING:
    from PIL.Image import Image

FITS = ("stretch", "crop", "pad")
LONGEST_ASPECT = 200  # sides of a picture differ by less, or one of them would vanish


@dataclass(frozen=True)
class Look:
    """How pixels are brought to a tower's liking."""

    mean: Sequence[float]
    std: Sequence[float]
    resample: int  # Pillow's number of the filter
    channels: int

    def __post_init__(self) -> None:
        if not all(value > 0 for value in self.std):
            raise UserError(f"encoder.std: {list(self.std)}: numbers above 0 were expected")

    def resize(self, image: "Image", height: int, width: int) -> "Image":
        return image.resize((width, height), self.resample)

    def tensor(self, images: "Sequence[Image]") -> torch.Tensor:
        """`[T, C, H, W]`"""
        values = torch.stack([pixels(image) for image in images])
        return (values - torch.tensor(self.mean).view(-1, 1, 1)) / torch.tensor(self.std).view(-1, 1, 1)


class Kind(Protocol):
    """A way in which towers take pictures. Clips are tensors whose first dimension is time."""

    look: Look
    width: int  # of its features

    def grid(self, height: int, width: int) -> Grid:
        """Of the features of a picture of this size."""

    def tokens(self, grid: Grid) -> int:
        """That attend to each other in the tower, for a grid of features."""

    def work(self, tower: PreTrainedModel) -> Work:
        """By these tokens."""

    def steps(self, frames: int) -> int:
        """Grids in a clip of so many frames."""

    def fitted(self, image: "Image", grid: Grid) -> "Image":
        """A picture as the tower sees it, but for the scale of its values."""

    def clip(self, images: "Sequence[Image]", grid: Grid) -> torch.Tensor: ...

    def blank(self) -> torch.Tensor: ...

    def run(self, tower: PreTrainedModel, clips: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[Grid]]:
        """One call of the tower for all of them: features `[N, width]` and the grids they are of, in order."""


class FixedSize:
    """`pixel_values [B, C, H, W]`, always of one size."""

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
        self.extra = seen.shape[1] - math.prod(self._grid)  # class token and registers, ahead of the patches
        if patch is None or self.extra < 0:  # its patches were merged on the way
            side = math.isqrt(seen.shape[1])
            self._grid, self.extra = (side, side) if side**2 == seen.shape[1] else (1, seen.shape[1]), 0

    def grid(self, height: int, width: int) -> Grid:
        return self._grid

    def tokens(self, grid: Grid) -> int:
        return math.prod(grid) + self.extra

    def work(self, tower: PreTrainedModel) -> Work:
        """As measured: whatever such a tower does, it does to pictures of one size."""
        return Work(is_trained(tower), per_item=self.measured[is_trained(tower)])

    def steps(self, frames: int) -> int:
        return frames

    def clip(self, images: "Sequence[Image]", grid: Grid) -> torch.Tensor:
        return self.look.tensor([self.fitted(image, grid) for image in images])

    def blank(self) -> torch.Tensor:
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
        if self.fit == "crop":  # the shorter side becomes `edge`, the middle is kept
            short = min(image.height, image.width)
            image = self.look.resize(image, self.edge * image.height // short, self.edge * image.width // short)
        else:
            scale = min(height / image.height, width / image.width)
            image = self.look.resize(image, max(1, round(image.height * scale)), max(1, round(image.width * scale)))
        left, top = (image.width - width) // 2, (image.height - height) // 2
        return image.crop((left, top, left + width, top + height))  # black where it leaves the picture


class PatchList:
    """`pixel_values [B, N, patch]` with `spatial_shapes [B, 2]`: as many patches as the budget allows."""

    def __init__(self, skeleton: PreTrainedModel, look: Look, most_patches: int) -> None:
        config = skeleton.config
        self.look, self.patch, self.most, self.width = look, config.patch_size, most_patches, config.hidden_size

    def grid(self, height: int, width: int) -> Grid:
        def scaled(scale: float) -> Grid:
            return tuple(max(1, math.ceil(side * scale / self.patch)) for side in (height, width))

        fits, too_large = 0.0, 100.0  # the largest scale within the budget, small pictures grow as in training
        while too_large - fits > 1e-6 * too_large:
            middle = (fits + too_large) / 2
            fits, too_large = (middle, too_large) if math.prod(scaled(middle)) <= self.most else (fits, middle)
        return scaled(fits)

    def tokens(self, grid: Grid) -> int:
        return math.prod(grid)

    def work(self, tower: PreTrainedModel) -> Work:
        return Work.of(tower)

    def steps(self, frames: int) -> int:
        return frames

    def fitted(self, image: "Image", grid: Grid) -> "Image":
        return self.look.resize(image, grid[0] * self.patch, grid[1] * self.patch)

    def clip(self, images: "Sequence[Image]", grid: Grid) -> torch.Tensor:
        """`[T, h, w, patch]`: the shape says the grid"""
        values = self.look.tensor([self.fitted(image, grid) for image in images])
        return (
            values.unfold(2, self.patch, self.patch)
            .unfold(3, self.patch, self.patch)
            .permute(0, 2, 3, 4, 5, 1)
            .flatten(3)
        )

    def blank(self) -> torch.Tensor:
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


class PatchGrid:
    """All patches of all clips in one run, with `grid_thw`; a feature is `merge` x `merge` patches of some frames."""

    def __init__(
        self, skeleton: PreTrainedModel, look: Look, least_pixels: int | None, most_pixels: int | None
    ) -> None:
        config = skeleton.config
        self.look = look
        self.patch: int = config.patch_size
        self.merge: int = config.spatial_merge_size
        self.frames: int = config.temporal_patch_size
        self.unit = self.patch * self.merge  # side of a feature in pixels
        self.width = getattr(config, "out_hidden_size", None) or config.hidden_size
        self.least, self.most = least_pixels or 4 * self.unit**2, most_pixels or 1280 * self.unit**2
        if not self.unit**2 <= self.least <= self.most:
            raise UserError(
                f"encoder.max_pixels: {self.least} (min_pixels) to {self.most} leaves no size; "
                f"a feature takes {self.unit} x {self.unit} pixels"
            )

    def grid(self, height: int, width: int) -> Grid:
        """The nearest multiples of a feature's sides; if that is out of the budget, scaled into it."""
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

    def work(self, tower: PreTrainedModel) -> Work:
        return Work.of(tower)

    def steps(self, frames: int) -> int:
        return -(-frames // self.frames)

    def fitted(self, image: "Image", grid: Grid) -> "Image":
        return self.look.resize(image, grid[0] * self.unit, grid[1] * self.unit)

    def clip(self, images: "Sequence[Image]", grid: Grid) -> torch.Tensor:
        """`[t, h, w, features' patches]`: the shape says the grid"""
        h, w = grid
        values = self.look.tensor([self.fitted(image, grid) for image in images])
        values = torch.cat([values, values[-1:].expand(-len(values) % self.frames, -1, -1, -1)])
        values = values.view(-1, self.frames, self.look.channels, h, self.merge, self.patch, w, self.merge, self.patch)
        return values.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).flatten(3)

    def blank(self) -> torch.Tensor:
        return torch.zeros(1, 1, 1, self.unit**2 * self.look.channels * self.frames)

    def run(self, tower: PreTrainedModel, clips: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[Grid]]:
        patches = torch.cat([clip.reshape(-1, clip.shape[-1] // self.merge**2) for clip in clips])
        grids = torch.tensor([[len(clip), *(side * self.merge for side in clip.shape[1:3])] for clip in clips])
        seen = tower(patches, grid_thw=grids.to(patches.device)).pooler_output
        return seen, [tuple(clip.shape[1:3]) for clip in clips for _ in clip]


class VisionEncoder(Encoder):
    """Options: `image_size` and `fit` (stretch, crop, pad) of towers of a fixed size; `min_pixels` and `max_pixels` of
    the others; `mean` and `std`. What is not given comes from the folder's preprocessor config.
    """

    item_options = PICTURE_OPTIONS
    has_times = False  # of frames, to be embedded

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
        self.kind = _kind(skeleton, preprocessor_settings(folder, "image_processor"), options)
        self.tower: PreTrainedModel = type(skeleton)(skeleton.config)
        self.projector = build_projector(projector, self.kind.width, width, 2, self.has_times)

    @property
    def pretrained(self) -> PreTrainedModel:
        return self.tower

    @cached_property
    def work(self) -> Work:
        return self.kind.work(self.tower)

    def measure(self, media: Media) -> Size:
        return self.size_of(media, 1, *picture_size(media))

    def size_of(self, media: Media, frames: int, height: int, width: int) -> Size:
        if max(height, width) >= LONGEST_ASPECT * min(height, width):
            raise BadMedia(f"{media.name}: {width} x {height} is too long and thin to be seen")
        grid, steps = self.kind.grid(height, width), self.kind.steps(frames)
        cost = self.work.flops(self.kind.tokens(grid)) + self.projector.flops(grid, self.work.trained)
        return Size(steps * self.projector.places(grid), steps * cost)

    def prepare(self, media: Media) -> Inputs:
        image = read_picture(media, self.kind.look.channels)
        return {"pixel_values": self.kind.clip([image], self.kind.grid(image.height, image.width))}

    def blank(self) -> Inputs:
        return {"pixel_values": self.kind.blank()}

    def encode(self, items: Sequence[Inputs]) -> torch.Tensor:
        features: torch.Tensor = self.projector(*self.kind.run(self.tower, [item["pixel_values"] for item in items]))
        return features

    def preview(self, media: Media) -> str:
        return self.seen(read_picture(media, self.kind.look.channels), media.name)

    def seen(self, image: "Image", title: str, side: int = 128) -> str:
        """A picture as the tower sees it."""
        fitted = self.kind.fitted(image, self.kind.grid(image.height, image.width))
        return thumbnail(
            fitted, f"{title}: {image.width} x {image.height}, seen as {fitted.width} x {fitted.height}", side
        )


def thumbnail(image: "Image", title: str, side: int = 128) -> str:
    small = image.copy()
    small.thumbnail((side, side))
    data = io.BytesIO()
    small.save(data, format="PNG")
    source = base64.b64encode(data.getvalue()).decode()
    return f'<img src="data:image/png;base64,{source}" title="{html.escape(title)}" alt="{html.escape(title)}">'


def _kind(skeleton: PreTrainedModel, settings: dict[str, Any], options: dict[str, Any]) -> Kind:
    """Options first, then the published settings, then what the tower's config says."""
    config = skeleton.config
    channels = getattr(config, "num_channels", None) or getattr(config, "in_channels", None) or 3
    normalized = settings.get("do_normalize", True)
    mean = options["mean"] or (settings.get("image_mean", [0.5] * channels) if normalized else [0.0] * channels)
    std = options["std"] or (settings.get("image_std", [0.5] * channels) if normalized else [1.0] * channels)
    if len(mean) != channels or len(std) != channels:
        raise UserError(f"encoder.mean: the tower has {channels} channels; give as many numbers in mean and std")
    look = Look(mean, std, settings.get("resample", 3), channels)
    size = settings.get("size") or {}
    size = size if isinstance(size, dict) else {"height": size, "width": size}
    if takes(skeleton, "grid_thw"):
        _refuse(options, ("image_size", "fit"), "its tower takes pictures of any size; give min_pixels and max_pixels")
        least = options["min_pixels"] or settings.get("min_pixels") or size.get("shortest_edge")
        most = options["max_pixels"] or settings.get("max_pixels") or size.get("longest_edge")
        return PatchGrid(skeleton, look, least, most)
    if takes(skeleton, "spatial_shapes"):
        _refuse(options, ("image_size", "fit", "min_pixels"), "its tower takes as many patches as max_pixels allows")
        most = (options["max_pixels"] or 0) // config.patch_size**2 or settings.get("max_num_patches")
        return PatchList(skeleton, look, most or config.num_patches)
    _refuse(options, ("min_pixels", "max_pixels"), "its tower takes pictures of one size; give image_size")
    crop = settings.get("crop_size") if settings.get("do_center_crop") else None
    crop = crop if isinstance(crop, dict) or crop is None else {"height": crop, "width": crop}
    shape = crop or (size if "height" in size else None)
    published = (shape["height"], shape["width"]) if shape else getattr(config, "image_size", None)
    wanted = options["image_size"] or published
    if wanted is None:
        raise UserError("encoder.image_size: the tower's config has none; give it")
    height, width = _pair(wanted)
    fit = options["fit"] or ("crop" if crop else "stretch")
    if fit not in FITS:
        raise UserError(f"encoder.fit: {fit!r} is none of {', '.join(FITS)}")
    edge = size.get("shortest_edge") if crop and not options["image_size"] else None
    return FixedSize(skeleton, look, (height, width), fit, edge or max(height, width))


def _refuse(options: dict[str, Any], names: Sequence[str], reason: str) -> None:
    for name in names:
        if options[name] is not None:
            raise UserError(f"encoder.{name}: {reason}")


def _pair(value: Any) -> tuple[int, int]:
    height, width = (value, value) if isinstance(value, int) else value
    return height, width
