"""Media files that are damaged, have invalid headers or another format; and unusual but valid ones.

Each is a `Medium`: its modality, file name, bytes, and a word that the error must contain ("" for any error).
Files named `good.*` are valid.
"""

import io
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import av
import numpy as np
import soundfile
from PIL import Image


@dataclass(frozen=True)
class Medium:
    title: str
    modality: str
    file: str
    data: bytes
    reason: str = ""


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, rows: int, color: int = 2, interlace: int = 0, data: bytes | None = None) -> bytes:
    """Return a PNG with `rows` rows of pixels, independent of the height in its header."""
    body = zlib.compress((b"\0" + b"\x80" * 3 * min(width, 10000)) * rows if data is None else data)
    header = struct.pack(">IIBBBBB", width, height, 8, color, 0, 0, interlace)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def noise(height: int = 24, width: int = 20) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(1, 255, (height, width, 3), dtype=np.uint8))


def picture(format: str, image: Image.Image | None = None, **options: Any) -> bytes:
    file = io.BytesIO()
    (image or noise()).save(file, format, **options)
    return file.getvalue()


def sound(format: str = "WAV", wave: Any = None, rate: int = 2000, subtype: str | None = None) -> bytes:
    file = io.BytesIO()
    tone = np.random.default_rng(0).normal(0, 0.1, 1000)
    soundfile.write(file, tone if wave is None else wave, rate, format=format, subtype=subtype)
    return file.getvalue()


def wav(channels: int, rate: int, data: bytes, bits: int = 16, promised: int | None = None) -> bytes:
    form = struct.pack("<HHIIHH", 1, channels, rate, rate * channels * bits // 8 & 0xFFFFFFFF, channels * 2, bits)
    size = len(data) if promised is None else promised
    body = b"WAVEfmt " + struct.pack("<I", 16) + form + b"data" + struct.pack("<I", size) + data
    return b"RIFF" + struct.pack("<I", 36 + size) + body


def clip(format: str = "mp4", frames: int = 6, codec: str = "mpeg4", side: int = 16) -> bytes:
    file = io.BytesIO()
    rng = np.random.default_rng(0)
    with av.open(file, "w", format=format) as container:
        stream = container.add_stream(codec, rate=4)
        stream.width = stream.height = side
        for _ in range(frames):
            values = rng.integers(0, 255, (side, side, 3), dtype=np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(values, format="rgb24")))
        container.mux(stream.encode())
    return file.getvalue()


def sound_only(format: str = "mp4") -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format=format) as container:
        stream = container.add_stream("aac", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.rate = 8000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file.getvalue()


def changed(data: bytes, place: bytes, offset: int, new: bytes) -> bytes:
    """Return `data` with `new` written `offset` bytes after the start of `place`."""
    start = data.index(place) + offset
    return data[:start] + new + data[start + len(new) :]


def media() -> Iterator[Medium]:
    yield from pictures()
    yield from sounds()
    yield from clips()


def pictures() -> Iterator[Medium]:
    def bad(title: str, data: bytes, reason: str, file: str = "x.png") -> Medium:
        return Medium(title, "image", file, data, reason)

    yield bad("a PNG of 8000 x 8000 with ten rows", png(8000, 8000, 10), "truncated")
    yield bad("a PNG with half of its rows", png(64, 64, 32), "truncated")
    yield bad("a PNG without its last row", png(64, 64, 63), "truncated")
    yield bad("an interlaced PNG with half of its data", png(8, 8, 0, interlace=1, data=b"\0" * 120), "truncated")
    yield bad("a PNG of 30000 x 30000", png(30000, 30000, 10), "pixels")
    yield bad("a PNG of 0 x 0", png(0, 0, 0), "")
    yield bad("a PNG of 0 x 5", png(0, 5, 5), "")
    yield bad("a PNG without data", png(8, 8, 0, data=b""), "")
    yield bad("a PNG of an unknown colour type", png(8, 8, 8, color=9), "")
    yield bad("a PNG with a wrong checksum", changed(png(8, 8, 8), b"IHDR", 18, b"\0\0\0\0"), "")
    yield bad("a PNG with garbage for data", changed(png(64, 64, 64), b"IDAT", 6, b"\xff" * 20), "")
    yield bad("a picture that is long and thin", png(1, 100000, 100000), "one side")
    jpeg = picture("JPEG")
    sizes = struct.pack(">HH", 8000, 8000)
    yield bad("a JPEG of 8000 x 8000 with data for 20 x 24", changed(jpeg, b"\xff\xc0", 5, sizes), "truncated", "x.jpg")
    for format in ("PNG", "JPEG", "GIF", "WEBP", "TIFF", "BMP", "PPM", "JPEG2000", "AVIF"):
        data = picture(format)
        yield bad(f"a {format} that is cut", data[: len(data) * 3 // 5], "", f"x.{format.lower()}")
        yield bad(f"a {format} that ends in its header", data[:20], "", f"x.{format.lower()}")
    yield bad("a GIF of 65535 x 65535", changed(picture("GIF"), b"GIF", 6, b"\xff" * 4), "pixels", "x.gif")
    yield bad("a PPM of 100000 x 100000", b"P6 100000 100000 255\n" + bytes(99), "pixels", "x.ppm")
    canvas = b"\x10\0\0\0" + b"\xff\x3f\0" * 2  # with alpha, 16384 x 16384
    webp = b"VP8X" + struct.pack("<I", 10) + canvas + picture("WEBP")[12:]
    webp = b"RIFF" + struct.pack("<I", len(webp) + 4) + b"WEBP" + webp
    yield bad("a WEBP of 16384 x 16384", webp, "", "x.webp")
    bmp = changed(picture("BMP"), b"BM", 18, struct.pack("<ii", 30000, -30000))
    yield bad("a BMP of 30000 x -30000", bmp, "pixels", "x.bmp")
    for mode in ("F", "I"):
        data = picture("TIFF", Image.new(mode, (20, 20), 1))
        yield bad(f"a TIFF of 32 bits ({mode})", data, "32-bit", "x.tiff")
    strangers = {
        "text": b"this is a picture, trust me",
        "HTML": b"<!doctype html><html><body>404</body></html>",
        "zeros": bytes(4096),
        "a zip file": b"PK\x03\x04" + bytes(100),
        "a pickle": b"\x80\x04\x95\x10\0\0\0\0\0\0\0\x8c\x05posix\x94\x8c\x06system\x94\x93\x94.",
        "SVG": b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>',
        "PostScript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(%pipe%touch /tmp/x) (w) file\n",
        "a PDF": b"%PDF-1.7\n1 0 obj\n<<>>\nendobj\n",
        "an npy file of objects": b"\x93NUMPY\x01\0v\0{'descr': '|O', 'fortran_order': False, 'shape': (9,), }\n",
        "a sound": sound(),
        "a clip": clip(),
    }
    for name, data in strangers.items():
        yield bad(f"{name} given as a picture", data, "")
    gray = Image.fromarray(np.arange(400, dtype=np.uint16).reshape(20, 20) * 160)
    upright = Image.Exif()
    upright[0x0112] = 6
    frames = [noise(), noise()]
    good = {
        "a picture of 1 x 1": png(1, 1, 1),
        "a black picture": picture("PNG", Image.new("RGB", (20, 20))),
        "a picture turned by its EXIF": picture("JPEG", noise(40, 8), exif=upright),
        "a picture in CMYK": picture("JPEG", noise().convert("CMYK")),
        "a picture of 16 bits": picture("PNG", gray),
        "a picture with a palette and a transparent colour": picture("PNG", noise().convert("P"), transparency=3),
        "a picture of one bit": picture("PNG", noise().convert("1")),
        "a grey picture with alpha": picture("PNG", noise().convert("LA")),
        "an animation": picture("GIF", frames[0], save_all=True, append_images=frames),
    }
    for title, data in good.items():
        yield Medium(title, "image", "good.png", data)


def sounds() -> Iterator[Medium]:
    def bad(title: str, data: bytes, reason: str = "", file: str = "x.wav") -> Medium:
        return Medium(title, "audio", file, data, reason or "x.")

    for format in ("WAV", "FLAC", "OGG", "MP3", "AIFF", "AU", "CAF", "W64", "RF64", "NIST"):
        data = sound(format, rate=8000)
        yield bad(f"a {format} that is cut", data[: len(data) * 3 // 5], "", f"x.{format.lower()}")
    yield bad("a WAV that promises hours", wav(1, 2000, bytes(2000), promised=0x7FFFFF00), "truncated")
    flac = bytearray(sound("FLAC"))
    flac[21:26] = bytes([flac[21] | 0x0F]) + b"\xff" * 4  # 36 bits of total samples
    yield bad("a FLAC that promises years", bytes(flac), "max_seconds", "x.flac")
    flac[21:26] = bytes([flac[21] & 0xF0]) + struct.pack(">I", 2000 * 290)
    yield bad("a FLAC that promises minutes", bytes(flac), "", "x.flac")
    yield bad("a WAV at 0 Hz", wav(1, 0, bytes(2000)))
    yield bad("a WAV at 4 GHz", wav(1, 0xFFFFFFFF, bytes(2000)))
    yield bad("a WAV of 0 channels", wav(0, 2000, bytes(2000)))
    yield bad("a WAV of 500 channels", wav(500, 2000, bytes(20000)), "channels")
    yield bad("a WAV of 0 bits", wav(1, 2000, bytes(2000), bits=0))
    yield bad("a WAV without samples", wav(1, 2000, b""))
    for value in (np.nan, np.inf):
        data = sound(wave=np.array([0.1, value, 0.2] * 100), subtype="FLOAT")
        yield bad(f"a WAV with {value}", data, "not finite")
    yield bad("a sound of 301 s", sound(wave=np.zeros(301 * 2000)), "max_seconds")
    for name, data in {"text": b"la la la", "a picture": picture("PNG"), "zeros": bytes(999)}.items():
        yield bad(f"{name} given as a sound", data)
    good = {
        "a sound in stereo": sound(wave=np.zeros((500, 2))),
        "a sound of 8 channels": sound(wave=np.zeros((500, 8))),
        "a sound of 8 bits": sound(subtype="PCM_U8"),
        "a sound of one sample": sound(wave=np.zeros(1)),
        "a sound at an odd rate": sound(wave=np.zeros(3000), rate=11025),
    }
    for title, data in good.items():
        yield Medium(title, "audio", "good.wav", data)


def clips() -> Iterator[Medium]:
    def bad(title: str, data: bytes, reason: str = "", file: str = "x.mp4") -> Medium:
        return Medium(title, "video", file, data, reason or "x.")

    mp4 = clip()
    for format, codec in (("mp4", "mpeg4"), ("avi", "mpeg4"), ("matroska", "mpeg4"), ("gif", "gif")):
        data = clip(format, codec=codec) if codec != "gif" else picture("GIF", noise(), save_all=True)
        for part in (2, 5, 8):
            cut = data[: len(data) * part // 10]
            yield bad(f"a clip ({format}) cut after {part} tenths", cut, "", f"x.{format}")
    yield bad("a clip without frames", clip(frames=0))
    yield bad("a clip with zeros for frames", changed(mp4, b"mdat", 4, bytes(mp4.index(b"moov") - 50)))
    years = changed(clip("matroska"), b"\x44\x89\x88", 3, struct.pack(">d", 1e12))
    yield bad("a clip of years", years, "max_seconds", "x.mkv")
    yield bad("a sound in an mp4", sound_only(), "no video")
    playlists = {
        "a playlist": b"#EXTM3U\n#EXTINF:9,\nfile:///etc/passwd\n",
        "a script for concat": b"ffconcat version 1.0\nfile /etc/passwd\n",
        "text": b"a clip",
        "a picture": picture("PNG"),
        "zeros": bytes(999),
    }
    for name, data in playlists.items():
        yield bad(f"{name} given as a clip", data)
    yield Medium("a clip of one frame", "video", "good.mp4", clip(frames=1))
