"""Read videos from files and lists of frames: their sizes, and the frames at given times."""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from omnizoo.modalities.files.container import container_seconds, open_container, time_range
from omnizoo.modalities.files.decoding import MAX_PIXELS, check_pixels
from omnizoo.modalities.files.image import image_size, read_image
from omnizoo.modalities.media import BadMedia, Media

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_VIDEO_PIXELS = 1 << 36  # maximum number of pixels of all decoded frames, such as 33,000 frames of 1920 x 1080


def sample_times(seconds: float, fps: float, max_frames: int) -> list[float]:
    """Return the centers, in seconds, of equal parts of a video: `fps` parts per second, but at most `max_frames`."""
    count = max(1, min(max_frames, round(seconds * fps)))
    return [seconds * (i + 0.5) / count for i in range(count)]


def _upright_size(media: Media, container: Any, stream: Any) -> tuple[int, int]:
    """Return (height, width) of the first frame after rotation.

    The frame is decoded, because only frames have a rotation.
    """
    first = next(container.decode(stream), None)
    if first is None:
        raise BadMedia(f"{media.name}: the video has no frames")
    return (first.width, first.height) if first.rotation % 180 else (first.height, first.width)


@dataclass(frozen=True)
class VideoInfo:
    """Length and size of a video, or of the part that its row selects, from the header."""

    name: str  # name of the item in error messages
    seconds: float  # duration
    frames: int
    rate: float  # frames per second
    height: int
    width: int

    def display_times(self, indices: Sequence[int]) -> list[float]:
        """Return the center of the display time of each frame, in seconds from the start of the video.

        The center is used because the times in files are rounded.
        """
        return [(index + 0.5) / self.rate for index in indices]


def video_info(media: Media, fps: float, max_seconds: float = math.inf) -> VideoInfo:
    """Return the length and size of a video. `fps` is the frame rate of lists of frames whose row does not set one."""
    if not isinstance(media.value, Path | bytes):
        frames, rate = _frame_list(media, fps)
        begin, end = time_range(media, len(frames) / rate, max_seconds)
        height, width = image_size(frames[0])
        return VideoInfo(
            name=media.name,
            seconds=end - begin,
            frames=max(1, round((end - begin) * rate)),
            rate=rate,
            height=height,
            width=width,
        )
    with _video_file(media) as (container, stream):
        seconds = container_seconds(media, container, stream)
        begin, end = time_range(media, seconds, max_seconds)
        header_rate = stream.average_rate or stream.guessed_rate
        if not header_rate:
            raise BadMedia(f"{media.name}: the header contains no frame rate")
        rate = float(header_rate)
        is_entire_video = (begin, end) == (0.0, seconds)
        estimated_count = max(1, round((end - begin) * rate))
        count = stream.frames if stream.frames and is_entire_video else estimated_count
        height, width = _upright_size(media, container, stream)
        return VideoInfo(name=media.name, seconds=end - begin, frames=count, rate=rate, height=height, width=width)


def read_frames(media: Media, times: Sequence[float], fps: float, channels: int = 3) -> "list[Image]":
    """Return the frames displayed at `times`, ascending and in seconds from the start of the selected part."""
    if not isinstance(media.value, Path | bytes):
        frames, rate = _frame_list(media, fps)
        begin, _ = time_range(media, len(frames) / rate, math.inf)
        indices = [min(int((begin + time) * rate + 1e-6), len(frames) - 1) for time in times]
        return [read_image(frames[index], channels) for index in indices]
    with _video_file(media) as (container, stream):
        begin, _ = time_range(media, container_seconds(media, container, stream), math.inf)
        images = _frames_at(media, container, stream, [begin + time for time in times])
        return [image.convert("L") for image in images] if channels == 1 else images


def _frame_list(media: Media, fps: float) -> tuple[list[Media], float]:
    """Return the frames of a video that is a list or an array, and their frame rate (default: `fps`)."""
    value = media.value
    rate = media.options.get("fps", fps)
    if not isinstance(rate, int | float) or not rate > 0:
        raise BadMedia(f"{media.name}: fps must be a positive number, not {rate!r}")
    if not isinstance(value, list | tuple | np.ndarray) or len(value) == 0:
        raise BadMedia(f"{media.name}: expected a file, a list of images or an array [T, H, W, 3]")
    frames = [Media(f"frame {i} of {media.modality}", frame, {}) for i, frame in enumerate(value)]
    return frames, float(rate)


@contextmanager
def _video_file(media: Media) -> Iterator[tuple[Any, Any]]:
    """Context manager that opens a video file and yields its container and its first video stream."""
    with open_container(media) as container:
        if not container.streams.video:
            raise BadMedia(f"{media.name}: the file has no video track")
        stream = container.streams.video[0]
        check_pixels(media, stream.codec_context.height, stream.codec_context.width)
        stream.codec_context.options = {"max_pixels": str(MAX_PIXELS)}  # frame sizes may differ from the header
        yield container, stream


class _FrameDecoder:
    """Decodes the packets of a video and collects the frames that are displayed at `times`."""

    def __init__(self, media: Media, stream: Any, times: Sequence[float]) -> None:
        self.media = media
        self.stream = stream
        self.times = [time + 1e-6 for time in times]  # tolerance: the time of a frame may have been rounded down
        self.images: list[Image] = []
        self.current: Any = None  # the last decoded frame
        self._last_image_frame: Any = None
        self._decoded_pixels = 0

    def seconds(self, timestamp: int) -> Any:
        """Convert a timestamp of the stream to seconds from the start of the video."""
        return (timestamp - (self.stream.start_time or 0)) * self.stream.time_base

    def start(self, packet: Any) -> Any:
        """Return the time of a packet. Packets of old containers have no `pts`; their decoding time is used instead."""
        return self.seconds(packet.dts if packet.pts is None else packet.pts)

    @property
    def next_time(self) -> float:
        """The first time whose frame has not been decoded yet; infinite if there is none."""
        return self.times[len(self.images)] if len(self.images) < len(self.times) else math.inf

    def decode(self, packet: Any) -> None:
        """Decode a packet, or the frames that remain in the codec if `packet` is None."""
        for frame in self.stream.codec_context.decode(packet):
            self._decoded_pixels += frame.height * frame.width
            if self._decoded_pixels > MAX_VIDEO_PIXELS:
                raise BadMedia(
                    f"{self.media.name}: the video has too many pixels; at most {MAX_VIDEO_PIXELS:,} are decoded"
                )
            while self.next_time < self.seconds(frame.pts):
                self._append(self.current or frame)
            self.current = frame

    def skip(self) -> None:
        """Prepare the codec for packets that do not directly follow the previous ones."""
        self.decode(None)
        self.stream.codec_context.flush_buffers()

    def repeat_last(self) -> None:
        """Use the last frame for all times after the end of the video."""
        while self.next_time < math.inf:
            self._append(self.current)

    def _append(self, frame: Any) -> None:
        """Append the image of a frame. A repeated frame is converted only once."""
        if frame.is_corrupt:
            raise BadMedia(f"{self.media.name}: the frame at {self.next_time:.2f} s is damaged")
        if frame is self._last_image_frame:
            image = self.images[-1]
        else:
            image = frame.to_image().rotate(frame.rotation, expand=True)
        self.images.append(image)
        self._last_image_frame = frame


def _frames_at(media: Media, container: Any, stream: Any, times: Sequence[float]) -> "list[Image]":
    """Return the frames at `times`.

    Groups of pictures (from one key frame to the next) that contain none of these frames are skipped.
    """
    decoder = _FrameDecoder(media, stream, times)
    num_packets = 0
    is_decoding = False
    for group, following in pairwise(chain(_groups(container.demux(stream)), [None])):
        assert group is not None
        earliest = min(map(decoder.start, group)) if num_packets else -math.inf
        num_packets += len(group)
        latest = decoder.start(following[0]) if following else math.inf
        remaining_times = decoder.times[len(decoder.images) :]
        is_needed = any(earliest <= time < latest for time in remaining_times)
        if is_decoding and not is_needed:
            decoder.skip()
        if is_needed:
            for packet in group:
                decoder.decode(packet)
        is_decoding = is_needed
        if decoder.next_time == math.inf:
            return decoder.images
    if num_packets < stream.frames:
        raise BadMedia(f"{media.name}: the video is truncated: it has only {num_packets} of {stream.frames} frames")
    if is_decoding:
        decoder.decode(None)
    if decoder.current is None:
        raise BadMedia(f"{media.name}: the video has no frames")

    last_time = decoder.times[-1]
    end = float(decoder.seconds(decoder.current.pts))
    if not stream.frames and last_time - end > max(1.0, 0.1 * last_time):  # some videos end with a short still image
        raise BadMedia(
            f"{media.name}: the video is truncated: it ends at {end:.1f} s, but its header requires a frame at "
            f"{last_time:.1f} s"
        )
    decoder.repeat_last()
    return decoder.images


def _groups(packets: Iterable[Any]) -> Iterator[list[Any]]:
    """Yield the packets from each key frame up to the next."""
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
