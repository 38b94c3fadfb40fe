"""Rows of a Parquet file. Opening it reads the footer; row groups are decoded whole, and kept for a while."""

from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from omnizoo.config.errors import UserError, first_line
from omnizoo.data.rows import STRUCTS, BadRow, Folder, Row, RowSource, without_nulls

if TYPE_CHECKING:
    import pyarrow  # at run time where it is used: most runs read no Parquet

PARQUET = (".parquet",)
MOST_ROWS_PER_BYTE = 1000  # of a Parquet file: a footer that promises more is damaged


def arrow_errors(*others: type[Exception]) -> tuple[type[Exception], ...]:
    """What pyarrow raises for damaged files and for values that Python has no type for; its own errors are of these,
    too. And `others`."""
    from pyarrow import ArrowException

    return (ArrowException, OSError, ValueError, TypeError, LookupError, ArithmeticError, MemoryError, *others)


class GroupCache:
    """Decoded Parquet row groups, the last used up to `limit` bytes, shared by the files of one source. One that cannot
    be decoded is remembered, too: each of its rows is asked for.
    """

    def __init__(self, limit: int = 1 << 30) -> None:
        self.limit, self.bytes = limit, 0
        self.tables: OrderedDict[tuple[Path, int], pyarrow.Table] = OrderedDict()
        self.damaged: dict[tuple[Path, int], str] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process starts with none."""
        return GroupCache, (self.limit,)

    def get(self, path: Path, group: int) -> "pyarrow.Table":
        from pyarrow.parquet import ParquetFile

        key = (path, group)
        if key in self.damaged:
            raise BadRow(self.damaged[key])
        if key not in self.tables:
            try:
                with ParquetFile(path, page_checksum_verification=True) as file:
                    # one thread: one process per worker is parallel enough
                    table = file.read_row_group(group, use_threads=False)
                table.validate(full=True)  # damaged offsets would be read as they are, wherever they point
            except arrow_errors() as error:
                self.damaged[key] = f"its row group {group} is damaged: {first_line(error)}"
                raise BadRow(self.damaged[key]) from None
            self.tables[key] = table
            self.bytes += self.tables[key].nbytes
            while self.bytes > self.limit and len(self.tables) > 1:
                self.bytes -= self.tables.popitem(last=False)[1].nbytes
        self.tables.move_to_end(key)
        return self.tables[key]


class ParquetRows(RowSource):
    """A Parquet file; row groups are decoded whole and kept for a while."""

    def __init__(self, path: Path, folder: Folder, cache: GroupCache) -> None:
        from pyarrow.parquet import read_metadata

        self.path, self.folder, self.cache = path, folder, cache
        try:
            metadata = read_metadata(path)
            sizes = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
            names = metadata.schema.to_arrow_schema().names
        except arrow_errors() as error:
            raise UserError(f"{path} is not a readable Parquet file: {first_line(error)}") from None
        if twice := {name for name in names if names.count(name) > 1}:
            raise UserError(f"{path} has several columns of the name {min(twice)!r}")
        if min(sizes, default=0) < 0 or not sum(sizes) == metadata.num_rows <= MOST_ROWS_PER_BYTE * path.stat().st_size:
            raise UserError(f"{path} is not a readable Parquet file: {metadata.num_rows} rows cannot be in it")
        self.extents = np.cumsum([0, *(size for size in sizes if size)])
        self.groups = [group for group, size in enumerate(sizes) if size]

    def __len__(self) -> int:
        return int(self.extents[-1])

    def read(self, row: int) -> Row:
        extent = int(np.searchsorted(self.extents, row, side="right")) - 1
        table = self.cache.get(self.path, self.groups[extent])
        offset = row - int(self.extents[extent])
        value: Row = {}
        for name, column in zip(table.column_names, table.columns, strict=True):
            try:
                value[name] = column[offset].as_py()
            except arrow_errors() as error:
                raise BadRow(f"its {name!r} cannot be read: {first_line(error)}") from None
        return without_nulls(value, STRUCTS)

    def find(self, row: int, name: str) -> Path:
        return self.folder.find(name)

    def where(self, row: int) -> str:
        return f"{self.path} row {row}"
