"""Read the rows of JSONL files and of JSON arrays.

Opening a file indexes the byte offsets of its rows. A row is parsed when it is read.
"""

import json
import os
import re
from abc import abstractmethod
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np

from omnizoo.config.errors import UserError
from omnizoo.data.row import BadRow, Row, check_characters
from omnizoo.data.sources.base import FolderRows, MediaFolder, Rows

MAX_BYTES = 1 << 30  # maximum size of a row or tar member, because a single read cannot return much more
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # an escaped surrogate, either alone or in a valid pair


class IndexedFile(FolderRows):
    """Base class of files whose rows are ranges of bytes.

    Args:
        path: The file. It is indexed immediately.
        folder: The folder of the media files.
        open_file: Returns an open file for a path.
    """

    def __init__(self, path: Path, folder: MediaFolder, open_file: Callable[[Path], FileIO]) -> None:
        self.path = path
        self.folder = folder
        self.open_file = open_file
        self.starts, self.stops, self.lines = self.index()

    @abstractmethod
    def index(self) -> tuple[Rows, Rows, Rows]:
        """Return the first byte, the stop byte and the line number (from 1) of each row, as arrays `[rows]`."""

    @abstractmethod
    def parse(self, text: bytes) -> Row:
        """Parse the bytes of a row. Raises `BadRow` if the row cannot be used."""

    def __len__(self) -> int:
        return len(self.starts)

    def read(self, row: int) -> Row:
        """Read the bytes of a row and parse them."""
        start = int(self.starts[row])
        stop = int(self.stops[row])
        return self.parse(read_bytes(self.open_file, self.path, start, stop - start))

    def where(self, row: int) -> str:
        """Return `PATH:LINE`."""
        return f"{self.path}:{self.lines[row]}"


class JsonlFile(IndexedFile):
    """A file with one JSON object per line. Blank lines are skipped."""

    stored_kind = "JsonLines"

    def index(self) -> tuple[Rows, Rows, Rows]:
        return index_lines(self.path)

    def parse(self, text: bytes) -> Row:
        return parse_object(text)


class JsonArrayFile(JsonlFile):
    """A file that contains one JSON array of objects. An object may have any number of lines.

    The library `datasets` is not used, because it converts dates and forces all values of a field to one type.
    """

    stored_kind = "JsonArray"

    def index(self) -> tuple[Rows, Rows, Rows]:
        return index_array(self.path)

    def where(self, row: int) -> str:
        """Return `PATH:LINE` or, if several rows begin on that line, `PATH[INDEX]`."""
        line = self.lines[row]
        rows_on_line = np.searchsorted(self.lines, line, "right") - np.searchsorted(self.lines, line)
        return super().where(row) if rows_on_line == 1 else f"{self.path}[{row}]"


def read_bytes(open_file: Callable[[Path], FileIO], path: Path, start: int, size: int) -> bytes:
    """Read a range of bytes from a file.

    `pread` does not change the position in the file, so threads can share an open file.

    Args:
        open_file: Returns an open file for a path.
        path: Path of the file.
        start: The first byte.
        size: Number of bytes.

    Raises:
        BadRow: If the range is too large, or the file was truncated since it was opened.
        UserError: If the file cannot be read.
    """
    if size > MAX_BYTES:
        raise BadRow(f"the row has {size:,} bytes, more than the limit of {MAX_BYTES:,}")
    try:
        content = os.pread(open_file(path).fileno(), size, start)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None
    if len(content) < size:
        raise BadRow(f"only {len(content)} of {size} bytes are left: the file was truncated after it was opened")
    return content


def parse_object(text: bytes) -> Row:
    """Parse a row that is a JSON object.

    Raises:
        BadRow: If the JSON is invalid, is not an object, repeats a key, or contains a lone surrogate.
    """
    try:
        value = json.loads(text.decode("utf-8-sig"), object_pairs_hook=without_repeats)
    except UnicodeDecodeError as error:
        raise BadRow(f"not valid JSON: not UTF-8 ({error.reason} at byte {error.start})") from None
    except ValueError as error:
        raise BadRow(f"not valid JSON ({error})") from None
    except RecursionError:
        raise BadRow("not valid JSON: nested too deeply") from None
    if not isinstance(value, dict):
        raise BadRow(f"expected a JSON object, not {type(value).__name__}")
    if SURROGATE.search(text):
        check_characters(value)
    return value


def without_repeats(pairs: list[tuple[str, Any]]) -> Row:
    """Return a JSON object as a dict.

    Raises:
        ValueError: If a key is repeated, because JSON does not define which of the values applies.
    """
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(key for key in value if names.count(key) > 1)
        raise ValueError(f"an object has the key {repeated!r} twice")
    return value


def index_lines(path: Path, chunk_bytes: int = 1 << 24) -> tuple[Rows, Rows, Rows]:
    """Return the first byte, the stop byte and the line number (from 1) of every line that is not blank."""
    ends = []
    first_bytes = []
    position = 0
    after_newline = True
    with open(path, "rb") as file:
        while chunk := file.read(chunk_bytes):
            data = np.frombuffer(chunk, np.uint8)
            newlines = np.flatnonzero(data == ord("\n"))
            heads = newlines + 1 if not after_newline else np.concatenate(([0], newlines + 1))
            first_bytes.append(data[heads[heads < len(data)]])
            ends.append(newlines + position)
            position += len(data)
            after_newline = chunk.endswith(b"\n")

    last_end = np.array([] if after_newline else [position], np.int64)  # end of a last line without a line break
    stops = np.concatenate([*ends, last_end])
    starts = np.concatenate((np.zeros(1, np.int64), stops[:-1] + 1))[: len(stops)]
    lines = np.arange(1, len(stops) + 1)
    if not len(stops):
        return starts, stops, lines

    # Only a line that begins with white space can be blank. There are few such lines, so read each of them.
    white_space = np.frombuffer(b" \t\r\n\v\f", np.uint8)
    may_be_blank = np.isin(np.concatenate(first_bytes), white_space)
    has_row = np.ones(len(stops), bool)
    with open(path, "rb") as file:
        for line in np.flatnonzero(may_be_blank):
            file.seek(starts[line])
            has_row[line] = bool(file.read(stops[line] - starts[line]).strip())
    if has_row.all():
        return starts, stops, lines
    return starts[has_row], stops[has_row], lines[has_row]


def index_array(path: Path) -> tuple[Rows, Rows, Rows]:
    """Return the first byte, the stop byte and the line number (from 1) of each item in a file with a JSON array.

    Raises:
        UserError: If the file is too large or not a valid JSON array.
    """
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise UserError(
            f"{path}: a JSON array of {size:,} bytes is larger than the limit of {MAX_BYTES:,}. Convert it to JSONL."
        )
    data = path.read_bytes()
    byte_order_mark = b"\xef\xbb\xbf"
    byte = len(byte_order_mark) if data.startswith(byte_order_mark) else 0
    line = 1
    previous_stop = 0
    values: list[tuple[int, int, int]] = []
    try:
        text = data[byte:].decode()
        for start, stop in spans_of_array(text):
            byte += len(text[previous_stop:start].encode())
            line += text.count("\n", previous_stop, start)
            length = len(text[start:stop].encode())
            values.append((byte, byte + length, line))
            byte += length
            line += text.count("\n", start, stop)
            previous_stop = stop
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not a valid JSON array: {str(error)[:200]}") from None
    starts, stops, lines = np.array(values, np.int64).reshape(-1, 3).T
    return starts, stops, lines


def spans_of_array(text: str) -> Iterator[tuple[int, int]]:
    """Yield the first character and the stop character of each item in a JSON array.

    Raises:
        ValueError: If the text is not a valid JSON array.
    """
    decoder = json.JSONDecoder()
    white_space = re.compile(r"[ \t\r\n]*")

    def next_character(index: int) -> tuple[str, int]:
        """Return the first character at or after `index` that is not white space, and its index."""
        match = white_space.match(text, index)
        assert match is not None, "the pattern also matches the empty string"
        return text[match.end() : match.end() + 1], match.end()

    character, start = next_character(text.index("[") + 1)
    while character != "]":
        _, stop = decoder.raw_decode(text, start)
        yield start, stop
        character, start = next_character(stop)
        if character == ",":
            _, start = next_character(start + 1)
        elif character != "]":
            line = text.count("\n", 0, start) + 1
            raise ValueError(f"expected a comma or the end of the array in line {line}")

    extra, _ = next_character(start + 1)
    if extra:
        raise ValueError(f"{extra!r} follows the end of the array")


def is_array(path: Path) -> bool:
    """Whether a file with the suffix `.json` contains a JSON array. Otherwise, the file has one row per line."""
    with open(path, "rb") as file:
        return path.suffix == ".json" and file.read(256).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")
