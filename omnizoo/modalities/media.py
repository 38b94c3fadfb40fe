"""A raw media item of a row, before decoding: its path, bytes or values, and its name in error messages."""

import io
import mimetypes
import stat
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

# Python's MIME table lacks these types, and the table of the operating system may lack them, too.
for suffix, kind in {
    ".flac": "audio/flac",
    ".ogg": "audio/ogg",
    ".m4a": "audio/mp4",
    ".mkv": "video/x-matroska",
}.items():
    mimetypes.add_type(kind, suffix)


WELL_KNOWN = ("image", "audio", "video")  # names of media in datasets, whether or not a model reads them


class BadMedia(Exception):  # noqa: N818 (no error while `data.on_bad_row: skip`)
    """Raised for a media item that cannot be used. The message is the reason; the row reader adds the file and line."""


class MissingMedia(BadMedia):
    """Raised for a media file that does not exist in the folder of the source.

    Args:
        message: The reason.
        name: The name of the file in the row.
    """

    def __init__(self, message: str, name: str = "") -> None:
        super().__init__(message)
        self.name = name


def kind_of_file(mode: int) -> str:
    """Return a description of a path that is not a regular file, from its `st_mode`."""
    names = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    return names.get(stat.S_IFMT(mode), "a device")


@dataclass(frozen=True)
class Media:
    """One media item of a row, before decoding. `Encoder.prepare` and `Decoder.prepare` receive it.

    Example:
        >>> item = omnizoo.Media("sensor", [0.1, 0.4, 0.2], options={"rate": 100})
        >>> inputs = encoder.prepare(item)
    """

    modality: str  # content type of the item, as in the config
    value: Path | bytes | Any  # a path, encoded bytes, or plain values: numbers, lists, mappings, arrays
    options: dict[str, Any]  # other fields of the item in the row: start and end in seconds, sampling rate, ...
    seed: int = 0  # seed of augmentation and noise; depends on the run's seed, the epoch, the row and the item

    @property
    def name(self) -> str:
        """The name of the item in error messages."""
        if isinstance(self.value, Path):
            return str(self.value)
        return f"{self.modality} given as {type(self.value).__name__}"

    def open(self) -> BinaryIO:
        """Open the item as a binary file.

        Returns:
            A file object at the first byte.

        Raises:
            BadMedia: If the item is neither a readable regular file nor bytes, or if it is empty.
        """
        if isinstance(self.value, bytes):
            if not self.value:
                raise BadMedia(f"{self.name}: the item is empty")
            return io.BytesIO(self.value)
        if not isinstance(self.value, Path):
            raise BadMedia(f"{self.name}: expected a path or encoded bytes")
        try:
            status = self.value.stat()
            if not stat.S_ISREG(status.st_mode):  # opening a pipe may block, and reading a device may never end
                raise BadMedia(f"{self.name}: expected a file, but it is {kind_of_file(status.st_mode)}")
            if status.st_size == 0:
                raise BadMedia(f"{self.name}: the item is empty")
            return open(self.value, "rb")
        except OSError as error:
            raise BadMedia(f"{self.name}: {error.strerror or error}") from None

    @cached_property
    def random(self) -> np.random.Generator:
        """The random generator of the item. It does not depend on the layout, on resume or on the loader worker."""
        return np.random.Generator(np.random.PCG64(self.seed))
