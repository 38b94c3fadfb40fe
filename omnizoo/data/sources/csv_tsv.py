"""Rows of a CSV or TSV file. All cells are read as text, and empty cells are ignored.

Opening a file indexes the byte offsets of its records; a record is parsed when it is read. The library `datasets` is
not used because it infers types: numbers would not be text, and `NA` would be an empty cell.
"""

import csv
from collections.abc import Iterator

import numpy as np

from omnizoo.config.errors import UserError
from omnizoo.data.row import BadRow, Row
from omnizoo.data.sources.base import Rows
from omnizoo.data.sources.jsonl import MOST_BYTES, IndexedFile

CSV = {".csv": ",", ".tsv": "\t"}
OTHER_DELIMITERS = ";\t|,"


class CsvFile(IndexedFile):
    """A CSV or TSV file. The first record has the column names. Cells with line breaks or delimiters are quoted."""

    stored_kind = "CsvRows"

    def index(self) -> tuple[Rows, Rows, Rows]:
        csv.field_size_limit(MOST_BYTES)  # process-wide; the default limit is 128 KiB per cell
        ends = [0]

        def lines() -> Iterator[str]:
            with open(self.path, "rb") as file:
                for number, line in enumerate(file, 1):
                    ends.append(ends[-1] + len(line))
                    try:
                        yield line.decode("utf-8-sig" if number == 1 else "utf-8")
                    except UnicodeDecodeError as error:
                        raise UserError(f"{self.path}:{number} is not UTF-8 ({error.reason})") from None

        self.names: list[str] = []
        rows: list[tuple[int, int, int]] = []
        before = 0
        reader = csv.reader(lines(), delimiter=CSV[self.path.suffix], strict=True)
        try:
            for record in reader:
                if record and not self.names:
                    self.names = record
                elif record:
                    rows.append((ends[before], ends[reader.line_num], before + 1))
                before = reader.line_num
        except csv.Error as error:
            raise UserError(f"{self.path}:{reader.line_num} is not valid CSV: {error}") from None
        self._check_names()
        starts, stops, line_numbers = np.array(rows, np.int64).reshape(-1, 3).T
        return starts, stops, line_numbers

    def _check_names(self) -> None:
        """Check that column names are unique and not empty, and that the delimiter is plausible."""
        names = self.names
        if twice := [name for name in names if names.count(name) > 1]:
            raise UserError(f"{self.path} has several columns of the name {twice[0]!r}; its first line names them")
        if "" in names:
            raise UserError(f"{self.path}: column {names.index('') + 1} has no name; the first line names them")
        if len(names) == 1 and (other := next((sign for sign in OTHER_DELIMITERS if sign in names[0]), None)):
            raise UserError(
                f"{self.path} has one column, {names[0][:80]!r}: is it separated by {other!r}? Columns of .csv are "
                "separated by commas, of .tsv by tabs"
            )

    def parse(self, text: bytes) -> Row:
        try:
            (cells,) = csv.reader([text.decode()], delimiter=CSV[self.path.suffix], strict=True)
        except (csv.Error, ValueError) as error:
            raise BadRow(f"is not the CSV that it was when it was opened: {error}") from None
        if len(cells) != len(self.names):
            raise BadRow(f"it has {len(cells)} cells, but {self.path.name} has {len(self.names)} columns")
        return dict(zip(self.names, cells, strict=True))
