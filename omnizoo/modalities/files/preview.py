"""HTML previews of media items (`omnizoo data inspect`)."""

import base64
import io
from html import escape
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from omnizoo.modalities.files.decoding import optional

if TYPE_CHECKING:
    from PIL.Image import Image


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
