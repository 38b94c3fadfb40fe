"""Paths, bytes and arrays -> pictures, sound and frames: sizes from headers alone, decoding within limits.

Media come from anywhere, so whatever a parser trips over becomes a `BadMedia` that names the item.
"""

import math
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch

from omnizoo.config.errors import UserError
from omnizoo.modalities.item import BadMedia, Media

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_PIXELS = 1 << 26  # of one picture or frame: 8192 x 8192, looked at before anything is decoded
MOST_CLIP_PIXELS = 1 << 36  # of all frames decoded for one clip: 33,000 of 1920 x 1080
MOST_CHANNELS = 64  # of sound
SOUND_BLOCK = 1 << 20  # samples decoded at once: memory follows what a file has, not what its header promises
SAMPLE_RATES = range(1_000, 400_000)  # outside of it a header is broken, or made to exhaust memory

DEFLATE_RATIO = 1032  # bytes that one byte of deflate can stand for, at the very most
PNG_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # by colour type
ADAM7 = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))

# No format that runs another program (PostScript) or opens other files (playlists).
PICTURE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "JPEG2000")
SOUND_FORMATS = ("WAV", "WAVEX", "RF64", "W64", "AIFF", "AU", "CAF", "NIST", "FLAC", "OGG", "MP3", "MPEG")
# What is read of `Media.options`, for each kind.
PICTURE_OPTIONS: tuple[str, ...] = ()
SOUND_OPTIONS = ("start", "end", "sampling_rate")
CLIP_OPTIONS: tuple[str, ...] = ("start", "end", "fps")
FILM_HEADS = (b"\x1a\x45\xdf\xa3", b"FLV", b"\x00\x00\x01\xba", b"\x30\x26\xb2\x75")  # Matroska, FLV, MPEG, ASF
VIDEO_FORMATS = "mov,mp4,matroska,webm,avi,flv,mpeg,mpegts,gif,ogg,asf"


def optional(module: str) -> Any:
    """A package of the `media` extra."""
    try:
        return import_module(module)
    except ImportError as error:
        raise UserError(
            f"this data has media that {module.split('.')[0]} reads: pip install omnizoo[media] ({error})"
        ) from error


@contextmanager
def parsing(media: Media) -> Iterator[None]:
    try:
        yield
    except (BadMedia, UserError):
        raise
    except Exception as error:
        reason = getattr(error, "error_string", None) or getattr(error, "strerror", None) or str(error)
        reason = re.sub(r"\s*'?<[^>]*>'?", "", str(reason).strip()) or type(error).__name__  # addresses of objects
        raise BadMedia(f"{media.name}: {reason}") from error


# Pictures


def picture_size(media: Media) -> tuple[int, int]:
    """(height, width) as a person sees it, without decoding."""
    with _picture(media) as (image, orientation):
        return (image.width, image.height) if orientation >= 5 else (image.height, image.width)


def read_picture(media: Media, channels: int = 3) -> "Image":
    """The picture, upright, in RGB (or grey, for one channel); of an animation its first frame."""
    transpose = optional("PIL.Image").Transpose
    upright = {2: transpose.FLIP_LEFT_RIGHT, 3: transpose.ROTATE_180, 4: transpose.FLIP_TOP_BOTTOM}
    upright |= {5: transpose.TRANSPOSE, 6: transpose.ROTATE_270, 7: transpose.TRANSVERSE, 8: transpose.ROTATE_90}
    with _picture(media) as (image, orientation):
        image.load()
        if image.format == "PNG":
            _check_png_rows(media, image)
        if image.mode == "F" or (image.mode == "I" and image.format != "PPM"):
            raise BadMedia(f"{media.name}: pixels of 32 bits have no known range; store it with 8 or 16 bits")
        if image.mode.startswith("I"):  # Pillow would clip 16 bits to 8, not scale them
            image = optional("PIL.Image").fromarray((np.asarray(image) >> 8).astype(np.uint8))
        image = image.convert("L" if channels == 1 else "RGB")
        return image.transpose(upright[orientation]) if orientation in upright else image


def pixels(image: "Image") -> torch.Tensor:
    """`[C, H, W]` float32 in 0..1."""
    array = np.array(image, dtype=np.uint8)
    return torch.from_numpy(array if array.ndim == 3 else array[..., None]).permute(2, 0, 1).contiguous() / 255


@contextmanager
def _picture(media: Media) -> Iterator[tuple["Image", int]]:
    """The picture, not yet decoded where it is encoded, and its EXIF orientation (1: upright)."""
    library = optional("PIL.Image")
    with parsing(media), ExitStack() as stack:
        if isinstance(media.value, library.Image):
            image = media.value
        elif isinstance(media.value, Path | bytes):
            raw = stack.enter_context(media.open())
            image = stack.enter_context(library.open(raw, formats=PICTURE_FORMATS))
            _check_promise(media, image, raw)
        else:
            image = library.fromarray(_picture_array(media))
        _check_pixels(media, image.height, image.width)
        # Pillow decodes a PNG to look for EXIF behind its pixels; what is there stays unused, here and in decoding.
        known = image.format != "PNG" or "exif" in image.info
        yield image, int(image.getexif().get(0x0112, 1)) if known else 1


def _check_promise(media: Media, image: "Image", raw: BinaryIO) -> None:
    """A header may promise what its few bytes cannot hold: to decode that takes long, and gives mostly black."""
    place = raw.tell()
    there = raw.seek(0, 2)
    raw.seek(place)
    if image.format == "PNG":
        is_short = _png_bytes(raw) > DEFLATE_RATIO * there
        raw.seek(place)
    else:  # of a JPEG every square of 8 x 8 pixels takes a bit
        is_short = image.format == "JPEG" and image.height * image.width // 64 > 8 * there
    if is_short:
        raise BadMedia(f"{media.name}: {image.width} x {image.height} pixels cannot be in {there} bytes: truncated")


def _png_bytes(raw: BinaryIO) -> int:
    """Of the pixels of a PNG, once they are inflated."""
    raw.seek(16)
    head = raw.read(13)
    width, height = int.from_bytes(head[:4]), int.from_bytes(head[4:8])
    bits = head[8] * PNG_CHANNELS[head[9]]
    passes = ADAM7 if head[12] else ((0, 0, 1, 1),)
    sizes = [(-(-(width - x) // dx), -(-(height - y) // dy)) for x, y, dx, dy in passes]
    return sum(h * (1 + -(-w * bits // 8)) for w, h in sizes if w > 0 and h > 0)


def _check_png_rows(media: Media, image: "Image") -> None:
    """Pillow leaves rows black that a PNG does not have, if its data end in good order. A last row that is not all zero
    has been read; otherwise what is there is inflated once more, to be counted.
    """
    last = image.crop((0, image.height - 1, image.width, image.height))
    if last.getbbox() is not None and not image.info.get("interlace"):
        return
    with media.open() as raw:
        promised = missing = _png_bytes(raw)
        inflate = zlib.decompressobj()
        raw.seek(8)
        while missing > 0 and not inflate.eof and len(head := raw.read(8)) == 8:
            chunk = raw.read(int.from_bytes(head[:4]) + 4)[:-4]
            while head[4:] == b"IDAT" and chunk and missing > 0:
                missing -= len(inflate.decompress(chunk, 1 << 20))
                chunk = inflate.unconsumed_tail
    if missing > 0:
        raise BadMedia(f"{media.name}: {promised - missing} of {promised} bytes of its pixels are there: truncated")


def _picture_array(media: Media) -> npt.NDArray[np.uint8]:
    """`[H, W]` or `[H, W, C]`, from values in 0..255 (integers) or 0..1 (floats), channels first or last."""
    array = np.asarray(media.value)
    if array.ndim == 3 and array.shape[-1] not in (1, 3, 4) and array.shape[0] in (1, 3, 4):
        array = array.transpose(1, 2, 0)
    if array.ndim == 3 and array.shape[-1] == 1:
        array = array[..., 0]
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[-1] not in (3, 4)):
        raise BadMedia(f"{media.name}: shape {array.shape} is no picture; expected [height, width] or with 3 channels")
    _check_pixels(media, *array.shape[:2])
    most = 1 if np.issubdtype(array.dtype, np.floating) else 255
    if array.dtype.kind not in "fiu" or not (array.min() >= 0 and array.max() <= most):
        raise BadMedia(f"{media.name}: pixels must be integers in 0..255 or floats in 0..1")
    return np.ascontiguousarray(np.rint(array * (255 // most)).astype(np.uint8))


def _check_pixels(media: Media, height: int, width: int) -> None:
    if height < 1 or width < 1:
        raise BadMedia(f"{media.name}: {width} x {height} has no pixels")
    if height * width > MOST_PIXELS:
        raise BadMedia(f"{media.name}: {width} x {height} is more than the {MOST_PIXELS:,} pixels that are decoded")


# Clips: the row may take a part of its item, by `start` and `end` in seconds


def _clip(media: Media, seconds: float, max_seconds: float) -> tuple[float, float]:
    """Too long is refused, not cut: what was said about an item is about all of it."""
    begin, end = media.options.get("start"), media.options.get("end")
    begin, end = 0.0 if begin is None else begin, seconds if end is None else end
    if not (isinstance(begin, int | float) and isinstance(end, int | float) and 0 <= begin < min(end, seconds)):
        raise BadMedia(f"{media.name}: start {begin!r} and end {end!r} are no part of its {seconds:.2f} s")
    end = min(end, seconds)
    if end - begin > max_seconds:
        raise BadMedia(
            f"{media.name}: {end - begin:.1f} s is more than max_seconds {max_seconds:g}; give start and end"
        )
    return float(begin), float(end)


# Sound


def sound_length(media: Media, sample_rate: int, max_seconds: float = math.inf) -> int:
    """Samples that `read_sound` will give, from the header."""
    if _is_film(media):
        with _film_sound(media) as (_, _, frames, rate):
            pass
    elif isinstance(media.value, Path | bytes):
        with _sound_file(media) as file:
            frames, rate = file.frames, file.samplerate
    else:
        wave, rate = _sound_array(media, sample_rate)
        frames = len(wave)
    first, last = _sound_clip(media, frames, rate, max_seconds)
    return resampled_length(last - first, rate, sample_rate)


def read_sound(media: Media, sample_rate: int, max_seconds: float = math.inf) -> npt.NDArray[np.float32]:
    """One channel in -1..1 at `sample_rate`. More than `max_seconds` is refused."""
    if _is_film(media):
        with _film_sound(media) as (container, stream, frames, rate):
            first, last = _sound_clip(media, frames, rate, max_seconds)
            wave = _film_samples(media, container, stream, last)[first:last]
    elif isinstance(media.value, Path | bytes):
        with _sound_file(media) as file:
            rate = file.samplerate
            first, last = _sound_clip(media, file.frames, rate, max_seconds)
            if first:
                file.seek(first)
            wave = _read_samples(media, file, first, last)
    else:
        wave, rate = _sound_array(media, sample_rate)
        first, last = _sound_clip(media, len(wave), rate, max_seconds)
        wave = wave[first:last]
    if not np.isfinite(wave).all():
        raise BadMedia(f"{media.name}: has samples that are not finite")
    return resample(wave, rate, sample_rate)


def _read_samples(media: Media, file: Any, first: int, last: int) -> npt.NDArray[np.float32]:
    blocks: list[npt.NDArray[np.float32]] = []
    at = first
    while at < last:
        block = file.read(min(SOUND_BLOCK, last - at), dtype="float32", always_2d=True)
        if not len(block):
            raise BadMedia(f"{media.name}: ends after {at / file.samplerate:.2f} s: truncated")
        blocks.append(block.mean(1))
        at += len(block)
    return np.concatenate(blocks)


def _is_film(media: Media) -> bool:
    """True for files of the kinds that hold frames and sound side by side, or sound alone as these do (.m4a)."""
    if not isinstance(media.value, Path | bytes):
        return False
    with media.open() as raw:
        head = raw.read(16)
    return head[4:8] == b"ftyp" or (head[:4], head[8:12]) == (b"RIFF", b"AVI ") or head.startswith(FILM_HEADS)


@contextmanager
def _film_sound(media: Media) -> Iterator[tuple[Any, Any, int, int]]:
    """The file, its first track of sound, and how many samples of which rate that has by its header."""
    with _container(media) as container:
        if not container.streams.audio:
            raise BadMedia(f"{media.name}: has no sound in it")
        stream = container.streams.audio[0]
        rate = stream.codec_context.sample_rate
        _check_rate(media, rate)
        if stream.codec_context.channels > MOST_CHANNELS:
            raise BadMedia(f"{media.name}: more than the {MOST_CHANNELS} channels that are read")
        yield container, stream, round(_seconds(media, container, stream) * rate), rate


def _film_samples(media: Media, container: Any, stream: Any, count: int) -> npt.NDArray[np.float32]:
    """The first `count`, as the header promises them: codecs give a few more, or fewer, at the end."""
    plain = optional("av").AudioResampler(format="fltp")  # of the same rate and channels
    blocks: list[npt.NDArray[np.float32]] = []
    there = 0
    for frame in container.decode(stream):
        for part in plain.resample(frame):
            blocks.append(part.to_ndarray().mean(0))
            there += blocks[-1].size
        if there >= count:
            break
    rate = stream.codec_context.sample_rate
    if count - there > max(0.5 * rate, 0.1 * count):
        raise BadMedia(f"{media.name}: its sound ends after {there / rate:.2f} s: truncated")
    return np.pad(np.concatenate([*blocks, np.zeros(0, np.float32)])[:count], (0, max(0, count - there)))


@contextmanager
def _sound_file(media: Media) -> Iterator[Any]:
    library = optional("soundfile")
    with parsing(media), media.open() as raw:
        _check_length(media, raw)
        with library.SoundFile(raw) as file:
            _check_rate(media, file.samplerate)
            _check_promised_samples(media, file, raw)
            if file.channels > MOST_CHANNELS:
                raise BadMedia(f"{media.name}: {file.channels} channels, more than the {MOST_CHANNELS} that are read")
            yield file


def _check_promised_samples(media: Media, file: Any, raw: BinaryIO) -> None:
    """libsndfile takes what is cut for something shorter, and only its log tells (0 and all ones: streamed)."""
    if file.format not in SOUND_FORMATS:
        raise BadMedia(f"{media.name}: {file.format} is none of the formats that are read: {', '.join(SOUND_FORMATS)}")
    for promised, there in re.findall(r": (\d+) \(should be (\d+)\)", file.extra_info):
        if int(there) + 8 < int(promised) < 0x7FFFFFFF:  # some writers count their header, or do not
            raise BadMedia(f"{media.name}: {there} of {promised} bytes: truncated")
    if file.format == "NIST":
        place = raw.tell()
        raw.seek(0)
        found = re.search(rb"sample_count -i (\d+)", raw.read(1024))
        raw.seek(place)
        if found and int(found[1]) > file.frames:
            raise BadMedia(f"{media.name}: {file.frames} of {int(found[1])} samples: truncated")


def _sound_array(media: Media, sample_rate: int) -> tuple[npt.NDArray[np.float32], int]:
    """Samples (one or several channels, the longer side is time), with their rate; by default the one asked for."""
    value, rate = media.value, media.options.get("sampling_rate", sample_rate)
    if isinstance(value, Mapping):
        if "array" not in value:
            raise BadMedia(f"{media.name}: a mapping with `array` and `sampling_rate` was expected")
        value, rate = value["array"], value.get("sampling_rate", rate)
    _check_rate(media, rate)
    with parsing(media):
        wave = np.asarray(value)
        if wave.size == 0:
            raise BadMedia(f"{media.name}: has no samples")
        if wave.dtype == np.int16:
            wave = wave / 32768
        if wave.ndim == 2:
            wave = wave.mean(0 if wave.shape[0] < wave.shape[1] else 1)
        if wave.ndim != 1 or wave.dtype.kind != "f":
            raise BadMedia(f"{media.name}: samples must be floats in -1..1 or int16, in one dimension or by channel")
        return wave.astype(np.float32), int(rate)


def _check_rate(media: Media, rate: Any) -> None:
    if not isinstance(rate, int) or rate not in SAMPLE_RATES:
        raise BadMedia(f"{media.name}: no usable sampling rate: {rate!r}")


def _sound_clip(media: Media, frames: int, rate: int, max_seconds: float) -> tuple[int, int]:
    if frames < 1:
        raise BadMedia(f"{media.name}: has no samples")
    begin, end = _clip(media, frames / rate, max_seconds)
    first = min(round(begin * rate), frames - 1)
    return first, max(round(end * rate), first + 1)


def resampled_length(samples: int, rate: int, new_rate: int) -> int:
    return -(-samples * new_rate // rate)


def resample(wave: npt.NDArray[np.float32], rate: int, new_rate: int) -> npt.NDArray[np.float32]:
    """Band-limited interpolation: a windowed sinc at each of the phases that output samples can have."""
    if rate == new_rate:
        return wave
    length = resampled_length(len(wave), rate, new_rate)
    common = math.gcd(rate, new_rate)
    old, new = rate // common, new_rate // common
    cutoff = 0.98 * min(1.0, new / old)  # of the old Nyquist frequency; what is above the new one would alias
    reach = math.ceil(48 / cutoff)  # 48 zero crossings to each side
    padded = np.pad(wave.astype(np.float64), reach)
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * reach + 1)
    out = np.empty(length)
    for phase in range(min(new, length)):  # output samples phase, phase + new, ... lie alike between input samples
        base, offset = divmod(phase * old, new)
        away = np.arange(-reach, reach + 1) - offset / new
        angle = np.pi * away / (reach + 1)
        taper = 0.42 + 0.5 * np.cos(angle) + 0.08 * np.cos(2 * angle)  # Blackman's
        out[phase::new] = windows[base::old][: len(out[phase::new])] @ (cutoff * np.sinc(cutoff * away) * taper)
    return out.astype(np.float32)


def _check_length(media: Media, raw: BinaryIO) -> None:
    """Parsers take a cut WAV, AVI or Matroska file for a shorter one; the size in its header tells."""
    head = raw.read(64)
    there = raw.seek(0, 2)
    raw.seek(0)
    promised, least = 0, 0  # bytes; some writers of RIFF count 8 too many
    if head[:4] == b"RIFF" and int.from_bytes(head[4:8], "little") < 0x7FFFFFFF:  # all ones, as 0: streamed
        least = int.from_bytes(head[4:8], "little")
        promised = least + 8
    elif head[:4] == b"\x1a\x45\xdf\xa3" and (at := head.find(b"\x18\x53\x80\x67")) > 0:  # EBML, and its segment
        size = head[at + 4 : at + 12]
        length = 9 - size[0].bit_length() if size else 9  # of the number that is the size: its leading zeros say
        if length <= len(size) and (value := int.from_bytes(size[:length]) - (1 << 7 * length)) + 1 < 1 << 7 * length:
            promised = least = at + 4 + length + value
    if there < least:
        raise BadMedia(f"{media.name}: {there} of {promised} bytes: truncated")


# Video


def sample_times(seconds: float, fps: float, max_frames: int) -> list[float]:
    """When frames are taken of so many seconds: in the middle of equal parts, `fps` to the second or fewer."""
    count = max(1, min(max_frames, round(seconds * fps)))
    return [seconds * (i + 0.5) / count for i in range(count)]


def video_size(media: Media, fps: float, max_seconds: float = math.inf) -> tuple[float, int, int]:
    """(seconds, height, width) of the clip. Frames given one by one are `fps` apart unless the row says otherwise."""
    if not isinstance(media.value, Path | bytes):
        frames, rate = _frames_given(media, fps)
        begin, end = _clip(media, len(frames) / rate, max_seconds)
        return end - begin, *picture_size(frames[0])
    with _video_file(media) as (container, stream):
        begin, end = _clip(media, _seconds(media, container, stream), max_seconds)
        return end - begin, *_upright_size(media, container, stream)


def _upright_size(media: Media, container: Any, stream: Any) -> tuple[int, int]:
    """(height, width): only frames tell how a phone was held."""
    first = next(container.decode(stream), None)
    if first is None:
        raise BadMedia(f"{media.name}: has no frames")
    return (first.width, first.height) if first.rotation % 180 else (first.height, first.width)


@dataclass(frozen=True)
class Footage:
    """A clip by its header: how many frames it has, how many a second, and their size."""

    frames: int
    rate: float
    height: int
    width: int

    def shown(self, indices: Sequence[int]) -> list[float]:
        """When these frames are on show, in seconds from its start: their middle, for times in files are rounded."""
        return [(index + 0.5) / self.rate for index in indices]


def footage_of(media: Media, fps: float, max_seconds: float = math.inf) -> Footage:
    """Frames given one by one are `fps` apart unless the row says otherwise."""
    if not isinstance(media.value, Path | bytes):
        frames, rate = _frames_given(media, fps)
        begin, end = _clip(media, len(frames) / rate, max_seconds)
        return Footage(max(1, round((end - begin) * rate)), rate, *picture_size(frames[0]))
    with _video_file(media) as (container, stream):
        seconds = _seconds(media, container, stream)
        begin, end = _clip(media, seconds, max_seconds)
        found = stream.average_rate or stream.guessed_rate
        if not found:
            raise BadMedia(f"{media.name}: its header does not say how many frames it has in a second")
        rate, whole = float(found), stream.frames and (begin, end) == (0.0, seconds)
        count = stream.frames if whole else max(1, round((end - begin) * rate))
        return Footage(count, rate, *_upright_size(media, container, stream))


def read_frames(media: Media, times: Sequence[float], fps: float, channels: int = 3) -> "list[Image]":
    """The frame on show at each of the ascending `times`, in seconds from the start of the clip."""
    if not isinstance(media.value, Path | bytes):
        frames, rate = _frames_given(media, fps)
        begin, _ = _clip(media, len(frames) / rate, math.inf)
        return [
            read_picture(frames[min(int((begin + time) * rate + 1e-6), len(frames) - 1)], channels) for time in times
        ]
    with _video_file(media) as (container, stream):
        begin, _ = _clip(media, _seconds(media, container, stream), math.inf)
        images = _frames_at(media, container, stream, [begin + time for time in times])
        return [image.convert("L") for image in images] if channels == 1 else images


def _frames_given(media: Media, fps: float) -> tuple[list[Media], float]:
    value, rate = media.value, media.options.get("fps", fps)
    if not isinstance(rate, int | float) or not rate > 0:
        raise BadMedia(f"{media.name}: fps must be a positive number, not {rate!r}")
    if not isinstance(value, list | tuple | np.ndarray) or len(value) == 0:
        raise BadMedia(
            f"{media.name}: a file, or its frames as a list of pictures or an array [T, H, W, 3] was expected"
        )
    return [Media(f"frame {i} of {media.modality}", frame, {}) for i, frame in enumerate(value)], float(rate)


@contextmanager
def _container(media: Media) -> Iterator[Any]:
    library = optional("av")
    with ExitStack() as stack:
        stack.enter_context(parsing(media))
        raw = stack.enter_context(media.open())
        _check_length(media, raw)
        yield stack.enter_context(library.open(raw, options={"format_whitelist": VIDEO_FORMATS}))


@contextmanager
def _video_file(media: Media) -> Iterator[tuple[Any, Any]]:
    with _container(media) as container:
        if not container.streams.video:
            raise BadMedia(f"{media.name}: has no video in it")
        stream = container.streams.video[0]
        _check_pixels(media, stream.codec_context.height, stream.codec_context.width)
        stream.codec_context.options = {"max_pixels": str(MOST_PIXELS)}  # frames may differ from the header
        yield container, stream


def _seconds(media: Media, container: Any, stream: Any) -> float:
    if stream.duration and stream.time_base:
        return float(stream.duration * stream.time_base)
    if container.duration:
        return float(container.duration / 1_000_000)
    raise BadMedia(f"{media.name}: its header has no duration; write it anew, e.g. ffmpeg -i IN -c copy OUT.mp4")


def _frames_at(media: Media, container: Any, stream: Any, times: Sequence[float]) -> "list[Image]":
    """Decodes only the groups of pictures (from a key frame to the next) in which one of the times lies."""
    codec, begin, tick = stream.codec_context, stream.start_time or 0, stream.time_base

    def stamp(packet: Any) -> Any:  # old containers know the order of decoding only
        return ((packet.dts if packet.pts is None else packet.pts) - begin) * tick

    times = [time + 1e-6 for time in times]  # one that is meant to be a frame's own may have been rounded down
    images: list[Image] = []
    on_show = taken = None
    decoded = 0  # pixels

    def take(frame: Any) -> None:
        nonlocal taken
        if frame.is_corrupt:
            raise BadMedia(f"{media.name}: its frame at {times[len(images)]:.2f} s is damaged")
        images.append(images[-1] if frame is taken else frame.to_image().rotate(frame.rotation, expand=True))
        taken = frame

    def decode(packet: Any) -> None:
        nonlocal on_show, decoded
        for frame in codec.decode(packet):
            decoded += frame.height * frame.width
            if decoded > MOST_CLIP_PIXELS:
                raise BadMedia(f"{media.name}: more than the {MOST_CLIP_PIXELS:,} pixels that are decoded for one clip")
            while len(images) < len(times) and times[len(images)] < (frame.pts - begin) * tick:
                take(on_show or frame)
            on_show = frame

    packets, decoding = 0, False
    for group, following in pairwise(chain(_groups(container.demux(stream)), [None])):
        assert group is not None
        packets += len(group)
        earliest = min(map(stamp, group)) if packets > len(group) else -math.inf
        end = stamp(following[0]) if following else math.inf
        needed = any(earliest <= time < end for time in times[len(images) :])
        if decoding and not needed:
            decode(None)
            codec.flush_buffers()
        for packet in group if needed else ():
            decode(packet)
        decoding = needed
        if len(images) == len(times):
            return images
    if packets < stream.frames:
        raise BadMedia(f"{media.name}: {packets} of {stream.frames} frames: truncated")
    if decoding:
        decode(None)
    if on_show is None:
        raise BadMedia(f"{media.name}: has no frames")
    ended = float((on_show.pts - begin) * tick)
    if not stream.frames and times[-1] - ended > max(1.0, 0.1 * times[-1]):  # a still end may be meant, so long not
        raise BadMedia(f"{media.name}: ends at {ended:.1f} s, long before its header says: truncated")
    while len(images) < len(times):  # the last frame stays
        take(on_show)
    return images


def _groups(packets: Iterable[Any]) -> Iterator[list[Any]]:
    group: list[Any] = []
    for packet in packets:
        if packet.size == 0:  # the end of the stream
            continue
        if packet.is_keyframe and group:
            yield group
            group = []
        group.append(packet)
    if group:
        yield group
