"""Read audio from files, videos and arrays: its samples, and its length (from the header, without decoding)."""

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
from omnizoo.modalities.files.decoding import media_errors, optional
from omnizoo.modalities.media import BadMedia, Media

MAX_CHANNELS = 64  # maximum number of audio channels
BLOCK_SAMPLES = 1 << 20  # samples decoded at once, so that a wrong length in a header cannot exhaust memory
SAMPLE_RATES = range(1_000, 400_000)  # other rates indicate a header that is damaged or crafted to exhaust memory
AUDIO_FORMATS = ("WAV", "WAVEX", "RF64", "W64", "AIFF", "AU", "CAF", "NIST", "FLAC", "OGG", "MP3", "MPEG")
CONTAINER_SIGNATURES = (
    b"\x1a\x45\xdf\xa3",
    b"FLV",
    b"\x00\x00\x01\xba",
    b"\x30\x26\xb2\x75",
)  # Matroska, FLV, MPEG, ASF

Samples = npt.NDArray[np.float32]
# (number of samples, sampling rate, function that returns the samples from `first` up to, but not including, `last`)
OpenAudio = tuple[int, int, Callable[[int, int], Samples]]


def audio_length(media: Media, sample_rate: int, max_seconds: float = math.inf) -> int:
    """Return the number of samples that `read_audio` will return, computed from the header."""
    with _open_audio(media, sample_rate) as (count, rate, _):
        first, last = _sample_range(media, count, rate, max_seconds)
        return resampled_length(last - first, rate, sample_rate)


def read_audio(media: Media, sample_rate: int, max_seconds: float = math.inf) -> Samples:
    """Return one channel of samples in -1..1 at `sample_rate`.

    Raises:
        BadMedia: If the audio cannot be decoded or is longer than `max_seconds`.
    """
    with _open_audio(media, sample_rate) as (count, rate, read):
        first, last = _sample_range(media, count, rate, max_seconds)
        wave = read(first, last)
    if not np.isfinite(wave).all():
        raise BadMedia(f"{media.name}: some samples are not finite")
    return resample(wave, rate, sample_rate)


def write_audio(samples: Samples, rate: int, stem: str) -> str:
    """Write a WAV file and return its name."""
    name = f"{stem}.wav"
    optional("soundfile").write(name, samples, rate)
    return name


def _open_audio(media: Media, sample_rate: int) -> AbstractContextManager[OpenAudio]:
    """Open an item of any kind. `sample_rate` is the default for arrays."""
    if not isinstance(media.value, Path | bytes):
        return nullcontext(_audio_array(media, sample_rate))
    return _video_audio(media) if _is_video(media) else _audio_file(media)


def _read_samples(media: Media, file: Any, first: int, last: int) -> Samples:
    """Return the samples from `first` up to, but not including, `last`, averaged over channels."""
    if first:
        file.seek(first)
    blocks: list[Samples] = []
    position = first
    while position < last:
        block = file.read(min(BLOCK_SAMPLES, last - position), dtype="float32", always_2d=True)
        if not len(block):
            raise BadMedia(f"{media.name}: the audio is truncated: it ends after {position / file.samplerate:.2f} s")
        blocks.append(block.mean(1))
        position += len(block)
    return np.concatenate(blocks)


def _is_video(media: Media) -> bool:
    """Whether the file is a container for frames and audio. Containers with audio only, such as .m4a, also count."""
    with media.open() as raw:
        head = raw.read(16)
    is_mp4 = head[4:8] == b"ftyp"
    is_avi = (head[:4], head[8:12]) == (b"RIFF", b"AVI ")
    return is_mp4 or is_avi or head.startswith(CONTAINER_SIGNATURES)


@contextmanager
def _video_audio(media: Media) -> Iterator[OpenAudio]:
    """Open the first audio track of a container. Its length comes from the header."""
    with open_container(media) as container:
        if not container.streams.audio:
            raise BadMedia(f"{media.name}: the file has no audio track")
        stream = container.streams.audio[0]
        rate = stream.codec_context.sample_rate
        _check_header(media, rate, stream.codec_context.channels)
        count = round(container_seconds(media, container, stream) * rate)
        yield count, rate, lambda first, last: _decode_samples(media, container, stream, last)[first:]


def _decode_samples(media: Media, container: Any, stream: Any, count: int) -> Samples:
    """Return the first `count` samples, where `count` is the number in the header.

    Codecs return slightly more or fewer samples than the header states, so the result is cut or padded with zeros.
    """
    converter = optional("av").AudioResampler(format="fltp")  # converts the sample format, not the rate or channels
    blocks: list[Samples] = []
    num_decoded = 0
    for frame in container.decode(stream):
        for converted in converter.resample(frame):
            block = converted.to_ndarray().mean(0)
            blocks.append(block)
            num_decoded += block.size
        if num_decoded >= count:
            break

    rate = stream.codec_context.sample_rate
    num_missing = count - num_decoded
    if num_missing > max(0.5 * rate, 0.1 * count):
        raise BadMedia(f"{media.name}: the audio is truncated: it ends after {num_decoded / rate:.2f} s")
    samples = np.concatenate([*blocks, np.zeros(0, np.float32)])[:count]
    return np.pad(samples, (0, max(0, num_missing)))


@contextmanager
def _audio_file(media: Media) -> Iterator[OpenAudio]:
    """Open an audio file with libsndfile."""
    library = optional("soundfile")
    with media_errors(media), media.open() as raw:
        check_duration(media, raw)
        with library.SoundFile(raw) as file:
            _check_header(media, file.samplerate, file.channels)
            _check_stated_length(media, file, raw)
            yield file.frames, file.samplerate, partial(_read_samples, media, file)


def _check_stated_length(media: Media, file: Any, raw: BinaryIO) -> None:
    """Raise `BadMedia` if the file is truncated or its format is not supported.

    libsndfile treats truncated audio as shorter audio and reports the truncation only in its log. Streamed files, in
    which the size is 0 or all ones, are accepted.
    """
    if file.format not in AUDIO_FORMATS:
        supported = ", ".join(AUDIO_FORMATS)
        raise BadMedia(f"{media.name}: the format {file.format} is not supported. Use one of {supported}.")
    for stated, actual in re.findall(r": (\d+) \(should be (\d+)\)", file.extra_info):
        if int(actual) + 8 < int(stated) < 0x7FFFFFFF:  # some writers also count the 8 bytes of the header
            raise BadMedia(f"{media.name}: the file is truncated: it has only {actual} of {stated} bytes")
    if file.format == "NIST":
        position = raw.tell()
        raw.seek(0)
        sample_count = re.search(rb"sample_count -i (\d+)", raw.read(1024))
        raw.seek(position)
        if sample_count and int(sample_count[1]) > file.frames:
            raise BadMedia(
                f"{media.name}: the file is truncated: it has only {file.frames} of {int(sample_count[1])} samples"
            )


def _audio_array(media: Media, sample_rate: int) -> OpenAudio:
    """Open an array of samples. The longer of two dimensions is time; the default rate is `sample_rate`."""
    value = media.value
    rate = media.options.get("sampling_rate", sample_rate)
    if isinstance(value, Mapping):
        if "array" not in value:
            raise BadMedia(f"{media.name}: expected a mapping with `array` and `sampling_rate`")
        rate = value.get("sampling_rate", rate)
        value = value["array"]
    _check_header(media, rate)
    with media_errors(media):
        wave = np.asarray(value)
        if wave.size == 0:
            raise BadMedia(f"{media.name}: the audio has no samples")
        if wave.dtype == np.int16:
            wave = wave / 32768
        if wave.ndim == 2:
            channel_dim = 0 if wave.shape[0] < wave.shape[1] else 1
            wave = wave.mean(channel_dim)
        if wave.ndim != 1 or wave.dtype.kind != "f":
            raise BadMedia(
                f"{media.name}: samples must be floats in -1..1 or int16, with one dimension, or two with channels"
            )
        samples = wave.astype(np.float32)
        return len(samples), int(rate), lambda first, last: samples[first:last]


def _check_header(media: Media, rate: Any, channels: int = 1) -> None:
    """Raise `BadMedia` if the sampling rate or the number of channels is out of range."""
    if not isinstance(rate, int) or rate not in SAMPLE_RATES:
        allowed = f"{SAMPLE_RATES.start} to {SAMPLE_RATES.stop - 1}"
        raise BadMedia(f"{media.name}: the sampling rate {rate!r} is not an integer from {allowed}")
    if channels > MAX_CHANNELS:
        raise BadMedia(f"{media.name}: the audio has {channels} channels, but at most {MAX_CHANNELS} are supported")


def _sample_range(media: Media, num_samples: int, rate: int, max_seconds: float) -> tuple[int, int]:
    """Return the range of samples that the row selects, as (first, end). The end is not included."""
    if num_samples < 1:
        raise BadMedia(f"{media.name}: the audio has no samples")
    begin, end = time_range(media, num_samples / rate, max_seconds)
    first = min(round(begin * rate), num_samples - 1)
    return first, max(round(end * rate), first + 1)


def resampled_length(samples: int, rate: int, new_rate: int) -> int:
    """Return the number of samples after resampling, rounded up."""
    return -(-samples * new_rate // rate)


def resample(wave: Samples, rate: int, new_rate: int) -> Samples:
    """Resample by band-limited interpolation, with one windowed sinc filter for each phase of the output samples."""
    if rate == new_rate:
        return wave
    length = resampled_length(len(wave), rate, new_rate)
    common = math.gcd(rate, new_rate)
    old = rate // common
    new = new_rate // common
    # Fraction of the old Nyquist frequency. It must be less than the new Nyquist frequency to prevent aliasing.
    cutoff = 0.98 * min(1.0, new / old)
    reach = math.ceil(48 / cutoff)  # 48 zero crossings on each side
    padded = np.pad(wave.astype(np.float64), reach)
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * reach + 1)

    resampled = np.empty(length)
    for phase in range(min(new, length)):  # output samples phase, phase + new, ... share one filter
        base, offset = divmod(phase * old, new)
        distance = np.arange(-reach, reach + 1) - offset / new
        angle = np.pi * distance / (reach + 1)
        taper = 0.42 + 0.5 * np.cos(angle) + 0.08 * np.cos(2 * angle)  # Blackman window
        filter_values = cutoff * np.sinc(cutoff * distance) * taper
        num_outputs = len(resampled[phase::new])
        resampled[phase::new] = windows[base::old][:num_outputs] @ filter_values
    return resampled.astype(np.float32)
