"""Rows of a JSONL file, or of one JSON array. Opening it finds where they are; a row is parsed when it is asked for."""

import json
import os
import re
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np

from omnizoo.config.errors import UserError
from omnizoo.data.rows import BadRow, Folder, Row, Rows, RowSource, check_characters

JSON_LINES = (".jsonl", ".ndjson", ".json")
MOST_BYTES = 1 << 30  # of one line, or one member of a tar file: more is no row, and would not fit into one read
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # halves of pairs, and whole pairs, which are fine


class JsonLines(RowSource):
    """One JSON object per line; blank lines are ignored, line numbers count them."""

    def __init__(self, path: Path, folder: Folder, open_file: Callable[[Path], FileIO]) -> None:
        self.path, self.folder, self.open_file = path, folder, open_file
        self.starts, self.stops, self.lines = self.index()

    def index(self) -> tuple[Rows, Rows, Rows]:
        return index_lines(self.path)

    def __len__(self) -> int:
        return len(self.starts)

    def read(self, row: int) -> Row:
        start, stop = int(self.starts[row]), int(self.stops[row])
        return parse_object(read_bytes(self.open_file, self.path, start, stop - start))

    def find(self, row: int, name: str) -> Path:
        return self.folder.find(name)

    def where(self, row: int) -> str:
        return f"{self.path}:{self.lines[row]}"


class JsonArray(JsonLines):
    """The objects of one array, wherever their lines end. Not by `datasets`, which takes dates for something else than
    texts, and gives all values of a field one type."""

    def index(self) -> tuple[Rows, Rows, Rows]:
        return index_array(self.path)

    def where(self, row: int) -> str:
        """By its line, or by its number, from 0 on, where several begin on one line."""
        shared = np.searchsorted(self.lines, self.lines[row], "right") - np.searchsorted(self.lines, self.lines[row])
        return super().where(row) if shared == 1 else f"{self.path}[{row}]"


def read_bytes(open_file: Callable[[Path], FileIO], path: Path, start: int, size: int) -> bytes:
    """A part of a file. By pread: whoever else reads the file at the same time has no position to share."""
    if size > MOST_BYTES:
        raise BadRow(f"its {size:,} bytes are more than the {MOST_BYTES:,} that are read at once")
    try:
        found = os.pread(open_file(path).fileno(), size, start)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None
    if len(found) < size:
        raise BadRow(f"{len(found)} of its {size} bytes are there: the file has been cut since it was opened")
    return found


def parse_object(text: bytes) -> Row:
    try:
        value = json.loads(text.decode("utf-8-sig"), object_pairs_hook=without_repeats)
    except UnicodeDecodeError as error:
        raise BadRow(f"not valid JSON: not UTF-8 ({error.reason} at byte {error.start})") from None
    except ValueError as error:
        raise BadRow(f"not valid JSON ({error})") from None
    except RecursionError:
        raise BadRow("not valid JSON: nested too deeply") from None
    if not isinstance(value, dict):
        raise BadRow(f"a JSON object was expected, not {type(value).__name__}")
    if SURROGATE.search(text):
        check_characters(value)
    return value


def without_repeats(pairs: list[tuple[str, Any]]) -> Row:
    """JSON leaves open which value of a repeated key counts, so neither does."""
    value = dict(pairs)
    if len(value) < len(pairs):
        twice = next(key for key in value if sum(name == key for name, _ in pairs) > 1)
        raise ValueError(f"the key {twice!r} is there twice in one object")
    return value


def index_lines(path: Path, chunk_bytes: int = 1 << 24) -> tuple[Rows, Rows, Rows]:
    """Start and stop byte of every line that is not blank, and its 1-based number in the file."""
    ends, first_bytes, position, after_newline = [], [], 0, True
    with open(path, "rb") as file:
        while chunk := file.read(chunk_bytes):
            data = np.frombuffer(chunk, np.uint8)
            newlines = np.flatnonzero(data == ord("\n"))
            heads = newlines + 1 if not after_newline else np.concatenate(([0], newlines + 1))
            first_bytes.append(data[heads[heads < len(data)]])
            ends.append(newlines + position)
            position += len(data)
            after_newline = chunk.endswith(b"\n")
    last = np.array([] if after_newline else [position], np.int64)  # a last line without newline
    stops = np.concatenate([*ends, last])
    starts = np.concatenate((np.zeros(1, np.int64), stops[:-1] + 1))[: len(stops)]
    lines = np.arange(1, len(stops) + 1)
    if not len(stops):
        return starts, stops, lines
    # a line may be blank only if it begins with white space: few do, so those are looked at one by one
    keep = np.ones(len(stops), bool)
    with open(path, "rb") as file:
        for line in np.flatnonzero(np.isin(np.concatenate(first_bytes), np.frombuffer(b" \t\r\n\v\f", np.uint8))):
            file.seek(starts[line])
            keep[line] = bool(file.read(stops[line] - starts[line]).strip())
    return (starts, stops, lines) if keep.all() else (starts[keep], stops[keep], lines[keep])


def index_array(path: Path) -> tuple[Rows, Rows, Rows]:
    """As `index_lines`, of the values of an array."""
    size = path.stat().st_size
    if size > MOST_BYTES:
        raise UserError(f"{path} is one JSON array of {size:,} bytes; write more than {MOST_BYTES:,} as JSONL")
    data, mark = path.read_bytes(), b"\xef\xbb\xbf"
    byte, line, before = len(mark) if data.startswith(mark) else 0, 1, 0
    found: list[tuple[int, int, int]] = []
    try:
        text = data[byte:].decode()
        for start, stop in spans_of_array(text):
            byte += len(text[before:start].encode())
            line += text.count("\n", before, start)
            length = len(text[start:stop].encode())
            found.append((byte, byte + length, line))
            byte, line, before = byte + length, line + text.count("\n", start, stop), stop
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is no valid JSON array: {str(error)[:200]}") from None
    starts, stops, lines = np.array(found, np.int64).reshape(-1, 3).T
    return starts, stops, lines


def spans_of_array(text: str) -> Iterator[tuple[int, int]]:
    """First character of each value of an array, and the one after its last."""
    decoder, gap = json.JSONDecoder(), re.compile(r"[ \t\r\n]*")

    def sign(place: int) -> tuple[str, int]:
        """The next character that is not white space, and where it is."""
        found = gap.match(text, place)
        assert found is not None, "it matches nothing, too"
        return text[found.end() : found.end() + 1], found.end()

    next_one, at = sign(text.index("[") + 1)
    while next_one != "]":
        _, end = decoder.raw_decode(text, at)
        yield at, end
        next_one, at = sign(end)
        if next_one == ",":
            _, at = sign(at + 1)
        elif next_one != "]":
            line = text.count("\n", 0, at) + 1
            raise ValueError(f"a comma or the end was expected in line {line}")
    if rest := sign(at + 1)[0]:
        raise ValueError(f"there is more after its end: {rest!r}")


def is_array(path: Path) -> bool:
    """`.json` may hold one array of rows, or a row in each line."""
    with open(path, "rb") as file:
        return path.suffix == ".json" and file.read(256).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")
