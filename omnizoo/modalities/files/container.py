"""Media containers, opened with PyAV, and time ranges of audio and video."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

from omnizoo.modalities.files.decoding import optional, parsing
from omnizoo.modalities.media import BadMedia, Media

VIDEO_FORMATS = "mov,mp4,matroska,webm,avi,flv,mpeg,mpegts,gif,ogg,asf"


def time_range(media: Media, seconds: float, max_seconds: float) -> tuple[float, float]:
    """Return the begin and end of an item in seconds, from the options `start` and `end` of its row.

    Items longer than `max_seconds` raise `BadMedia` instead of being cut, because the text of a row refers to the whole
    item.
    """
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


def check_duration(media: Media, raw: BinaryIO) -> None:
    """Raise `BadMedia` if a WAV, AVI or Matroska file is shorter than the size in its header.

    Parsers treat such a truncated file as a shorter one.
    """
    head = raw.read(64)
    there = raw.seek(0, 2)
    raw.seek(0)
    promised, least = 0, 0  # bytes; some RIFF writers count 8 too many, so `least` is 8 less for RIFF
    if head[:4] == b"RIFF" and int.from_bytes(head[4:8], "little") < 0x7FFFFFFF:  # all ones or 0: streamed
        least = int.from_bytes(head[4:8], "little")
        promised = least + 8
    elif head[:4] == b"\x1a\x45\xdf\xa3" and (at := head.find(b"\x18\x53\x80\x67")) > 0:  # EBML header and segment
        size = head[at + 4 : at + 12]
        length = 9 - size[0].bit_length() if size else 9  # bytes of the size field, encoded by its leading zeros
        if length <= len(size) and (value := int.from_bytes(size[:length]) - (1 << 7 * length)) + 1 < 1 << 7 * length:
            promised = least = at + 4 + length + value
    if there < least:
        raise BadMedia(f"{media.name}: {there} of {promised} bytes: truncated")


@contextmanager
def open_container(media: Media) -> Iterator[Any]:
    library = optional("av")
    with parsing(media), media.open() as raw:
        check_duration(media, raw)
        with library.open(raw, options={"format_whitelist": VIDEO_FORMATS}) as container:
            yield container


def container_seconds(media: Media, container: Any, stream: Any) -> float:
    if stream.duration and stream.time_base:
        return float(stream.duration * stream.time_base)
    if container.duration:
        return float(container.duration / 1_000_000)
    raise BadMedia(f"{media.name}: its header has no duration; write it anew, e.g. ffmpeg -i IN -c copy OUT.mp4")
