"""A raw item of a row, before anything is decoded: where its bytes or values are, and how to say so in an error."""

import io
import mimetypes
import stat
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

# Python's own table lacks these, and a system's may have them or not.
for suffix, kind in {
    ".flac": "audio/flac",
    ".ogg": "audio/ogg",
    ".m4a": "audio/mp4",
    ".mkv": "video/x-matroska",
}.items():
    mimetypes.add_type(kind, suffix)


WELL_KNOWN = ("image", "audio", "video")  # what datasets call media, whether or not a model reads them


class BadMedia(Exception):  # noqa: N818 (no error while `data.on_bad_row: skip`)
    """An item that cannot be used; the message is the reason. Whoever reads the row adds where it is."""


def kind_of_file(mode: int) -> str:
    """What is no regular file, in words."""
    names = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    return names.get(stat.S_IFMT(mode), "a device")


@dataclass(frozen=True)
class Media:
    """One item as its row gives it: a path, encoded bytes, or plain values (numbers, lists, mappings, arrays)."""

    modality: str
    value: Path | bytes | Any
    options: dict[str, Any]  # whatever else the row says about the item: start and end of a clip, sampling rate, ...
    seed: int = 0  # a function of the run's seed, the epoch, the row and the item: for augmentation and noise

    @property
    def name(self) -> str:
        """How errors call it."""
        if isinstance(self.value, Path):
            return str(self.value)
        return f"{self.modality} given as {type(self.value).__name__}"

    def open(self) -> BinaryIO:
        """Its bytes as a file, at their beginning."""
        if isinstance(self.value, bytes):
            if not self.value:
                raise BadMedia(f"{self.name} is empty")
            return io.BytesIO(self.value)
        if not isinstance(self.value, Path):
            raise BadMedia(f"{self.name}: a path or encoded bytes were expected")
        try:
            about = self.value.stat()
            if not stat.S_ISREG(about.st_mode):  # to open a pipe would wait for its writer, and a device may never end
                raise BadMedia(f"{self.name} is {kind_of_file(about.st_mode)}, not a file")
            if about.st_size == 0:
                raise BadMedia(f"{self.name} is empty")
            return open(self.value, "rb")
        except OSError as error:
            raise BadMedia(f"{self.name}: {error.strerror or error}") from None

    @cached_property
    def random(self) -> np.random.Generator:
        """The item's own stream of random numbers: the same on every layout, on resume, and for any loader worker."""
        return np.random.Generator(np.random.PCG64(self.seed))
