"""Media containers, opened with PyAV, and time ranges of audio and video."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

from omnizoo.modalities.files.decoding import media_errors, optional
from omnizoo.modalities.media import BadMedia, Media

VIDEO_FORMATS = "mov,mp4,matroska,webm,avi,flv,mpeg,mpegts,gif,ogg,asf"


def time_range(media: Media, seconds: float, max_seconds: float) -> tuple[float, float]:
    """Return the start and end of an item in seconds, from the options `start` and `end` of its row.

    Items longer than `max_seconds` raise `BadMedia` instead of being cut, because the text of a row refers to the whole
    item.
    """
    begin = media.options.get("start")
    end = media.options.get("end")
    if begin is None:
        begin = 0.0
    if end is None:
        end = seconds

    are_numbers = isinstance(begin, int | float) and isinstance(end, int | float)
    if not (are_numbers and 0 <= begin < min(end, seconds)):
        raise BadMedia(
            f"{media.name}: start {begin!r} and end {end!r} are not a valid time range; "
            f"the item is {seconds:.2f} s long"
        )
    end = min(end, seconds)
    length = end - begin
    if length > max_seconds:
        raise BadMedia(
            f"{media.name}: the length of {length:.1f} s is more than max_seconds {max_seconds:g}. "
            "Set start and end to select a part."
        )
    return float(begin), float(end)


def check_duration(media: Media, raw: BinaryIO) -> None:
    """Raise `BadMedia` if a WAV, AVI or Matroska file is shorter than the size in its header.

    Parsers do not report such a truncation, but treat the file as a shorter one.
    """
    head = raw.read(64)
    file_size = raw.seek(0, 2)
    raw.seek(0)
    stated_size, minimum_size = _riff_sizes(head) if head[:4] == b"RIFF" else _matroska_sizes(head)
    if file_size < minimum_size:
        raise BadMedia(f"{media.name}: the file is truncated: it has only {file_size} of {stated_size} bytes")


def _riff_sizes(head: bytes) -> tuple[int, int]:
    """Return the file size that a RIFF header states, and the minimum size; (0, 0) for a streamed file.

    Some writers count 8 bytes too many, so the minimum is 8 bytes smaller.
    """
    payload = int.from_bytes(head[4:8], "little")
    if payload >= 0x7FFFFFFF:  # all ones: streamed
        return 0, 0
    return payload + 8, payload


def _matroska_sizes(head: bytes) -> tuple[int, int]:
    """Return (size, size), with the file size in a Matroska header; (0, 0) for other files or an unknown size."""
    segment = head.find(b"\x18\x53\x80\x67")
    if head[:4] != b"\x1a\x45\xdf\xa3" or segment <= 0:
        return 0, 0
    size_field = head[segment + 4 : segment + 12]
    length = 9 - size_field[0].bit_length() if size_field else 9  # bytes; leading zeros encode the length
    if length > len(size_field):
        return 0, 0
    size = int.from_bytes(size_field[:length]) - (1 << 7 * length)
    if size + 1 >= 1 << 7 * length:  # all ones: unknown
        return 0, 0
    file_size = segment + 4 + length + size
    return file_size, file_size


@contextmanager
def open_container(media: Media) -> Iterator[Any]:
    """Context manager that opens a media file with PyAV, after checking that it is not truncated."""
    library = optional("av")
    with media_errors(media), media.open() as raw:
        check_duration(media, raw)
        with library.open(raw, options={"format_whitelist": VIDEO_FORMATS}) as container:
            yield container


def container_seconds(media: Media, container: Any, stream: Any) -> float:
    """Return the duration of a stream in seconds, from the header."""
    if stream.duration and stream.time_base:
        return float(stream.duration * stream.time_base)
    if container.duration:
        return float(container.duration / 1_000_000)
    raise BadMedia(
        f"{media.name}: the header contains no duration. Rewrite the file with ffmpeg -i IN -c copy OUT.mp4."
    )
