"""Read images from files, bytes and arrays: their pixels, and their sizes (from the header, without decoding)."""

import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
import numpy.typing as npt
import torch

from omnizoo.modalities.files.decoding import check_pixels, media_errors, optional
from omnizoo.modalities.files.tiff import check_tiff
from omnizoo.modalities.media import BadMedia, Media

if TYPE_CHECKING:
    from PIL.Image import Image


DEFLATE_RATIO = 1032  # maximum compression ratio of deflate
PNG_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # color type -> number of channels
MAX_SCANS = 100  # in a progressive JPEG; encoders write about 10 scans, and each takes a pass over all pixels
JPEG_FORMATS = ("JPEG", "MPO")  # names that Pillow gives to JPEG files with one image, and with several
ADAM7 = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))

# Excludes formats that run another program (PostScript) or open other files.
IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "JPEG2000")


def image_size(media: Media) -> tuple[int, int]:
    """Return (height, width) of the upright image, without decoding it."""
    with _image(media) as (image, orientation):
        return (image.width, image.height) if orientation >= 5 else (image.height, image.width)


def read_image(media: Media, channels: int = 3) -> "Image":
    """Return the upright image in RGB, or in gray for one channel. For an animation, return its first frame."""
    transpose = optional("PIL.Image").Transpose
    upright = {2: transpose.FLIP_LEFT_RIGHT, 3: transpose.ROTATE_180, 4: transpose.FLIP_TOP_BOTTOM}
    upright |= {5: transpose.TRANSPOSE, 6: transpose.ROTATE_270, 7: transpose.TRANSVERSE, 8: transpose.ROTATE_90}
    with _image(media) as (image, orientation):
        if image.info.get("progressive"):
            _check_scans(media)
        image.load()
        if image.format == "PNG":
            _check_png_rows(media, image)
        if image.mode == "F" or (image.mode == "I" and image.format != "PPM"):
            raise BadMedia(f"{media.name}: the range of 32-bit pixels is unknown. Store the image with 8 or 16 bits.")
        if image.mode.startswith("I"):  # Pillow clips 16-bit values to 8 bits instead of scaling them
            high_bytes = (np.asarray(image) >> 8).astype(np.uint8)
            image = optional("PIL.Image").fromarray(high_bytes)
        image = image.convert("L" if channels == 1 else "RGB")
        return image.transpose(upright[orientation]) if orientation in upright else image


def to_bytes(image: "Image") -> torch.Tensor:
    """Return the pixels `[C, H, W]` of a PIL image."""
    return torch.from_numpy(np.atleast_3d(np.array(image, np.uint8))).permute(2, 0, 1).contiguous()


@contextmanager
def _image(media: Media) -> Iterator[tuple["Image", int]]:
    """Yield the image and its EXIF orientation (1: upright). The pixels of a file are not decoded yet."""
    library = optional("PIL.Image")
    with media_errors(media), ExitStack() as stack:
        if isinstance(media.value, library.Image):
            image = media.value
        elif isinstance(media.value, Path | bytes):
            raw = stack.enter_context(media.open())
            check_tiff(media, raw)
            image = stack.enter_context(library.open(raw, formats=IMAGE_FORMATS))
            _check_file_size(media, image, raw)
        else:
            image = library.fromarray(_image_array(media))
        check_pixels(media, image.height, image.width)
        # To find EXIF data after the pixels of a PNG, Pillow would decode the image. `read_image` also ignores such
        # data.
        reads_exif = image.format != "PNG" or "exif" in image.info
        orientation = int(image.getexif().get(0x0112, 1)) if reads_exif else 1
        yield image, orientation


def _check_file_size(media: Media, image: "Image", raw: BinaryIO) -> None:
    """Raise `BadMedia` if the file is too small for the image size in its header.

    Decoding such an image takes a long time and returns mostly black pixels.
    """
    position = raw.tell()
    file_size = raw.seek(0, 2)
    raw.seek(position)
    if image.format == "PNG":
        is_short = _png_bytes(raw) > DEFLATE_RATIO * file_size
        raw.seek(position)
    else:  # in a JPEG, each square of 8 x 8 pixels needs at least one bit
        is_short = image.format in JPEG_FORMATS and image.height * image.width // 64 > 8 * file_size
    if is_short:
        size = f"{image.width} x {image.height}"
        raise BadMedia(f"{media.name}: the file seems truncated: {file_size} bytes cannot hold {size} pixels")


def _png_bytes(raw: BinaryIO) -> int:
    """Return the number of bytes of the decompressed pixels of a PNG, computed from its header."""
    raw.seek(16)
    head = raw.read(13)
    width = int.from_bytes(head[:4])
    height = int.from_bytes(head[4:8])
    bits_per_pixel = head[8] * PNG_CHANNELS[head[9]]
    passes = ADAM7 if head[12] else ((0, 0, 1, 1),)

    num_bytes = 0
    for x, y, dx, dy in passes:
        columns = -(-(width - x) // dx)
        rows = -(-(height - y) // dy)
        if columns > 0 and rows > 0:
            num_bytes += rows * (1 + -(-columns * bits_per_pixel // 8))  # each row begins with the type of its filter
    return num_bytes


def _check_scans(media: Media) -> None:
    """Raise `BadMedia` if a progressive JPEG has more than `MAX_SCANS` scans."""
    with media.open() as raw:
        # In compressed data, 0xFF is followed by 0 or a restart marker, so each match begins a scan.
        num_scans = raw.read().count(b"\xff\xda")
    if num_scans > MAX_SCANS:
        raise BadMedia(f"{media.name}: the JPEG has {num_scans} scans, but at most {MAX_SCANS} are supported")


def _check_png_rows(media: Media, image: "Image") -> None:
    """Raise `BadMedia` if a PNG has fewer rows than its header states.

    If the compressed data ends early but without an error, Pillow leaves the missing rows black. If the last row is not
    all zero, all rows were read. Otherwise, the data is decompressed again to count its bytes.
    """
    last = image.crop((0, image.height - 1, image.width, image.height))
    if last.getbbox() is not None and not image.info.get("interlace"):
        return
    with media.open() as raw:
        stated = _png_bytes(raw)
        missing = stated
        inflate = zlib.decompressobj()
        raw.seek(8)
        while missing > 0 and not inflate.eof and len(head := raw.read(8)) == 8:
            chunk = raw.read(int.from_bytes(head[:4]) + 4)[:-4]
            while head[4:] == b"IDAT" and chunk and missing > 0:
                missing -= len(inflate.decompress(chunk, 1 << 20))
                chunk = inflate.unconsumed_tail
    if missing > 0:
        raise BadMedia(
            f"{media.name}: the image is truncated: it has only {stated - missing} of {stated} bytes of pixels"
        )


def _image_array(media: Media) -> npt.NDArray[np.uint8]:
    """Return bytes `[H, W]` or `[H, W, C]` from integers in 0..255 or floats in 0..1, with channels first or last."""
    array = np.asarray(media.value)
    if array.ndim == 3 and array.shape[-1] not in (1, 3, 4) and array.shape[0] in (1, 3, 4):
        array = array.transpose(1, 2, 0)
    if array.ndim == 3 and array.shape[-1] == 1:
        array = array[..., 0]
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[-1] not in (3, 4)):
        raise BadMedia(f"{media.name}: shape {array.shape} is not [height, width] or [height, width, 3 or 4 channels]")
    check_pixels(media, *array.shape[:2])
    max_value = 1 if np.issubdtype(array.dtype, np.floating) else 255
    if array.dtype.kind not in "fiu" or not (array.min() >= 0 and array.max() <= max_value):
        raise BadMedia(f"{media.name}: pixels must be integers in 0..255 or floats in 0..1")
    pixels = np.rint(array * (255 // max_value)).astype(np.uint8)
    return np.ascontiguousarray(pixels)


def check_aspect(media: Media, height: int, width: int) -> None:
    """Raise `BadMedia` for images that `smart_resize` of transformers rejects."""
    if max(height, width) > 200 * min(height, width):
        raise BadMedia(
            f"{media.name}: the size is {width} x {height}, but one side must be at most 200 times as long as the other"
        )
