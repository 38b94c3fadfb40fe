"""A custom row source: each record of a SQLite table is a text row.

    data:
      sources:
        - {rows: "sqlite_rows:SqliteRows", options: {path: corpus.db, table: texts, column: body}}

    PYTHONPATH=examples/sqlite_rows omnizoo train my.yaml

OmniZoo reads rows by number, in any order and any number of times. Each loader worker builds the source again from the
same options, so each process has its own connection.
"""

import sqlite3
from pathlib import Path

import omnizoo


class SqliteRows(omnizoo.RowSource):
    """Text rows from one column of a SQLite table, ordered by rowid."""

    def __init__(self, path: str, table: str, column: str = "text") -> None:
        if not Path(path).is_file():
            raise ValueError(f"{path}: file not found")
        self.path = path
        self.table = table
        self.column = column
        self.connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
        self.ids = [id for (id,) in self.connection.execute(f'SELECT rowid FROM "{table}" ORDER BY rowid')]

    def __len__(self) -> int:
        return len(self.ids)

    def read(self, row: int) -> dict[str, str]:
        query = f'SELECT "{self.column}" FROM "{self.table}" WHERE rowid = ?'
        (text,) = self.connection.execute(query, [self.ids[row]]).fetchone()
        if not text:
            raise omnizoo.BadRow("the text is empty")  # data.on_bad_row: skip the row or raise an error
        return {"text": text}

    def where(self, row: int) -> str:
        """Return the name of the row in error messages."""
        return f"{self.path}, {self.table}, rowid {self.ids[row]}"
