"""A source of rows of one's own: a table of SQLite, each row of which is a text.

    data:
      sources:
        - {rows: "sqlite_rows:SqliteRows", options: {path: corpus.db, table: texts, column: body}}

    PYTHONPATH=examples/sqlite_rows omnizoo train my.yaml

Rows are asked for by number, in any order and as often as needed. A loader worker makes the source anew, by the same
options, so each process has its own connection.
"""

import sqlite3
from pathlib import Path

import omnizoo


class SqliteRows(omnizoo.RowSource):
    def __init__(self, path: str, table: str, column: str = "text") -> None:
        if not Path(path).is_file():
            raise ValueError(f"{path} is not a file")
        self.path, self.table, self.column = path, table, column
        self.connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
        self.ids = [id for (id,) in self.connection.execute(f'SELECT rowid FROM "{table}" ORDER BY rowid')]

    def __len__(self) -> int:
        return len(self.ids)

    def read(self, row: int) -> dict[str, str]:
        query = f'SELECT "{self.column}" FROM "{self.table}" WHERE rowid = ?'
        (text,) = self.connection.execute(query, [self.ids[row]]).fetchone()
        if not text:
            raise omnizoo.BadRow("its text is empty")  # data.on_bad_row decides what comes of it
        return {"text": text}

    def where(self, row: int) -> str:
        """What messages call the row."""
        return f"{self.path}, {self.table}, rowid {self.ids[row]}"
