"""Limits on TIFF files, checked in the header before Pillow opens them.

A TIFF file lists its strips or tiles. Pillow reads the whole list, and decodes whole tiles, however small the image is.
A few megabytes can therefore take minutes and gigabytes, although the image has few pixels.
"""

import struct
from dataclasses import dataclass
from typing import BinaryIO

from omnizoo.modalities.files.decoding import MAX_PIXELS, check_pixels
from omnizoo.modalities.media import BadMedia, Media

# Numbers of the fields that describe the layout of the pixels.
WIDTH, HEIGHT, BITS, COMPRESSION, SAMPLES_PER_PIXEL, PLANES = 256, 257, 258, 259, 277, 284
STRIP_OFFSETS, STRIP_SIZES = 273, 279
TILE_WIDTH, TILE_HEIGHT, TILE_OFFSETS, TILE_SIZES = 322, 323, 324, 325

BYTE_TYPES = (1, 2, 6, 7)  # stored unchanged, for example a color profile
NUMBER_FORMATS = {1: "B", 3: "H", 4: "I", 13: "I", 16: "Q"}  # TIFF type -> format character of struct
PER_STRIP = (STRIP_OFFSETS, STRIP_SIZES, TILE_OFFSETS, TILE_SIZES)  # fields with one number for each strip or tile
MAX_NUMBERS = 1 << 18  # numbers in any other field; the color map of a 16-bit palette has 196,608
MAX_TILE_PIXELS = 1 << 28  # pixels of all tiles; tiles at the right and lower edges extend beyond the image
# Compression scheme -> maximum compression ratio. Other schemes (such as LZMA) have no useful maximum.
RATIOS = {1: 1, 5: 3000, 8: 1032, 32773: 64, 32946: 1032}  # raw, LZW, deflate, PackBits, deflate


@dataclass(frozen=True)
class Field:
    """An entry of a TIFF directory: the number of its values, and where they are."""

    type: int
    count: int
    offset: int


def check_tiff(media: Media, raw: BinaryIO) -> None:
    """Raise `BadMedia` if the header of a TIFF file states more strips, tiles or pixels than its image can have.

    Args:
        media: The item, for its name.
        raw: The open file. Files of other formats, and damaged headers, are left to Pillow. The position is kept.
    """
    position = raw.tell()
    try:
        _Header(media, raw).check()
    except (struct.error, KeyError, IndexError, ValueError, OverflowError):
        return  # Pillow reports the damage
    finally:
        raw.seek(position)


class _Header:
    """The first directory of a TIFF file. Only the first image of a file is used."""

    def __init__(self, media: Media, raw: BinaryIO) -> None:
        self.media = media
        self.raw = raw
        magic = raw.read(4)
        is_big = magic in (b"II+\0", b"MM\0+")
        self.order = "<" if magic[:2] == b"II" else ">"
        self.fields: dict[int, Field] = {}
        if is_big or magic in (b"II*\0", b"MM\0*"):
            self._read_fields(is_big)

    def _read_fields(self, is_big: bool) -> None:
        """Read the entries of the first directory."""
        entry = self.order + ("HHQQ" if is_big else "HHII")
        if is_big:
            self.raw.seek(8)
        (start,) = self._unpack("Q" if is_big else "I")
        self.raw.seek(start)
        (num_entries,) = self._unpack("Q" if is_big else "H")
        start += 8 if is_big else 2
        entries = self.raw.read(min(num_entries, 1 << 16) * struct.calcsize(entry))
        value_position = struct.calcsize(entry) - struct.calcsize("Q" if is_big else "I")
        for index in range(len(entries) // struct.calcsize(entry)):
            at = index * struct.calcsize(entry)
            tag, kind, count, offset = struct.unpack_from(entry, entries, at)
            num_bytes = count * struct.calcsize("=" + NUMBER_FORMATS.get(kind, "Q"))
            if num_bytes <= (8 if is_big else 4):  # the values are in the entry itself
                offset = start + at + value_position
            self.fields[tag] = Field(kind, count, offset)

    def check(self) -> None:
        """Raise `BadMedia` if a limit is exceeded."""
        if not self.fields:
            return
        for tag, field in self.fields.items():
            if field.type not in BYTE_TYPES and tag not in PER_STRIP and field.count > MAX_NUMBERS:
                raise BadMedia(
                    f"{self.media.name}: field {tag} has {field.count} numbers, but at most {MAX_NUMBERS} are supported"
                )
        width = self._value(WIDTH)
        height = self._value(HEIGHT)
        check_pixels(self.media, height, width)
        num_samples = self._value(SAMPLES_PER_PIXEL, 1)
        num_planes = num_samples if self._value(PLANES, 1) == 2 else 1
        if TILE_OFFSETS in self.fields:
            tile_width = self._value(TILE_WIDTH)
            tile_height = self._value(TILE_HEIGHT)
            tiles_per_row = -(-width // max(1, tile_width))
            max_count = tiles_per_row * -(-height // max(1, tile_height)) * num_planes
            num_pixels = max_count * tile_width * tile_height // num_planes
            self._check_count((TILE_OFFSETS, TILE_SIZES), "tiles", max_count)
            if num_pixels > MAX_TILE_PIXELS:
                size = f"{tile_width} x {tile_height}"
                raise BadMedia(f"{self.media.name}: the image has {width} x {height} pixels, but its tiles {size}")
        if STRIP_OFFSETS in self.fields:
            # A strip has at least one row.
            self._check_count((STRIP_OFFSETS, STRIP_SIZES), "strips", height * num_planes)
        self._check_file_size(width, height, num_samples)

    def _check_count(self, tags: tuple[int, ...], name: str, maximum: int) -> None:
        """Raise `BadMedia` if a field lists more than `maximum` strips or tiles."""
        count = max(self.fields[tag].count for tag in tags if tag in self.fields)
        if count > maximum:
            raise BadMedia(f"{self.media.name}: the file lists {count} {name}, but the image has at most {maximum}")

    def _check_file_size(self, width: int, height: int, num_samples: int) -> None:
        """Raise `BadMedia` if the compressed data is too small for the stated image size."""
        compression = self._value(COMPRESSION, 1)
        file_size = self.raw.seek(0, 2)
        num_bytes = file_size
        sizes = TILE_SIZES if TILE_OFFSETS in self.fields else STRIP_SIZES
        if compression != 1 and sizes in self.fields:  # readers ignore the often wrong sizes of raw strips
            num_bytes = min(sum(self._values(sizes)), file_size) or file_size
        ratio = RATIOS.get(compression)
        bits = self._value(BITS, 1) * num_samples
        if ratio is not None and width * height * bits // 8 > ratio * num_bytes:
            size = f"{width} x {height}"
            raise BadMedia(f"{self.media.name}: the file seems truncated: {num_bytes} bytes cannot hold {size} pixels")

    def _value(self, tag: int, default: int | None = None) -> int:
        """Return the first value of a field."""
        if tag not in self.fields and default is not None:
            return default
        field = self.fields[tag]
        self.raw.seek(field.offset)
        return int(self._unpack(NUMBER_FORMATS[field.type])[0])

    def _values(self, tag: int) -> tuple[int, ...]:
        """Return all values of a field. The count has been checked."""
        field = self.fields[tag]
        self.raw.seek(field.offset)
        return self._unpack(f"{min(field.count, MAX_PIXELS)}{NUMBER_FORMATS[field.type]}")

    def _unpack(self, form: str) -> tuple[int, ...]:
        """Read numbers at the current position."""
        form = self.order + form
        return struct.unpack(form, self.raw.read(struct.calcsize(form)))
