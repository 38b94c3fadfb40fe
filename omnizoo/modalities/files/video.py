"""Videos from files and lists of frames: their sizes, and the frames at given times."""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from omnizoo.modalities.files.container import container_seconds, open_container, time_range
from omnizoo.modalities.files.decoding import MOST_PIXELS
from omnizoo.modalities.files.image import check_pixels, image_size, read_image
from omnizoo.modalities.media import BadMedia, Media

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_CLIP_PIXELS = 1 << 36  # maximum over all decoded frames of a video: 33,000 frames of 1920 x 1080


def sample_times(seconds: float, fps: float, max_frames: int) -> list[float]:
    """Return evenly spaced times in seconds, at the centers of equal parts: `fps` per second, at most `max_frames`."""
    count = max(1, min(max_frames, round(seconds * fps)))
    return [seconds * (i + 0.5) / count for i in range(count)]


def _upright_size(media: Media, container: Any, stream: Any) -> tuple[int, int]:
    """Return (height, width) of the rotated first frame, because only frames contain the rotation."""
    first = next(container.decode(stream), None)
    if first is None:
        raise BadMedia(f"{media.name}: has no frames")
    return (first.width, first.height) if first.rotation % 180 else (first.height, first.width)


@dataclass(frozen=True)
class VideoInfo:
    """Length and size of a video, or of the part that its row selects, from the header."""

    name: str  # for error messages
    seconds: float  # duration
    frames: int
    rate: float  # frames per second
    height: int
    width: int

    def shown(self, indices: Sequence[int]) -> list[float]:
        """Return the center of the display time of each frame, in seconds from the start of the video.

        The center is used because the times in files are rounded.
        """
        return [(index + 0.5) / self.rate for index in indices]


def video_info(media: Media, fps: float, max_seconds: float = math.inf) -> VideoInfo:
    """Return the length and size of a video. `fps` is the frame rate of lists of frames whose row does not set one."""
    if not isinstance(media.value, Path | bytes):
        frames, rate = _frames_given(media, fps)
        begin, end = time_range(media, len(frames) / rate, max_seconds)
        count = max(1, round((end - begin) * rate))
        return VideoInfo(media.name, end - begin, count, rate, *image_size(frames[0]))
    with _video_file(media) as (container, stream):
        seconds = container_seconds(media, container, stream)
        begin, end = time_range(media, seconds, max_seconds)
        found = stream.average_rate or stream.guessed_rate
        if not found:
            raise BadMedia(f"{media.name}: its header does not say how many frames it has in a second")
        rate, whole = float(found), stream.frames and (begin, end) == (0.0, seconds)
        count = stream.frames if whole else max(1, round((end - begin) * rate))
        return VideoInfo(media.name, end - begin, count, rate, *_upright_size(media, container, stream))


def read_frames(media: Media, times: Sequence[float], fps: float, channels: int = 3) -> "list[Image]":
    """Return the frames displayed at `times`, ascending and in seconds from the start of the selected part."""
    if not isinstance(media.value, Path | bytes):
        frames, rate = _frames_given(media, fps)
        begin, _ = time_range(media, len(frames) / rate, math.inf)
        return [read_image(frames[min(int((begin + time) * rate + 1e-6), len(frames) - 1)], channels) for time in times]
    with _video_file(media) as (container, stream):
        begin, _ = time_range(media, container_seconds(media, container, stream), math.inf)
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
def _video_file(media: Media) -> Iterator[tuple[Any, Any]]:
    with open_container(media) as container:
        if not container.streams.video:
            raise BadMedia(f"{media.name}: has no video in it")
        stream = container.streams.video[0]
        check_pixels(media, stream.codec_context.height, stream.codec_context.width)
        stream.codec_context.options = {"max_pixels": str(MOST_PIXELS)}  # frame sizes may differ from the header
        yield container, stream


class _FrameDecoder:
    """Decodes the packets of a video and collects the frames that are displayed at `times`."""

    def __init__(self, media: Media, stream: Any, times: Sequence[float]) -> None:
        self.media, self.stream = media, stream
        self.times = [time + 1e-6 for time in times]  # tolerance: the time of a frame may have been rounded down
        self.images: list[Image] = []
        self.on_show: Any = None  # the last decoded frame
        self._last_image_frame: Any = None
        self._decoded_pixels = 0

    def seconds(self, timestamp: int) -> Any:
        return (timestamp - (self.stream.start_time or 0)) * self.stream.time_base

    def start(self, packet: Any) -> Any:
        """Return the time of a packet. Old containers have no `pts`, so its decoding time is used instead."""
        return self.seconds(packet.dts if packet.pts is None else packet.pts)

    @property
    def next_time(self) -> float:
        """The first time whose frame is not decoded yet; infinite if there is none."""
        return self.times[len(self.images)] if len(self.images) < len(self.times) else math.inf

    def decode(self, packet: Any) -> None:
        for frame in self.stream.codec_context.decode(packet):
            self._decoded_pixels += frame.height * frame.width
            if self._decoded_pixels > MOST_CLIP_PIXELS:
                raise BadMedia(
                    f"{self.media.name}: more than the {MOST_CLIP_PIXELS:,} pixels that are decoded for one clip"
                )
            while self.next_time < self.seconds(frame.pts):
                self._keep(self.on_show or frame)
            self.on_show = frame

    def skip(self) -> None:
        """Prepare for packets that do not directly follow the previous ones."""
        self.decode(None)
        self.stream.codec_context.flush_buffers()

    def repeat_last(self) -> None:
        """Use the last frame for all times after the end of the video."""
        while self.next_time < math.inf:
            self._keep(self.on_show)

    def _keep(self, frame: Any) -> None:
        if frame.is_corrupt:
            raise BadMedia(f"{self.media.name}: its frame at {self.next_time:.2f} s is damaged")
        is_repeated = frame is self._last_image_frame
        self.images.append(self.images[-1] if is_repeated else frame.to_image().rotate(frame.rotation, expand=True))
        self._last_image_frame = frame


def _frames_at(media: Media, container: Any, stream: Any, times: Sequence[float]) -> "list[Image]":
    """Return the frames at `times`.

    Groups of pictures (from key frame to key frame) without such a frame are skipped.
    """
    decoder = _FrameDecoder(media, stream, times)
    num_packets = 0
    is_decoding = False
    for group, following in pairwise(chain(_groups(container.demux(stream)), [None])):
        assert group is not None
        earliest = min(map(decoder.start, group)) if num_packets else -math.inf
        num_packets += len(group)
        end = decoder.start(following[0]) if following else math.inf
        is_needed = any(earliest <= time < end for time in decoder.times[len(decoder.images) :])
        if is_decoding and not is_needed:
            decoder.skip()
        for packet in group if is_needed else ():
            decoder.decode(packet)
        is_decoding = is_needed
        if decoder.next_time == math.inf:
            return decoder.images
    if num_packets < stream.frames:
        raise BadMedia(f"{media.name}: {num_packets} of {stream.frames} frames: truncated")
    if is_decoding:
        decoder.decode(None)
    if decoder.on_show is None:
        raise BadMedia(f"{media.name}: has no frames")
    last_time = decoder.times[-1]
    ended = float(decoder.seconds(decoder.on_show.pts))
    if not stream.frames and last_time - ended > max(1.0, 0.1 * last_time):  # some videos end with a short still image
        raise BadMedia(f"{media.name}: ends at {ended:.1f} s, long before its header says: truncated")
    decoder.repeat_last()
    return decoder.images


def _groups(packets: Iterable[Any]) -> Iterator[list[Any]]:
    group: list[Any] = []
    for packet in packets:
        if packet.size == 0:  # flush packet at the end of the stream
            continue
        if packet.is_keyframe and group:
            yield group
            group = []
        group.append(packet)
    if group:
        yield group
