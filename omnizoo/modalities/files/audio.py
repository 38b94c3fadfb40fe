"""Audio from files, videos and arrays: its length from the header, and its samples."""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from omnizoo.modalities.files.container import check_duration, container_seconds, open_container, time_range
from omnizoo.modalities.files.decoding import optional, parsing
from omnizoo.modalities.media import BadMedia, Media

MOST_CHANNELS = 64  # maximum number of audio channels
SOUND_BLOCK = 1 << 20  # samples decoded at once, so that a wrong length in a header cannot exhaust memory
SAMPLE_RATES = range(1_000, 400_000)  # other rates mean a damaged header, or one crafted to exhaust memory
SOUND_FORMATS = ("WAV", "WAVEX", "RF64", "W64", "AIFF", "AU", "CAF", "NIST", "FLAC", "OGG", "MP3", "MPEG")
FILM_HEADS = (b"\x1a\x45\xdf\xa3", b"FLV", b"\x00\x00\x01\xba", b"\x30\x26\xb2\x75")  # Matroska, FLV, MPEG, ASF

Samples = npt.NDArray[np.float32]
# (number of samples, sampling rate, function that returns the samples from `first` up to, but not including, `last`)
OpenAudio = tuple[int, int, Callable[[int, int], Samples]]


def audio_length(media: Media, sample_rate: int, max_seconds: float = math.inf) -> int:
    """Return the number of samples that `read_audio` will return, from the header."""
    with _open_audio(media, sample_rate) as (count, rate, _):
        first, last = _audio_clip(media, count, rate, max_seconds)
        return resampled_length(last - first, rate, sample_rate)


def read_audio(media: Media, sample_rate: int, max_seconds: float = math.inf) -> Samples:
    """Return one channel of samples in -1..1 at `sample_rate`.

    Raises:
        BadMedia: If the audio cannot be decoded or is longer than `max_seconds`.
    """
    with _open_audio(media, sample_rate) as (count, rate, read):
        wave = read(*_audio_clip(media, count, rate, max_seconds))
    if not np.isfinite(wave).all():
        raise BadMedia(f"{media.name}: has samples that are not finite")
    return resample(wave, rate, sample_rate)


def write_audio(samples: Samples, rate: int, stem: str) -> str:
    """Write a WAV file and return its name."""
    name = f"{stem}.wav"
    optional("soundfile").write(name, samples, rate)
    return name


def _open_audio(media: Media, sample_rate: int) -> AbstractContextManager[OpenAudio]:
    if not isinstance(media.value, Path | bytes):
        return nullcontext(_audio_array(media, sample_rate))
    return _video_audio(media) if _is_video(media) else _audio_file(media)


def _read_samples(media: Media, file: Any, first: int, last: int) -> Samples:
    if first:
        file.seek(first)
    blocks: list[Samples] = []
    at = first
    while at < last:
        block = file.read(min(SOUND_BLOCK, last - at), dtype="float32", always_2d=True)
        if not len(block):
            raise BadMedia(f"{media.name}: ends after {at / file.samplerate:.2f} s: truncated")
        blocks.append(block.mean(1))
        at += len(block)
    return np.concatenate(blocks)


def _is_video(media: Media) -> bool:
    """Whether the file is a container for frames and audio. Containers with audio only, such as .m4a, count too."""
    with media.open() as raw:
        head = raw.read(16)
    return head[4:8] == b"ftyp" or (head[:4], head[8:12]) == (b"RIFF", b"AVI ") or head.startswith(FILM_HEADS)


@contextmanager
def _video_audio(media: Media) -> Iterator[OpenAudio]:
    """Open the first audio track of a container. Its length comes from the header."""
    with open_container(media) as container:
        if not container.streams.audio:
            raise BadMedia(f"{media.name}: has no sound in it")
        stream = container.streams.audio[0]
        rate = stream.codec_context.sample_rate
        _check_header(media, rate, stream.codec_context.channels)
        count = round(container_seconds(media, container, stream) * rate)
        yield count, rate, lambda first, last: _decode_samples(media, container, stream, last)[first:]


def _decode_samples(media: Media, container: Any, stream: Any, count: int) -> Samples:
    """Return the first `count` samples, the number in the header.

    Codecs return slightly more or fewer samples at the end, so the result is cut or padded with zeros.
    """
    plain = optional("av").AudioResampler(format="fltp")  # converts the sample format, not the rate or channels
    blocks: list[Samples] = []
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
def _audio_file(media: Media) -> Iterator[OpenAudio]:
    library = optional("soundfile")
    with parsing(media), media.open() as raw:
        check_duration(media, raw)
        with library.SoundFile(raw) as file:
            _check_header(media, file.samplerate, file.channels)
            _check_promised_samples(media, file, raw)
            yield file.frames, file.samplerate, partial(_read_samples, media, file)


def _check_promised_samples(media: Media, file: Any, raw: BinaryIO) -> None:
    """Raise `BadMedia` if the file is truncated or its format is not supported.

    libsndfile treats truncated audio as shorter audio and reports the truncation only in its log. Streamed files, whose
    size is 0 or all ones, are accepted.
    """
    if file.format not in SOUND_FORMATS:
        raise BadMedia(f"{media.name}: {file.format} is none of the formats that are read: {', '.join(SOUND_FORMATS)}")
    for promised, there in re.findall(r": (\d+) \(should be (\d+)\)", file.extra_info):
        if int(there) + 8 < int(promised) < 0x7FFFFFFF:  # tolerance: writers disagree on whether the header counts
            raise BadMedia(f"{media.name}: {there} of {promised} bytes: truncated")
    if file.format == "NIST":
        place = raw.tell()
        raw.seek(0)
        found = re.search(rb"sample_count -i (\d+)", raw.read(1024))
        raw.seek(place)
        if found and int(found[1]) > file.frames:
            raise BadMedia(f"{media.name}: {file.frames} of {int(found[1])} samples: truncated")


def _audio_array(media: Media, sample_rate: int) -> OpenAudio:
    """Open an array of samples. The longer of two dimensions is time; the default rate is `sample_rate`."""
    value, rate = media.value, media.options.get("sampling_rate", sample_rate)
    if isinstance(value, Mapping):
        if "array" not in value:
            raise BadMedia(f"{media.name}: a mapping with `array` and `sampling_rate` was expected")
        value, rate = value["array"], value.get("sampling_rate", rate)
    _check_header(media, rate)
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
        samples = wave.astype(np.float32)
        return len(samples), int(rate), lambda first, last: samples[first:last]


def _check_header(media: Media, rate: Any, channels: int = 1) -> None:
    if not isinstance(rate, int) or rate not in SAMPLE_RATES:
        raise BadMedia(f"{media.name}: no usable sampling rate: {rate!r}")
    if channels > MOST_CHANNELS:
        raise BadMedia(f"{media.name}: {channels} channels, more than the {MOST_CHANNELS} that are read")


def _audio_clip(media: Media, frames: int, rate: int, max_seconds: float) -> tuple[int, int]:
    if frames < 1:
        raise BadMedia(f"{media.name}: has no samples")
    begin, end = time_range(media, frames / rate, max_seconds)
    first = min(round(begin * rate), frames - 1)
    return first, max(round(end * rate), first + 1)


def resampled_length(samples: int, rate: int, new_rate: int) -> int:
    return -(-samples * new_rate // rate)


def resample(wave: Samples, rate: int, new_rate: int) -> Samples:
    """Resample by band-limited interpolation, with one windowed sinc filter for each phase of the output samples."""
    if rate == new_rate:
        return wave
    length = resampled_length(len(wave), rate, new_rate)
    common = math.gcd(rate, new_rate)
    old, new = rate // common, new_rate // common
    cutoff = 0.98 * min(1.0, new / old)  # relative to the old Nyquist frequency, below the new one: no aliasing
    reach = math.ceil(48 / cutoff)  # 48 zero crossings on each side
    padded = np.pad(wave.astype(np.float64), reach)
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * reach + 1)
    out = np.empty(length)
    for phase in range(min(new, length)):  # output samples phase, phase + new, ... share one filter
        base, offset = divmod(phase * old, new)
        away = np.arange(-reach, reach + 1) - offset / new
        angle = np.pi * away / (reach + 1)
        taper = 0.42 + 0.5 * np.cos(angle) + 0.08 * np.cos(2 * angle)  # Blackman window
        out[phase::new] = windows[base::old][: len(out[phase::new])] @ (cutoff * np.sinc(cutoff * away) * taper)
    return out.astype(np.float32)
