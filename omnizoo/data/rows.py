"""What a source of rows is, and what goes for all of them: rows by number, the files they name, values that no reader
lets through.
"""

import stat
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from omnizoo.modalities.item import BadMedia, kind_of_file

Row = dict[str, Any]
Rows = npt.NDArray[np.int64]
EXTENT = 256  # rows of an extent where any row is equally cheap to reach
SIDES = ("chosen", "rejected")  # the answers of a preference pair
SINGLE = ("completion", "label")  # an answer, and whether it is a good one
PROMPTS = ("prompt", "messages", "conversations")  # what they follow
CONVERSATION = ("messages", "conversations", "text")  # what a row is read from, the first one that it has
# Fields that are, or may be, lists of objects.
STRUCTS = ("messages", "conversations", "tools", "prompt", "chosen", "rejected", "completion")


class BadRow(Exception):  # noqa: N818 (no error while `data.on_bad_row: skip`)
    """A row that cannot be used; the message is the reason. The lane adds where the row is."""


class RowSource(ABC):
    """Rows by number, from 0 on. A subclass has `__len__` and `read`; the rest is as below unless it says otherwise."""

    @abstractmethod
    def __len__(self) -> int:
        """How many rows there are; it does not change."""

    @abstractmethod
    def read(self, row: int) -> Row:
        """The row of that number, always the same one. BadRow if it cannot be used."""

    @cached_property
    def extents(self) -> Rows:
        """Row numbers where one run of rows best read together ends and the next begins (first 0, last `len`): Parquet
        row groups, small blocks elsewhere."""
        return blocks(len(self))

    def find(self, row: int, name: str) -> Path | bytes:
        """The file, or the bytes, that a row calls by name; BadMedia if there is none."""
        return Folder(Path(), Path().resolve()).find(name)

    def where(self, row: int) -> str:
        """A row's name in messages."""
        return f"{type(self).__name__} row {row}"


def blocks(rows: int) -> Rows:
    return np.append(np.arange(0, rows, EXTENT), rows)


@dataclass(frozen=True)
class Folder:
    """Media files by name: relative to `base`, and nowhere outside of `root`, also not through links."""

    base: Path
    root: Path | None  # resolved; None: anywhere

    def find(self, name: str) -> Path:
        path = self.base / name
        shown = path if len(name) < 256 else f"{name[:64]}..."
        try:
            if self.root is not None and not path.resolve().is_relative_to(self.root):
                raise BadMedia(f"{shown} is outside of {self.root} (data.media_outside: true allows such paths)")
            about = path.stat()
            if not stat.S_ISREG(about.st_mode):  # to open a pipe would wait for its writer, and a device may never end
                raise BadMedia(f"{shown} is {kind_of_file(about.st_mode)}, not a file")
            if about.st_size == 0:
                raise BadMedia(f"{shown} is empty")
        except FileNotFoundError:
            raise BadMedia(f"{shown} does not exist") from None
        except (OSError, RuntimeError, ValueError) as error:  # names too long, links in a circle, zero bytes
            raise BadMedia(f"{shown} cannot be a file: {getattr(error, 'strerror', None) or error}") from None
        return path


def check_characters(value: Any) -> None:
    """No tokenizer, terminal or file takes half of a surrogate pair, which JSON can spell."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            half = value[error.start].encode("unicode_escape").decode()
            raise BadRow(f"a string has {half} at character {error.start}, which is half a character") from None
    elif isinstance(value, dict):
        for key, part in value.items():
            check_characters(key)
            check_characters(part)
    elif isinstance(value, list | tuple):
        for part in value:
            check_characters(part)


def without_nulls(row: Row, names: Sequence[str]) -> Row:
    """Columns of structs give every object the keys of all others: two calls of different tools would each have the
    arguments of both. What is None in them was not there."""
    return row | {name: _without_nulls(row[name]) for name in names if isinstance(row.get(name), list)}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(part) for key, part in value.items() if part is not None}
    if isinstance(value, list) and value and isinstance(value[0], dict | list):
        return [_without_nulls(part) for part in value]
    return value
