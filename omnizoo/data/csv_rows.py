"""Rows of a CSV or TSV file: every cell is a text, and an empty one says nothing. Opening it finds where records begin;
a record is parsed when it is asked for.

Not by `datasets`, which guesses types: a column of numbers would be no text, and the word NA an empty cell.
"""

import csv
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path

import numpy as np

from omnizoo.config.errors import UserError
from omnizoo.data.json_lines import MOST_BYTES, read_bytes
from omnizoo.data.rows import BadRow, Folder, Row, RowSource

CSV = {".csv": ",", ".tsv": "\t"}
OTHER_DELIMITERS = ";\t|,"


class CsvRows(RowSource):
    """The first record names the columns. A text with line breaks or commas is in double quotes."""

    def __init__(self, path: Path, folder: Folder, open_file: Callable[[Path], FileIO]) -> None:
        self.path, self.folder, self.open_file = path, folder, open_file
        self.delimiter = CSV[path.suffix]
        self.names, spans, self.lines = self._index()
        self.starts, self.stops = np.array(spans, np.int64).reshape(-1, 2).T

    def _index(self) -> tuple[list[str], list[tuple[int, int]], list[int]]:
        """Names of columns; of each record its first byte, the one after its last, and its line."""
        csv.field_size_limit(MOST_BYTES)  # of the whole process; without it, texts of 128 KiB are refused
        ends = [0]

        def lines() -> Iterator[str]:
            with open(self.path, "rb") as file:
                for number, line in enumerate(file, 1):
                    ends.append(ends[-1] + len(line))
                    try:
                        yield line.decode("utf-8-sig" if number == 1 else "utf-8")
                    except UnicodeDecodeError as error:
                        raise UserError(f"{self.path}:{number} is not UTF-8 ({error.reason})") from None

        names: list[str] = []
        spans, numbers, before = [], [], 0
        reader = csv.reader(lines(), delimiter=self.delimiter, strict=True)
        try:
            for record in reader:
                if record and not names:
                    names = record
                elif record:
                    spans.append((ends[before], ends[reader.line_num]))
                    numbers.append(before + 1)
                before = reader.line_num
        except csv.Error as error:
            raise UserError(f"{self.path}:{reader.line_num} is not valid CSV: {error}") from None
        self._check(names)
        return names, spans, numbers

    def _check(self, names: list[str]) -> None:
        if twice := [name for name in names if names.count(name) > 1]:
            raise UserError(f"{self.path} has several columns of the name {twice[0]!r}; its first line names them")
        if "" in names:
            raise UserError(f"{self.path}: column {names.index('') + 1} has no name; the first line names them")
        if len(names) == 1 and (other := next((sign for sign in OTHER_DELIMITERS if sign in names[0]), None)):
            raise UserError(
                f"{self.path} has one column, {names[0][:80]!r}: is it separated by {other!r}? Columns of .csv are "
                "separated by commas, of .tsv by tabs"
            )

    def __len__(self) -> int:
        return len(self.starts)

    def read(self, row: int) -> Row:
        start, stop = int(self.starts[row]), int(self.stops[row])
        text = read_bytes(self.open_file, self.path, start, stop - start)
        try:
            (cells,) = csv.reader([text.decode()], delimiter=self.delimiter, strict=True)
        except (csv.Error, ValueError) as error:
            raise BadRow(f"is not the CSV that it was when it was opened: {error}") from None
        if len(cells) != len(self.names):
            raise BadRow(f"it has {len(cells)} cells, but {self.path.name} has {len(self.names)} columns")
        return dict(zip(self.names, cells, strict=True))

    def find(self, row: int, name: str) -> Path:
        return self.folder.find(name)

    def where(self, row: int) -> str:
        return f"{self.path}:{self.lines[row]}"
