"""Image encoder that wraps any Hugging Face vision tower, for images of a fixed size or of variable resolution.

The arguments of a tower's forward determine its input format (`TowerInput`). An image is treated as a video with one
frame, so the video encoder shares this code and only adds the times of its frames.
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
from omnizoo.modalities.files.decoding import IMAGE_OPTIONS
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
MAX_ASPECT_RATIO = 200  # maximum ratio of an image's sides; beyond it, the shorter side would be rounded to 0


@dataclass(frozen=True)
class PixelFormat:
    """Normalization and resizing of pixels for a tower."""

    mean: Sequence[float]
    std: Sequence[float]
    resample: int  # filter number of Pillow
    channels: int

    def __post_init__(self) -> None:
        if not all(value > 0 for value in self.std):
            raise UserError(f"encoder.std: {list(self.std)} is not valid; expected numbers greater than 0")

    def resize(self, image: "Image", height: int, width: int) -> "Image":
        """Resize an image with the filter of the tower's processor."""
        return image.resize((width, height), self.resample)

    def tensor(self, images: "Sequence[Image]") -> torch.Tensor:
        """Return the normalized images `[images, channels, height, width]`."""
        values = torch.stack([to_bytes(image) / 255 for image in images])
        mean = torch.tensor(self.mean).view(-1, 1, 1)
        std = torch.tensor(self.std).view(-1, 1, 1)
        return (values - mean) / std


class TowerInput:
    """Base class of tower input formats. Videos are tensors whose first dimension is time."""

    pixel_format: PixelFormat
    width: int  # width of the features

    def grid(self, height: int, width: int) -> Grid:
        """Return the grid of features for an image of this size."""
        raise NotImplementedError

    def tokens(self, grid: Grid) -> int:
        """Return how many tower tokens attend to each other, for one grid of features."""
        return math.prod(grid)

    def work(self, tower: PreTrainedModel) -> TowerFlops:
        """Return the FLOPs of the tower as a function of its tokens."""
        return TowerFlops.of(tower)

    def steps(self, frames: int) -> int:
        """Return the number of grids (time steps) of a video with `frames` frames."""
        return frames

    def fitted(self, image: "Image", grid: Grid) -> "Image":
        """Return the image resized for the tower, before normalization."""
        raise NotImplementedError

    def frame_values(self, images: "Sequence[Image]", grid: Grid) -> torch.Tensor:
        """Return the normalized frames `[frames, channels, height, width]`."""
        return self.pixel_format.tensor([self.fitted(image, grid) for image in images])

    def dummy_input(self) -> torch.Tensor:
        """Return the frames of the smallest video."""
        raise NotImplementedError

    def run(self, tower: PreTrainedModel, videos: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[Grid]]:
        """Call the tower once for all videos. Return features `[N, width]` and the grid of each step, in order."""
        raise NotImplementedError


class FixedSize(TowerInput):
    """Input of towers that accept `pixel_values [images, channels, height, width]` of one size."""

    def __init__(
        self, skeleton: PreTrainedModel, pixel_format: PixelFormat, size: tuple[int, int], fit: str, edge: int
    ) -> None:
        self.pixel_format = pixel_format
        self.size = size
        self.fit = fit
        self.edge = edge
        native = _pair(getattr(skeleton.config, "image_size", None) or size)
        self.interpolate = size != native and takes(skeleton, "interpolate_pos_encoding")

        probe = torch.zeros(1, pixel_format.channels, *size, device="meta")
        try:
            with torch.no_grad():
                features = self._encode(skeleton, probe)
        except (ValueError, RuntimeError) as error:
            reason = first_line(error)
            raise UserError(f"encoder.image_size: the tower rejects images of {list(size)}: {reason}") from error
        self.measured = measured_flops(lambda: self._encode(skeleton, probe))
        num_features = features.shape[1]
        self.width = features.shape[-1]

        patch = getattr(skeleton.config, "patch_size", None)
        self._grid: Grid = (0, 0)
        if patch:
            patch_height, patch_width = _pair(patch)
            self._grid = (size[0] // patch_height, size[1] // patch_width)
        self.extra = num_features - math.prod(self._grid)  # class token and registers, before the patches
        if patch is None or self.extra < 0:  # the tower merges its patches
            side = math.isqrt(num_features)
            self._grid = (side, side) if side**2 == num_features else (1, num_features)
            self.extra = 0

    def grid(self, height: int, width: int) -> Grid:
        return self._grid

    def tokens(self, grid: Grid) -> int:
        return math.prod(grid) + self.extra

    def work(self, tower: PreTrainedModel) -> TowerFlops:
        """Return the measured FLOPs. They are constant, because all images have the same size."""
        trained = is_trained(tower)
        return TowerFlops(trained, per_item=self.measured[trained])

    def dummy_input(self) -> torch.Tensor:
        return torch.zeros(1, self.pixel_format.channels, *self.size)

    def run(self, tower: PreTrainedModel, videos: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[Grid]]:
        features = self._encode(tower, torch.cat(list(videos)))[:, self.extra :]
        return features.flatten(0, 1), [self._grid] * features.shape[0]

    def _encode(self, tower: PreTrainedModel, values: torch.Tensor) -> torch.Tensor:
        """Return features `[images, features of an image, width]`, including class token and registers."""
        options = {"interpolate_pos_encoding": True} if self.interpolate else {}
        features: torch.Tensor = tower(pixel_values=values, **options).last_hidden_state
        if features.ndim == 4:  # [images, width, rows, columns], from convolutional towers
            return features.flatten(2).transpose(1, 2)
        return features

    def fitted(self, image: "Image", grid: Grid) -> "Image":
        height, width = self.size
        if self.fit == "stretch":
            return self.pixel_format.resize(image, height, width)
        if self.fit == "crop":  # resize the shorter side to `edge`, then crop the center
            short = min(image.height, image.width)
            image = self.pixel_format.resize(image, self.edge * image.height // short, self.edge * image.width // short)
        else:
            scale = min(height / image.height, width / image.width)
            image = self.pixel_format.resize(
                image, max(1, round(image.height * scale)), max(1, round(image.width * scale))
            )
        left = (image.width - width) // 2
        top = (image.height - height) // 2
        return image.crop((left, top, left + width, top + height))  # PIL fills areas outside the image with black


class PatchList(TowerInput):
    """Input of towers that accept `pixel_values [images, patches, values per patch]` and `spatial_shapes [images, 2]`.

    The number of patches is limited.
    """

    def __init__(self, skeleton: PreTrainedModel, pixel_format: PixelFormat, max_patches: int) -> None:
        self.pixel_format = pixel_format
        self.patch = skeleton.config.patch_size
        self.max_patches = max_patches
        self.width = skeleton.config.hidden_size

    def grid(self, height: int, width: int) -> Grid:
        def scaled(scale: float) -> Grid:
            return tuple(max(1, math.ceil(side * scale / self.patch)) for side in (height, width))

        # Bisect for the largest scale within the budget. Small images are enlarged, as in pretraining.
        fits = 0.0
        too_large = 100.0
        while too_large - fits > 1e-6 * too_large:
            middle = (fits + too_large) / 2
            if math.prod(scaled(middle)) <= self.max_patches:
                fits = middle
            else:
                too_large = middle
        return scaled(fits)

    def fitted(self, image: "Image", grid: Grid) -> "Image":
        return self.pixel_format.resize(image, grid[0] * self.patch, grid[1] * self.patch)

    def frame_values(self, images: "Sequence[Image]", grid: Grid) -> torch.Tensor:
        """Return the patches `[frames, rows, columns, values per patch]`, so the grid can be read from the shape."""
        frames = super().frame_values(images, grid).movedim(1, -1)
        return torch.stack([to_patches(frame, self.patch).unflatten(0, grid) for frame in frames])

    def dummy_input(self) -> torch.Tensor:
        return torch.zeros(1, 1, 1, self.patch**2 * self.pixel_format.channels)

    def run(self, tower: PreTrainedModel, videos: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[Grid]]:
        frames = [frame for video in videos for frame in video]
        grids: list[Grid] = [tuple(frame.shape[:2]) for frame in frames]
        lengths = [math.prod(grid) for grid in grids]
        device = frames[0].device
        values = torch.nn.utils.rnn.pad_sequence([frame.flatten(0, 1) for frame in frames], batch_first=True)
        mask = torch.arange(max(lengths), device=device) < torch.tensor(lengths, device=device)[:, None]
        shapes = torch.tensor(grids, device=device)
        padded = tower(pixel_values=values, pixel_attention_mask=mask.int(), spatial_shapes=shapes).last_hidden_state
        features = [frame_features[:length] for frame_features, length in zip(padded, lengths, strict=True)]
        return torch.cat(features), grids


class PatchGrid(TowerInput):
    """Input of towers that accept the patches of all videos as one sequence, with `grid_thw`.

    A feature covers `merge` x `merge` patches of `temporal_patch_size` frames.
    """

    def __init__(
        self, skeleton: PreTrainedModel, pixel_format: PixelFormat, min_pixels: int | None, max_pixels: int | None
    ) -> None:
        config = skeleton.config
        self.pixel_format = pixel_format
        self.patch: int = config.patch_size
        self.merge: int = config.spatial_merge_size
        self.frames: int = config.temporal_patch_size
        self.unit = self.patch * self.merge  # side of the square that a feature covers, in pixels
        self.width = getattr(config, "out_hidden_size", None) or config.hidden_size
        self.min_pixels = min_pixels or 4 * self.unit**2
        self.max_pixels = max_pixels or 1280 * self.unit**2
        if not self.unit**2 <= self.min_pixels <= self.max_pixels:
            raise UserError(
                f"encoder.max_pixels: min_pixels is {self.min_pixels} and max_pixels is {self.max_pixels}; expected "
                f"min_pixels <= max_pixels, and both at least {self.unit**2}, the pixels of one feature"
            )

    def grid(self, height: int, width: int) -> Grid:
        """Return the grid. The size is rounded to multiples of `unit`, and scaled to the pixel budget if necessary."""
        nearest = (round(height / self.unit), round(width / self.unit))
        area = math.prod(nearest) * self.unit**2
        if area > self.max_pixels:
            scale = math.sqrt(height * width / self.max_pixels)
            return tuple(max(1, math.floor(side / scale / self.unit)) for side in (height, width))
        if area < self.min_pixels:
            scale = math.sqrt(self.min_pixels / (height * width))
            return tuple(math.ceil(side * scale / self.unit) for side in (height, width))
        return nearest

    def tokens(self, grid: Grid) -> int:
        return math.prod(grid) * self.merge**2

    def steps(self, frames: int) -> int:
        return -(-frames // self.frames)

    def fitted(self, image: "Image", grid: Grid) -> "Image":
        return self.pixel_format.resize(image, grid[0] * self.unit, grid[1] * self.unit)

    def frame_values(self, images: "Sequence[Image]", grid: Grid) -> torch.Tensor:
        """Return a tensor `[steps, rows, columns, values per feature]`, so the grid can be read from its shape."""
        h, w = grid
        values = super().frame_values(images, grid)
        # The last frame is repeated to fill the last step.
        repeated_last = values[-1:].expand(-len(values) % self.frames, -1, -1, -1)
        values = torch.cat([values, repeated_last])
        values = values.view(
            -1, self.frames, self.pixel_format.channels, h, self.merge, self.patch, w, self.merge, self.patch
        )
        return values.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).flatten(3)

    def dummy_input(self) -> torch.Tensor:
        return torch.zeros(1, 1, 1, self.unit**2 * self.pixel_format.channels * self.frames)

    def run(self, tower: PreTrainedModel, videos: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[Grid]]:
        patches = torch.cat([video.reshape(-1, video.shape[-1] // self.merge**2) for video in videos])
        patch_grids: list[list[int]] = []  # steps, rows and columns of patches of each video
        step_grids: list[Grid] = []
        for video in videos:
            steps, rows, columns = video.shape[:3]
            patch_grids.append([steps, rows * self.merge, columns * self.merge])
            step_grids += [(rows, columns)] * steps
        features = tower(patches, grid_thw=torch.tensor(patch_grids).to(patches.device)).pooler_output
        return features, step_grids


class VisionEncoder(Encoder):
    """Encoder for images.

    The defaults of options come from the preprocessor config of the folder, or from the config of the tower.

    Args:
        width: Width of the foundation.
        config: Config of the tower, or of a model that contains it.
        folder: Model folder with the preprocessor config.
        projector: `kind` and options of the projector.
        image_size: Height and width in pixels, or one number for square images. Only for towers of a fixed size.
        fit: `stretch`, `crop` or `pad`. Only for towers of a fixed size.
        min_pixels: Minimum number of pixels after resizing. Only for towers with `grid_thw`.
        max_pixels: Maximum number of pixels after resizing. Only for towers of variable resolution.
        mean: Mean of each channel, for normalization.
        std: Standard deviation of each channel, for normalization.
    """

    item_options = IMAGE_OPTIONS
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
        settings, _ = processor_settings(folder, "image_processor")
        self.kind = _tower_input(skeleton, settings, options)
        self.tower: PreTrainedModel = type(skeleton)(skeleton.config)
        self.projector = build_projector(projector, self.kind.width, width, 2, self.has_times)

    @property
    def pretrained(self) -> PreTrainedModel:
        return self.tower

    @cached_property
    def work(self) -> TowerFlops:
        """FLOPs of the tower."""
        return self.kind.work(self.tower)

    def measure(self, media: Media) -> MediaSize:
        return self.size_of(media, 1, *image_size(media))

    def size_of(self, media: Media, frames: int, height: int, width: int) -> MediaSize:
        """Return the size of a video with `frames` frames of this height and width."""
        if max(height, width) >= MAX_ASPECT_RATIO * min(height, width):
            raise BadMedia(
                f"{media.name}: the size is {width} x {height}, but one side must be less than {MAX_ASPECT_RATIO} "
                "times as long as the other"
            )
        grid = self.kind.grid(height, width)
        steps = self.kind.steps(frames)
        cost = self.work.flops(self.kind.tokens(grid)) + self.projector.flops(grid, self.work.trained)
        return MediaSize(steps * self.projector.num_outputs(grid), steps * cost)

    def prepare(self, media: Media) -> Inputs:
        image = read_image(media, self.kind.pixel_format.channels)
        grid = self.kind.grid(image.height, image.width)
        return {"pixel_values": self.kind.frame_values([image], grid)}

    def dummy_input(self) -> Inputs:
        return {"pixel_values": self.kind.dummy_input()}

    def encode(self, items: Sequence[Inputs]) -> torch.Tensor:
        features, grids = self.kind.run(self.tower, [item["pixel_values"] for item in items])
        projected: torch.Tensor = self.projector(features, grids)
        return projected

    def preview(self, media: Media) -> str:
        return self.show(read_image(media, self.kind.pixel_format.channels), media.name)

    def show(self, image: "Image", title: str, side: int = 128) -> str:
        """Return HTML that shows an image as the tower receives it."""
        fitted = self.kind.fitted(image, self.kind.grid(image.height, image.width))
        sizes = f"{image.width} x {image.height}, resized to {fitted.width} x {fitted.height}"
        return thumbnail(fitted, f"{title}: {sizes}", side)


def _tower_input(skeleton: PreTrainedModel, settings: dict[str, Any], options: dict[str, Any]) -> TowerInput:
    """Return the input format of the tower.

    Options take precedence over the folder's settings, and these take precedence over the tower's config.
    """
    config = skeleton.config
    pixel_format = _pixel_format(config, settings, options)

    if takes(skeleton, "grid_thw"):
        reason = "not supported, because the tower accepts images of any size. Set min_pixels and max_pixels."
        _check_unset(options, ("image_size", "fit"), reason)
        size = _edges(settings.get("size"))
        min_pixels = options["min_pixels"] or settings.get("min_pixels") or size.get("shortest_edge")
        max_pixels = options["max_pixels"] or settings.get("max_pixels") or size.get("longest_edge")
        return PatchGrid(skeleton, pixel_format, min_pixels, max_pixels)

    if takes(skeleton, "spatial_shapes"):
        reason = "not supported, because the tower accepts images of any size. Set max_pixels."
        _check_unset(options, ("image_size", "fit", "min_pixels"), reason)
        max_patches = (options["max_pixels"] or 0) // config.patch_size**2 or settings.get("max_num_patches")
        return PatchList(skeleton, pixel_format, max_patches or config.num_patches)

    reason = "not supported, because the tower accepts images of one size. Set image_size."
    _check_unset(options, ("min_pixels", "max_pixels"), reason)
    return _fixed_size(skeleton, pixel_format, settings, options)


def _pixel_format(config: Any, settings: dict[str, Any], options: dict[str, Any]) -> PixelFormat:
    """Return the normalization and the resizing filter. Options take precedence over the settings of the folder."""
    channels = getattr(config, "num_channels", None) or getattr(config, "in_channels", None) or 3
    if settings.get("do_normalize", True):
        mean = settings.get("image_mean", [0.5] * channels)
        std = settings.get("image_std", [0.5] * channels)
    else:
        mean = [0.0] * channels
        std = [1.0] * channels
    mean = options["mean"] or mean
    std = options["std"] or std
    if len(mean) != channels or len(std) != channels:
        raise UserError(
            f"encoder.mean: mean has {len(mean)} numbers and std has {len(std)}, but the tower has {channels} channels"
        )
    return PixelFormat(mean=mean, std=std, resample=settings.get("resample", 3), channels=channels)


def _fixed_size(
    skeleton: PreTrainedModel, pixel_format: PixelFormat, settings: dict[str, Any], options: dict[str, Any]
) -> TowerInput:
    """Return the input format of a tower that accepts images of one size."""
    size = _edges(settings.get("size"))
    crop = _edges(settings.get("crop_size")) if settings.get("do_center_crop") else {}
    published_size = crop or size
    image_size = options["image_size"]
    if not image_size and "height" in published_size:
        image_size = (published_size["height"], published_size["width"])
    image_size = image_size or getattr(skeleton.config, "image_size", None)
    if image_size is None:
        raise UserError("encoder.image_size: not set, and the tower's config has no image_size. Set height and width.")
    height, width = _pair(image_size)

    fit = options["fit"] or ("crop" if crop else "stretch")
    if fit not in FITS:
        raise UserError(f"encoder.fit: {fit!r} is unknown. Use one of {', '.join(FITS)}.")
    edge = size.get("shortest_edge") if crop and not options["image_size"] else None
    return FixedSize(skeleton, pixel_format, (height, width), fit, edge or max(height, width))


def _edges(size: Any) -> dict[str, int]:
    """Return a size from processor settings as a mapping, keyed by edge name. A number is the edge of a square."""
    if isinstance(size, dict):
        return size
    return {"height": size, "width": size} if size else {}


def _check_unset(options: dict[str, Any], names: Sequence[str], reason: str) -> None:
    """Raise a `UserError` if an option that the tower does not support is set."""
    for name in names:
        if options[name] is not None:
            raise UserError(f"encoder.{name}: {reason}")


def _pair(value: Any) -> tuple[int, int]:
    """Return (height, width) of a size that may be one number."""
    height, width = (value, value) if isinstance(value, int) else value
    return height, width
