"""Read the rows of CSV and TSV files. All cells are text, and empty cells are ignored.

Opening a file indexes the byte offsets of its records. A record is parsed when it is read. The library `datasets` is
not used, because it infers types: `007` would become a number, and `NA` an empty cell.
"""

import csv
from collections.abc import Iterator

import numpy as np

from omnizoo.config.errors import UserError
from omnizoo.data.row import BadRow, Row
from omnizoo.data.sources.base import Rows
from omnizoo.data.sources.jsonl import MAX_BYTES, IndexedFile
from omnizoo.hub.dataset_files import CSV

OTHER_DELIMITERS = ";\t|,"  # a header with one column that contains one of these has probably another delimiter


class CsvFile(IndexedFile):
    """A CSV or TSV file. Its first record contains the column names. Cells may contain line breaks in quotes."""

    stored_kind = "CsvRows"

    def index(self) -> tuple[Rows, Rows, Rows]:
        """Read the file once, to find the records and the column names. See `IndexedFile.index`."""
        csv.field_size_limit(MAX_BYTES)  # this changes the limit of the whole process, 128 KiB per cell by default
        line_ends = [0]  # byte offsets: start of the file, then the end of each line

        def lines() -> Iterator[str]:
            """Yield the lines as text, and record where they end."""
            with open(self.path, "rb") as file:
                for number, line in enumerate(file, 1):
                    line_ends.append(line_ends[-1] + len(line))
                    encoding = "utf-8-sig" if number == 1 else "utf-8"
                    try:
                        yield line.decode(encoding)
                    except UnicodeDecodeError as error:
                        message = f"{self.path}:{number}: not UTF-8 ({error.reason}). Convert the file to UTF-8."
                        raise UserError(message) from None

        self.names: list[str] = []
        rows: list[tuple[int, int, int]] = []
        lines_before = 0
        reader = csv.reader(lines(), delimiter=CSV[self.path.suffix], strict=True)
        try:
            for record in reader:
                if record and not self.names:
                    self.names = record
                elif record:
                    rows.append((line_ends[lines_before], line_ends[reader.line_num], lines_before + 1))
                lines_before = reader.line_num
        except csv.Error as error:
            raise UserError(f"{self.path}:{reader.line_num}: not valid CSV: {error}") from None

        self._check_names()
        starts, stops, line_numbers = np.array(rows, np.int64).reshape(-1, 3).T
        return starts, stops, line_numbers

    def _check_names(self) -> None:
        """Check that column names are unique and not empty, and that the file has the expected delimiter."""
        names = self.names
        repeated = [name for name in names if names.count(name) > 1]
        if repeated:
            raise UserError(
                f"{self.path}: several columns are named {repeated[0]!r}. Rename them in the first line of the file."
            )
        if "" in names:
            raise UserError(
                f"{self.path}: column {names.index('') + 1} has no name. Add a name to the first line of the file."
            )

        delimiters = [sign for sign in OTHER_DELIMITERS if sign in names[0]] if len(names) == 1 else []
        if delimiters:
            raise UserError(
                f"{self.path}: the file has one column, {names[0][:80]!r}, which contains {delimiters[0]!r}. Separate "
                "the columns of .csv files by commas, and those of .tsv files by tabs."
            )

    def parse(self, text: bytes) -> Row:
        """Parse a record. Raises `BadRow` if the number of cells is wrong."""
        try:
            (cells,) = csv.reader([text.decode()], delimiter=CSV[self.path.suffix], strict=True)
        except (csv.Error, ValueError) as error:
            raise BadRow(f"the file has changed since it was opened: {error}") from None
        if len(cells) != len(self.names):
            raise BadRow(f"the row has {len(cells)} cells, but {self.path.name} has {len(self.names)} columns")
        return dict(zip(self.names, cells, strict=True))
