"""Shared pieces of data/rows/test_media.py and other tests."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np

from omnizoo.data.rendering.renderer import Renderer
from omnizoo.data.sample import RenderedRow
from omnizoo.modalities.base import Decoder, Encoder, Modality
from omnizoo.modalities.item import MediaSize
from omnizoo.modalities.media import BadMedia, Media


def toy(rows: int, payload: bytes = b"payload") -> bytes:
    return b"TOY" + bytes([rows]) + payload


def measure(media: Media) -> MediaSize:
    if isinstance(media.value, Path | bytes):
        with media.open() as file:
            header = file.read(4)
        if header[:3] != b"TOY" or len(header) < 4:
            raise BadMedia("this is no toy")
        return MediaSize(num_placeholders=header[3], cost=header[3])
    values = media.value["array"] if isinstance(media.value, dict) else media.value
    return MediaSize(num_placeholders=len(values), cost=1.0)


class ToyEncoder(Encoder):
    def measure(self, media: Media) -> MediaSize:
        return measure(media)


class ToyDecoder(Decoder):
    def measure(self, media: Media) -> MediaSize:
        size = measure(media)  # not as many rows as the encoder's
        return dataclasses.replace(size, num_placeholders=size.num_placeholders + 1)


class Timed(Encoder):
    """Two rows for each second, with the time written before them."""

    def measure(self, media: Media) -> MediaSize:
        seconds = measure(media).num_placeholders
        layout = [piece for second in range(seconds) for piece in (f"<{second}.5 s>", 2)]
        return MediaSize(2 * seconds, 1.0, layout=tuple(layout))


def modality(name: str, encoder: Encoder | None, decoder: Decoder | None) -> Modality:
    return Modality(name, encoder, decoder, f"<{name}:", f"<{name}-pad>", f":{name}>")


MODALITIES = {
    m.name: m
    for m in (
        modality("image", ToyEncoder(), ToyDecoder()),
        modality("audio", ToyEncoder(), None),
        modality("tone", None, ToyDecoder()),
        modality("clip", Timed(), None),
    )
}
MARKS = tuple(mark for m in MODALITIES.values() for mark in (m.begin, m.placeholder, m.end))


def shown(renderer: Renderer, rendered: RenderedRow) -> str:
    """The tokens with [[ ]] around the runs of text targets, and a placeholder repeated n times as `(n pad)`."""
    runs = np.split(np.arange(len(rendered.input_ids)), np.flatnonzero(np.diff(rendered.is_target)) + 1)
    pieces = [(renderer.tokenizer.decode(rendered.input_ids[run]), rendered.is_target[run[0]]) for run in runs]
    text = "".join(f"[[{text}]]" if is_target else text for text, is_target in pieces)
    return re.sub(r"(?:<(\w+)-pad>)+", lambda found: f"({found[0].count('pad')} {found[1]})", text)


def chat(user: Any, assistant: Any = "ok", **columns: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}], **columns}


def text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}
