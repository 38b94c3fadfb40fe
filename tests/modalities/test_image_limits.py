"""Image files that would take long to decode raise an error from their headers."""

import io
import random
import struct
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from omnizoo.modalities.files.image import image_size, read_image
from omnizoo.modalities.media import BadMedia, Media

Entry = tuple[int, int, int, int]  # tag, type, count, value or offset
SHORT, LONG, RATIONAL = 3, 4, 5


def tiff(entries: list[Entry], data: bytes = b"") -> bytes:
    """Return a TIFF file whose directory is followed by `data`."""
    directory = b"".join(struct.pack("<HHII", *entry) for entry in sorted(entries))
    return b"II*\0" + struct.pack("<IH", 8, len(entries)) + directory + bytes(4) + data


def data_offset(num_entries: int) -> int:
    return 8 + 2 + 12 * num_entries + 4


def layout(width: int, height: int, compression: int = 1) -> list[Entry]:
    """Return the entries of a gray image without its strips or tiles."""
    values = {256: width, 257: height, 258: 8, 259: compression, 262: 1, 277: 1}
    return [(tag, LONG, 1, value) for tag, value in values.items()]


def too_many_strips() -> bytes:
    """Return 6 MB that state 1.5 million strips for 64 rows, which Pillow decodes one by one."""
    count, start = 1_500_000, data_offset(9)
    strips = [(273, LONG, count, start), (278, LONG, 1, 1), (279, LONG, count, start)]
    return tiff(layout(64, 64) + strips, struct.pack("<I", 200) * count)


def too_large_with_many_strips() -> bytes:
    count, start = 1_500_000, data_offset(9)
    strips = [(273, LONG, count, start), (278, LONG, 1, 1), (279, LONG, count, start)]
    return tiff(layout(9000, 9000) + strips, struct.pack("<I", 200) * count)


def too_many_numbers() -> bytes:
    """Return a file with a million horizontal resolutions, each of which Pillow turns into a fraction."""
    count, start = 1_000_000, data_offset(10)
    strips = [(273, LONG, 1, start), (278, LONG, 1, 64), (279, LONG, 1, 4096)]
    return tiff([*layout(64, 64), *strips, (282, RATIONAL, count, start)], struct.pack("<II", 1, 7) * count)


def large_tiles() -> bytes:
    """Return a file whose 16 x 16 pixels are in a tile of 32,768 x 32,768."""
    tiles = [(322, LONG, 1, 1 << 15), (323, LONG, 1, 1 << 15), (324, LONG, 1, data_offset(10)), (325, LONG, 1, 4096)]
    return tiff(layout(16, 16, compression=50000) + tiles, bytes(4096))


def overlapping_tiles() -> bytes:
    """Return a file with 262,144 tiles at the same 256 bytes."""
    count, start = 512 * 512, data_offset(10)
    tiles = [(322, LONG, 1, 16), (323, LONG, 1, 16), (324, LONG, count, start + 256), (325, LONG, count, start + 256)]
    return tiff(layout(8192, 8192) + tiles, bytes(256) + struct.pack("<I", start) * count)


def short_data() -> bytes:
    """Return a file with 8192 x 8192 pixels in 100 compressed bytes, followed by other data."""
    strips = [(273, LONG, 1, data_offset(9)), (278, LONG, 1, 8192), (279, LONG, 1, 100)]
    return tiff(layout(8192, 8192, compression=8) + strips, zlib.compress(bytes(1000)) + bytes(200_000))


def big_tiff() -> bytes:
    """Return a BigTIFF file that states 1.5 million strips for 64 rows."""
    count, start = 1_500_000, 16 + 8 + 20 * 9 + 8
    entries = [*layout(64, 64), (273, LONG, count, start), (278, LONG, 1, 1), (279, LONG, count, start)]
    directory = b"".join(struct.pack("<HHQQ", *entry) for entry in sorted(entries))
    head = b"II+\0" + struct.pack("<HHQQ", 8, 0, 16, len(entries))
    return head + directory + bytes(8) + struct.pack("<I", 200) * count


def many_scans() -> bytes:
    """Return a progressive JPEG of 4096 x 4096 pixels whose last scan is repeated 600 times."""
    file = io.BytesIO()
    Image.new("L", (4096, 4096)).save(file, "JPEG", progressive=True)
    data = file.getvalue()
    last_scan = data[data.rindex(b"\xff\xda") : -2]
    return data[:-2] + last_scan * 600 + data[-2:]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (too_many_strips, "1500000 strips"),
        (too_large_with_many_strips, "9000 x 9000 pixels"),
        (too_many_numbers, "field 282 has 1000000 numbers"),
        (large_tiles, "tiles 32768 x 32768"),
        (overlapping_tiles, "cannot hold 8192 x 8192"),
        (short_data, "100 bytes cannot hold 8192 x 8192"),
        (big_tiff, "1500000 strips"),
        (many_scans, "606 scans"),
    ],
)
def test_file_that_would_take_long_to_decode_raises_from_its_header(
    make: Callable[[], bytes], reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "image"
    path.write_bytes(make())
    started = time.process_time()
    with pytest.raises(BadMedia, match=str(path)) as caught:
        read_image(Media("image", path, {}))
    assert time.process_time() - started < 1
    assert reason in str(caught.value)


def test_only_the_first_of_many_pages_is_read() -> None:
    first = data_offset(9)
    page = [*layout(1, 1), (273, LONG, 1, 8), (278, LONG, 1, 1), (279, LONG, 1, 1)]
    pages = [tiff(page)[8:-4] + struct.pack("<I", 8 + (number + 1) * (first - 8)) for number in range(100_000)]
    data = b"II*\0" + struct.pack("<I", 8) + b"".join(pages)
    started = time.process_time()
    assert image_size(Media("image", data, {})) == (1, 1)
    assert read_image(Media("image", data, {})).size == (1, 1)
    assert time.process_time() - started < 1


@pytest.mark.parametrize("compression", ["raw", "tiff_lzw", "tiff_deflate", "packbits", "zstd", "lzma", "jpeg"])
@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "P", "I;16"])
def test_intact_tiff_files_are_read(compression: str, mode: str) -> None:
    if compression == "jpeg" and mode not in ("L", "RGB"):
        return
    size = (97, 301)
    for image in (Image.new(mode, size), Image.effect_noise(size, 90).convert(mode)):
        file = io.BytesIO()
        image.save(file, "TIFF", compression=compression, strip_size=512)
        assert image_size(Media("image", file.getvalue(), {})) == (301, 97)
        assert read_image(Media("image", file.getvalue(), {})).size == size


@pytest.mark.parametrize("compression", ["tiff_lzw", "tiff_deflate", "packbits", "group4"])
def test_black_tiff_file_has_the_highest_compression_ratio_that_is_accepted(compression: str) -> None:
    file = io.BytesIO()
    Image.new("1" if compression == "group4" else "L", (4000, 4000)).save(file, "TIFF", compression=compression)
    assert not np.asarray(read_image(Media("image", file.getvalue(), {}))).any()


def test_damaged_tiff_headers_raise_bad_media_or_are_read() -> None:
    file = io.BytesIO()
    Image.new("RGB", (32, 32)).save(file, "TIFF", compression="tiff_deflate", big_tiff=True)
    rng = random.Random(0)
    for _ in range(300):
        data = bytearray(file.getvalue())
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(min(len(data), 400))] = rng.randrange(256)
        try:
            read_image(Media("image", bytes(data), {}))
        except BadMedia:
            continue
