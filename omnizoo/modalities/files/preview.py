"""HTML previews of media items (`omnizoo data inspect`), and file types that browsers display."""

import base64
import io
from html import escape
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from omnizoo.modalities.files.decoding import optional

if TYPE_CHECKING:
    from PIL.Image import Image

# Files that browsers display without running code: (first bytes, offset and bytes of a second mark, suffix).
DISPLAYED = (
    (b"\x89PNG\r\n\x1a\n", 0, b"", ".png"),
    (b"\xff\xd8\xff", 0, b"", ".jpg"),
    (b"GIF8", 0, b"", ".gif"),
    (b"RIFF", 8, b"WEBP", ".webp"),
    (b"RIFF", 8, b"WAVE", ".wav"),
    (b"fLaC", 0, b"", ".flac"),
    (b"OggS", 0, b"", ".ogg"),
    (b"ID3", 0, b"", ".mp3"),
    (b"\xff\xfb", 0, b"", ".mp3"),
    (b"\x1a\x45\xdf\xa3", 0, b"", ".webm"),
    (b"", 4, b"ftyp", ".mp4"),
)


def displayed_type(content: bytes) -> str | None:
    """Return the suffix of a file that browsers display, inferred from its first bytes; None for other files."""
    for first, offset, second, suffix in DISPLAYED:
        if content.startswith(first) and content.startswith(second, offset):
            return suffix
    return None


def thumbnail(image: "Image", title: str, side: int = 128) -> str:
    """Return HTML that shows an image, scaled down to at most `side` pixels per side."""
    small = image.copy()
    small.thumbnail((side, side))
    data = io.BytesIO()
    small.save(data, format="PNG")
    source = base64.b64encode(data.getvalue()).decode()
    return f'<img src="data:image/png;base64,{source}" title="{escape(title)}" alt="{escape(title)}">'


def audio_player(samples: npt.NDArray[np.float32], rate: int, title: str) -> str:
    """Return HTML that plays audio samples."""
    data = io.BytesIO()
    optional("soundfile").write(data, samples, rate, format="WAV")
    source = base64.b64encode(data.getvalue()).decode()
    return f'<audio controls title="{escape(title)}" src="data:audio/wav;base64,{source}"></audio>'
