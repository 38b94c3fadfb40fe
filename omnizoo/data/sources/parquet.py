"""Read the rows of Parquet files.

Opening a file reads only its footer. When a row is read, its whole row group is decoded and cached.
"""

from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from omnizoo.config.errors import UserError, first_line
from omnizoo.config.plugins import CODE_ERRORS
from omnizoo.data.row import STRUCTS, BadRow, Row, without_nulls
from omnizoo.data.sources.base import FolderRows, MediaFolder

if TYPE_CHECKING:
    import pyarrow  # functions import pyarrow when they need it, because most runs read no Parquet

MAX_ROWS_PER_BYTE = 1000  # a file whose footer states more rows per byte than this is damaged


def arrow_errors() -> tuple[type[Exception], ...]:
    """Return the classes of errors that pyarrow raises for damaged files and for values without a Python type."""
    from pyarrow import ArrowException

    return (ArrowException, *CODE_ERRORS)


class GroupCache:
    """A cache of decoded row groups. All files of a source share it.

    The most recently used row groups are kept. The errors of damaged row groups are kept as well, so that such a group
    is not decoded again for each of its rows.

    Args:
        limit: Maximum size of all row groups in bytes.
    """

    def __init__(self, limit: int = 1 << 30) -> None:
        self.limit = limit
        self.bytes = 0
        self.tables: OrderedDict[tuple[Path, int], pyarrow.Table] = OrderedDict()
        self.damaged: dict[tuple[Path, int], str] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the cache without its tables, so that a loader worker starts with an empty cache."""
        return GroupCache, (self.limit,)

    def get(self, path: Path, group: int) -> "pyarrow.Table":
        """Return a decoded row group.

        Args:
            path: The Parquet file.
            group: Index of the row group.

        Raises:
            BadRow: If the row group is damaged.
        """
        from pyarrow.parquet import ParquetFile

        key = (path, group)
        if key in self.damaged:
            raise BadRow(self.damaged[key])
        if key not in self.tables:
            try:
                with ParquetFile(path, page_checksum_verification=True) as file:
                    # Use one thread, because loader workers already run in parallel.
                    table = file.read_row_group(group, use_threads=False)
                table.validate(full=True)  # otherwise, reading a damaged offset would access arbitrary memory
            except arrow_errors() as error:
                self.damaged[key] = f"row group {group} is damaged: {first_line(error)}"
                raise BadRow(self.damaged[key]) from None
            self.tables[key] = table
            self.bytes += table.nbytes
            while self.bytes > self.limit and len(self.tables) > 1:
                _, oldest = self.tables.popitem(last=False)
                self.bytes -= oldest.nbytes
        self.tables.move_to_end(key)
        return self.tables[key]


class ParquetFile(FolderRows):
    """A Parquet file. Its extents are the row groups that are not empty.

    Args:
        path: The file.
        folder: The folder of the media files.
        cache: The cache of row groups. All files of a source share it.

    Raises:
        UserError: If the footer is not readable or damaged, or if two columns have the same name.
    """

    stored_kind = "ParquetRows"

    def __init__(self, path: Path, folder: MediaFolder, cache: GroupCache) -> None:
        from pyarrow.parquet import read_metadata

        self.name = self.path = path
        self.folder = folder
        self.cache = cache
        try:
            metadata = read_metadata(path)
            sizes = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
            names = metadata.schema.to_arrow_schema().names
        except arrow_errors() as error:
            raise UserError(f"{path}: not a readable Parquet file: {first_line(error)}") from None

        repeated = {name for name in names if names.count(name) > 1}
        if repeated:
            raise UserError(f"{path}: several columns are named {min(repeated)!r}. Rename them.")
        num_rows = metadata.num_rows
        has_valid_sizes = min(sizes, default=0) >= 0 and sum(sizes) == num_rows
        if not has_valid_sizes or num_rows > MAX_ROWS_PER_BYTE * path.stat().st_size:
            raise UserError(f"{path}: not a readable Parquet file: its footer has an impossible row count, {num_rows}")
        self.extents = np.cumsum([0, *(size for size in sizes if size)])
        self.groups = [group for group, size in enumerate(sizes) if size]

    def __len__(self) -> int:
        return int(self.extents[-1])

    def read(self, row: int) -> Row:
        """Return a row, from the cache if its row group was decoded before. Raises `BadRow` if it is damaged."""
        extent = int(np.searchsorted(self.extents, row, side="right")) - 1
        table = self.cache.get(self.path, self.groups[extent])
        offset = row - int(self.extents[extent])
        value: Row = {}
        for name, column in zip(table.column_names, table.columns, strict=True):
            try:
                value[name] = column[offset].as_py()
            except arrow_errors() as error:
                raise BadRow(f"`{name}` is not readable: {first_line(error)}") from None
        return without_nulls(value, STRUCTS)
