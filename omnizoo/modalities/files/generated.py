"""Write what a pipeline of diffusers generated for one prompt: PNG for an image, MP4 for a clip, WAV for sound."""

from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from omnizoo.config.errors import UserError
from omnizoo.modalities.files.decoding import optional
from omnizoo.modalities.files.pixels import Array

FRAME_RATE = 16.0  # frames per second of a clip, if its family states none
QUALITY = "12"  # rate factor of H.264: no visible loss


def save_output(output: Any, stem: Path, frame_rate: float | None = None, sample_rate: int | None = None) -> list[Path]:
    """Write the items in the output of a pipeline that was called with one prompt and `output_type="np"`.

    Args:
        output: The output, with `images`, `frames` or `audios` (some families return frames and `audio`).
        stem: Path of the files without their suffix. Missing folders are created.
        frame_rate: Frames per second of a clip.
        sample_rate: Samples per second of sound.

    Returns:
        The files: one PNG, one MP4, one WAV, or one MP4 and one WAV.

    Raises:
        UserError: If the values are not finite. Generation diverged, or the weights are damaged.
    """
    stem.parent.mkdir(parents=True, exist_ok=True)
    files = []
    for modality, values in _items(output):
        if not np.isfinite(values).all():
            raise UserError(f"{stem}: the generated values are not finite. The weights are damaged or diverged.")
        if modality == "audio":
            files.append(_write_wave(values, stem.with_name(f"{stem.name}.wav"), sample_rate or 44100))
        elif modality == "video" and len(values) > 1:
            files.append(_write_clip(to_bytes(values), stem.with_name(f"{stem.name}.mp4"), frame_rate or FRAME_RATE))
        else:
            pixels = to_bytes(values[0] if modality == "video" else values)
            file = stem.with_name(f"{stem.name}.png")
            optional("PIL.Image").fromarray(pixels).save(file)
            files.append(file)
    return files


def modality_of_file(file: Path) -> str:
    """Return the modality of a file that `save_output` wrote."""
    return {".png": "image", ".mp4": "video", ".wav": "audio"}[file.suffix]


def to_bytes(values: Array) -> Array:
    """Convert floats in 0..1 to bytes, as the image processor of diffusers does."""
    return (values.clip(0, 1) * 255).round().astype(np.uint8)


def _items(output: Any) -> Iterator[tuple[str, Array]]:
    """Yield the modality and the values of each item of the first sample."""
    for field, modality in (("images", "image"), ("frames", "video"), ("audios", "audio"), ("audio", "audio")):
        values = getattr(output, field, None)
        if values is not None:
            first = values[0]
            yield modality, np.asarray(first.float().cpu() if hasattr(first, "cpu") else first)


def _write_clip(frames: Array, file: Path, rate: float) -> Path:
    """Write frames `[F, H, W, 3]` as H.264, which browsers play. Odd sides lose a row or a column."""
    height, width = (side - side % 2 for side in frames.shape[1:3])
    with optional("av").open(str(file), "w") as container:
        stream = container.add_stream("libx264", rate=Fraction(rate).limit_denominator(1001), options={"crf": QUALITY})
        stream.height, stream.width, stream.pix_fmt = height, width, "yuv420p"
        for frame in frames:
            pixels = np.ascontiguousarray(frame[:height, :width])
            container.mux(stream.encode(optional("av").VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return file


def _write_wave(values: Array, file: Path, rate: int) -> Path:
    """Write sound `[channels, samples]` or `[samples]`."""
    optional("soundfile").write(file, values.T if values.ndim > 1 else values, rate)
    return file
