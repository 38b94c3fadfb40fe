"""Items that a diffusion transformer learns to generate as a whole: images, clips, and encoded latents.

The modules only measure and prepare items. A frozen autoencoder, which is not part of the modality, encodes pixels.
"""

import math
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol, cast

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from omnizoo.modalities.base import Decoder, Modality
from omnizoo.modalities.files.decoding import IMAGE_OPTIONS, VIDEO_OPTIONS, optional
from omnizoo.modalities.files.image import image_size, read_image
from omnizoo.modalities.files.video import read_frames, sample_times, video_info
from omnizoo.modalities.item import Inputs, MediaSize
from omnizoo.modalities.media import BadMedia, Media

LATENTS = "latents"  # name of encoded items in rows
EMPTY_TEXT = "empty_text"  # option of an encoded item: whether its prompt is replaced by the empty prompt
CROPS = ("center", "random")
ENCODER_FLOPS = 1e5  # rough FLOPs of an autoencoder per value, to balance the encoding of items over ranks


class PixelShape(NamedTuple):
    """Shape of an item before it is encoded."""

    frames: int | None  # None for an image
    height: int
    width: int

    @classmethod
    def parse(cls, text: str) -> "PixelShape":
        """Return the shape that a config describes as `HEIGHTxWIDTH` or `HEIGHTxWIDTHxFRAMES`."""
        height, width, *frames = map(int, text.split("x"))
        return cls(frames[0] if frames else None, height, width)

    def __str__(self) -> str:
        size = f"{self.height}x{self.width}"
        return size if self.frames is None else f"{size}x{self.frames}"


class LatentGeometry(Protocol):
    """The sizes of latents, without the weights of the autoencoder."""

    def latent_shape(self, frames: int | None, height: int, width: int) -> tuple[int, ...]:
        """Return the shape of the normalized latents of an item, channels first."""

    def normalized_shape(self, latent_shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of latents after normalization, which may turn patches to channels."""

    def latent_tokens(self, latent_shape: Sequence[int]) -> int:
        """Return the number of tokens of the transformer for latents of this shape."""


class DenoisedItem(Decoder):
    """Base class of the items that a diffusion transformer generates.

    Args:
        geometry: Sizes of latents.
        shapes: The shapes to which items are resized and cropped.
        crop: Part of a resized item that is kept, one of `CROPS`.
        frame_rate: Frames per second that are sampled; None for all frames.
    """

    def __init__(
        self,
        geometry: LatentGeometry,
        shapes: Sequence[PixelShape],
        crop: str = "center",
        frame_rate: float | None = None,
    ) -> None:
        super().__init__()
        self.geometry = geometry
        self.shapes = shapes
        self.crop = crop
        self.frame_rate = frame_rate

    def size_of(self, latent_shape: tuple[int, ...], cost: float) -> MediaSize:
        """Return the size of an item with latents of this shape."""
        tokens = self.geometry.latent_tokens(latent_shape)
        return MediaSize(num_placeholders=tokens, cost=cost, targets=1, shape=latent_shape)

    def text_tokens(self, media: Media) -> int | None:
        """Return the number of text tokens of an item with an encoded prompt; None if the prompt is not encoded."""
        return None

    def pixel_size(self, shape: PixelShape) -> MediaSize:
        """Return the size of an item with pixels of this shape."""
        values = 3 * (shape.frames or 1) * shape.height * shape.width
        return self.size_of(self.geometry.latent_shape(*shape), ENCODER_FLOPS * values)

    def fit(self, images: Sequence[Any], shape: PixelShape, media: Media) -> torch.Tensor:
        """Return images as bytes `[images, 3, height, width]`: resized to cover the shape, and cropped."""
        centering = (0.5, 0.5)
        if self.crop == "random":
            x, y = media.random.random(2)
            centering = (float(x), float(y))
        fit = optional("PIL.ImageOps").fit
        resample = optional("PIL.Image").Resampling.LANCZOS
        fitted = [fit(image, (shape.width, shape.height), resample, centering=centering) for image in images]
        return torch.from_numpy(np.stack([np.asarray(image, np.uint8) for image in fitted])).permute(0, 3, 1, 2)


def nearest_aspect(shapes: Sequence[PixelShape], height: int, width: int) -> PixelShape:
    """Return the shape whose aspect ratio is nearest to that of an item.

    Among shapes with the same aspect ratio, it is the largest that needs no enlargement, otherwise the smallest.
    """

    def rank(shape: PixelShape) -> tuple[float, bool, int]:
        difference = abs(math.log(shape.height * width / (shape.width * height)))
        is_enlarged = shape.height > height or shape.width > width
        area = shape.height * shape.width
        return round(difference, 6), is_enlarged, area if is_enlarged else -area

    return min(shapes, key=rank)


class ImageItem(DenoisedItem):
    """An image. A model of clips learns it as a clip with one frame."""

    item_options = IMAGE_OPTIONS

    def measure(self, media: Media) -> MediaSize:
        return self.pixel_size(self._shape(media))

    def prepare(self, media: Media) -> Inputs:
        shape = self._shape(media)
        pixels = self.fit([read_image(media)], shape, media)
        return {"pixels": pixels[0].contiguous() if shape.frames is None else pixels.movedim(0, 1).contiguous()}

    def _shape(self, media: Media) -> PixelShape:
        """Return the shape to which an image is resized and cropped."""
        stills = [shape for shape in self.shapes if shape.frames in (None, 1)]
        if not stills:
            listed = ", ".join(map(str, self.shapes))
            raise BadMedia(f"{media.name}: an image needs a shape without frames, but data.shapes has {listed}")
        return nearest_aspect(stills, *image_size(media))


class ClipItem(DenoisedItem):
    """A clip of frames."""

    item_options = VIDEO_OPTIONS
    default_rate: ClassVar[float] = 16.0  # of lists of frames without a rate

    def measure(self, media: Media) -> MediaSize:
        shape, _ = self._shape(media)
        return self.pixel_size(shape)

    def prepare(self, media: Media) -> Inputs:
        shape, times = self._shape(media)
        images = read_frames(media, times, self.default_rate)
        return {"pixels": self.fit(images, shape, media).movedim(0, 1).contiguous()}

    def _shape(self, media: Media) -> tuple[PixelShape, list[float]]:
        """Return the shape of a clip, and the times of its frames in seconds."""
        video = video_info(media, self.default_rate)
        times = video.display_times(range(video.frames))
        if self.frame_rate is not None and self.frame_rate < video.rate:
            times = sample_times(video.seconds, self.frame_rate, max(1, int(video.seconds * self.frame_rate + 1e-6)))
        clips = [shape for shape in self.shapes if shape.frames is not None and shape.frames <= len(times)]
        if not clips:
            listed = ", ".join(map(str, self.shapes))
            raise BadMedia(
                f"{media.name}: the clip has {len(times)} frames, fewer than each shape with frames in data.shapes "
                f"({listed}). Add a shape with fewer frames."
            )
        num_frames = max(shape.frames or 1 for shape in clips)
        longest = [shape for shape in clips if shape.frames == num_frames]
        return nearest_aspect(longest, video.height, video.width), times[:num_frames]


class EncodedItem(Protocol):
    """An item that was encoded before the run, with or without its prompt."""

    @property
    def name(self) -> str:
        """The name of the item in messages."""

    @property
    def latent_shape(self) -> tuple[int, ...]:
        """The shape of the latents before normalization, channels first. No tensor is read for it."""

    @property
    def text_tokens(self) -> int | None:
        """Number of text tokens of the prompt; None if the prompt is not encoded."""

    @property
    def empty_text_tokens(self) -> int | None:
        """Number of text tokens of the empty prompt; None if it is not encoded."""

    def read(self, empty_text: bool) -> Inputs:
        """Return `mean`, `std` (if it exists) and the conditions, such as `text`.

        With `empty_text`, the conditions are those of the empty prompt.
        """


class LatentFile:
    """Encoded latents in a safetensors file: the tensor `mean`, and `std` if they are a distribution.

    Other tensors are conditions, such as `text`. The prompt is encoded in training if the file has no `text`.
    """

    empty_text_tokens = None

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def name(self) -> str:
        """The path of the file."""
        return str(self.path)

    @cached_property
    def _shapes(self) -> dict[str, list[int]]:
        """The shapes of the tensors, from the header of the file."""
        try:
            with safe_open(self.path, "pt") as file:
                shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 (no mapping)
        except (OSError, SafetensorError) as error:
            raise BadMedia(f"{self.path}: not a safetensors file: {error}") from None
        if "mean" not in shapes:
            raise BadMedia(f"{self.path}: no tensor `mean` with the latents; it has {', '.join(shapes) or 'none'}")
        return shapes

    @property
    def latent_shape(self) -> tuple[int, ...]:
        """The shape of the latents before normalization."""
        return tuple(self._shapes["mean"])

    @property
    def text_tokens(self) -> int | None:
        """Number of text tokens; None if the prompt is not encoded."""
        return self._shapes["text"][0] if "text" in self._shapes else None

    def read(self, empty_text: bool) -> Inputs:
        """Return the tensors of the file."""
        try:
            tensors: Inputs = load_file(self.path)
        except (OSError, SafetensorError) as error:
            raise BadMedia(f"{self.path}: cannot be read: {error}") from None
        return tensors


def encoded_value(media: Media) -> EncodedItem:
    """Return the value of an item of `LatentItem`."""
    return cast(EncodedItem, media.value)


class LatentItem(DenoisedItem):
    """An item that was encoded before the run. Its value is an `EncodedItem`."""

    item_options = (EMPTY_TEXT,)

    def measure(self, media: Media) -> MediaSize:
        encoded = encoded_value(media)
        shape = self.geometry.normalized_shape(encoded.latent_shape)
        return self.size_of(shape, float(math.prod(shape)))

    def text_tokens(self, media: Media) -> int | None:
        encoded = encoded_value(media)
        if encoded.text_tokens is None or not media.options.get(EMPTY_TEXT):
            return encoded.text_tokens
        if encoded.empty_text_tokens is None:
            raise BadMedia(f"{encoded.name}: data.text_dropout needs the encoded empty prompt, which the item lacks")
        return encoded.empty_text_tokens

    def prepare(self, media: Media) -> Inputs:
        encoded = encoded_value(media)
        tensors = encoded.read(bool(media.options.get(EMPTY_TEXT)))
        for name, tensor in tensors.items():
            if tensor.is_floating_point() and not tensor.isfinite().all():
                raise BadMedia(f"{encoded.name}: the tensor `{name}` has values that are not finite. Encode it again.")
        return tensors


ITEMS = {"image": ImageItem, "video": ClipItem, LATENTS: LatentItem}


def denoised_modalities(
    names: Sequence[str],
    geometry: LatentGeometry,
    shapes: Sequence[str] = (),
    crop: str = "center",
    frame_rate: float | None = None,
) -> dict[str, Modality]:
    """Return the modalities of a diffusion transformer, keyed by name.

    Args:
        names: Names of the fields of rows with items that the model generates.
        geometry: Sizes of latents.
        shapes: The shapes of `data.shapes`.
        crop: Part of a resized item that is kept.
        frame_rate: Frames per second that are sampled; None for all frames.
    """
    parsed = [PixelShape.parse(shape) for shape in shapes]
    modalities = {}
    for name in (*names, LATENTS):
        item = ITEMS[name](geometry, parsed, crop, frame_rate)
        modalities[name] = Modality(name=name, encoder=None, decoder=item, begin="", placeholder="", end="")
    return modalities
