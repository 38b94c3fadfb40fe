"""Read rows from Python objects.

The object is the argument of `omnizoo.train(data=...)`, or the result of a callable that the config names
(`data.sources.N.rows`). A list, a `datasets.Dataset` or a map-style torch dataset is read row by row, like a file. An
iterable, such as a generator or an iterable dataset, is read into memory when it is opened.
"""

import sys
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, SupportsIndex

from torch.utils.data import IterableDataset

from omnizoo.config.errors import UserError, named_line
from omnizoo.config.plugins import CODE_ERRORS, call
from omnizoo.config.sections.base import PythonObject
from omnizoo.config.sections.data import SourceSettings
from omnizoo.data.row import BadRow, Row, check_characters
from omnizoo.data.sources.base import FolderRows, MediaFolder, RowSource
from omnizoo.data.sources.hf_datasets import HFDataset

MAX_ROWS_IN_MEMORY = 1_000_000  # maximum number of rows of an iterable
# Description of the objects that are accepted, for error messages.
EXPECTED = (
    "rows: a list of dicts or an iterable of them, a `datasets.Dataset`, a torch dataset, or an omnizoo.RowSource"
)


class PythonRows(FolderRows):
    """Rows of an object with `__len__` and `__getitem__`.

    Args:
        rows: The object.
        name: Name of the source in error messages.
        folder: The folder of the media files.

    Raises:
        UserError: If the object has no valid length.
    """

    stored_kind = "GivenRows"

    def __init__(self, rows: Any, name: str, folder: MediaFolder) -> None:
        self.rows = rows
        self.name = name
        self.folder = folder
        try:
            self.count = len(rows)
        except CODE_ERRORS as error:
            raise UserError(f"{name}: counting the rows failed: {named_line(error)}") from error

    @property
    def is_in_memory(self) -> bool:
        """Whether the rows are a list or tuple."""
        return isinstance(self.rows, list | tuple)

    def __len__(self) -> int:
        return self.count

    def read(self, row: int) -> Row:
        """Get a row from the object and check it."""
        return read_row(self.rows.__getitem__, row)


class UserRows(RowSource):
    """A wrapper around a user's `RowSource`. It checks each row and adds the name of the source to its location.

    Args:
        source: The user's source.
        name: Name of the source in error messages.
        reopen: A function and its arguments. A loader worker calls it to open the source again. A source with members
            that cannot be pickled, such as a connection, needs it. If None, the source is pickled.

    Raises:
        UserError: If the source has no valid length.
    """

    def __init__(self, source: RowSource, name: str, reopen: tuple[Any, ...] | None) -> None:
        self.source = source
        self.name = name
        self.reopen = reopen
        try:
            self.extents = source.extents
            self.count = len(source)
        except CODE_ERRORS as error:
            raise UserError(f"{name}: counting the rows failed: {named_line(error)}") from error

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        return self.reopen or super().__reduce_ex__(protocol)

    def __len__(self) -> int:
        return self.count

    def read(self, row: int) -> Row:
        """Read a row from the user's source and check it."""
        return read_row(self.source.read, row)

    def find(self, row: int, name: str) -> Path | bytes:
        """Find a media file with the user's source."""
        return self.source.find(row, name)

    def where(self, row: int) -> str:
        """Return the name of the source and the location that the user's source returns."""
        return f"{self.name}: {self.source.where(row)}"


def read_row(read: Callable[[int], Any], number: int) -> Row:
    """Read a row by calling user code, and check the row.

    Args:
        read: Returns the row with a given number.
        number: Number of the row.

    Raises:
        BadRow: If the code fails, or if the row is not a dict with string keys and valid strings.
    """
    try:
        value = read(number)
    except UserError:
        raise
    except CODE_ERRORS as error:
        raise BadRow(f"the row is not readable: {named_line(error)}") from error
    if not isinstance(value, Mapping):
        raise BadRow(f"the row is {type(value).__name__}, not a dict")
    row = dict(value)
    for name in row:
        if not isinstance(name, str):
            raise BadRow(f"the field name {name!r:.40} is {type(name).__name__}; expected a string")
    check_characters(row)
    return row


def open_rows(spec: SourceSettings, media_outside: bool) -> RowSource:
    """Open a source whose rows come from Python.

    Args:
        spec: The settings of the source, with `rows` (a callable) or `given` (an object passed to `omnizoo.train`).
        media_outside: Whether rows may refer to media files outside `media_dir`.

    Raises:
        UserError: If the callable fails, or if the object is not a source of rows.
    """
    if spec.rows is not None:
        rows = call(spec.rows, "data.sources.rows", f"a callable that returns {EXPECTED}", spec.options)
        name = spec.rows
    elif isinstance(spec.given, PythonObject):
        rows = spec.given.value
        name = spec.given.name
    else:
        raise UserError(
            f"data.sources: {spec.given} was a Python object, which a config does not contain. Pass it to "
            "omnizoo.train again."
        )

    if isinstance(rows, RowSource):
        if spec.media_dir is not None:
            raise UserError(
                f"{name}: media_dir has no effect on a RowSource, which finds media files with its method `find`. "
                "Remove media_dir."
            )
        reopen = (open_rows, (spec, media_outside)) if spec.rows is not None else None
        return UserRows(rows, name, reopen)

    _check_type(rows, name)
    base = Path(spec.media_dir).expanduser() if spec.media_dir is not None else Path()
    folder = MediaFolder(base, None if media_outside else base.resolve())
    if is_plain_dataset(rows):
        return HFDataset(name, folder, rows)

    has_random_access = hasattr(rows, "__len__") and hasattr(rows, "__getitem__")
    if not has_random_access or isinstance(rows, IterableDataset):
        rows = read_all(rows, name)
    return PythonRows(rows, name, folder)


def _check_type(rows: Any, name: str) -> None:
    """Check that an object is not one that users pass by mistake, such as a path or a class.

    Raises:
        UserError: If it is.
    """
    if not isinstance(rows, str | bytes | Path | Mapping | type):
        return
    kind = f"the class {rows.__name__}" if isinstance(rows, type) else f"a {type(rows).__name__}"
    hint = ""
    if isinstance(rows, str | Path):
        hint = ". Set data.sources: [{path: ...}] to read a file or folder."
    raise UserError(f"{name}: {kind} is not a source of rows; expected {EXPECTED}{hint}")


def is_plain_dataset(rows: Any) -> bool:
    """Whether the rows are a `datasets.Dataset` without a custom transform. Its stored values can be read directly."""
    datasets = sys.modules.get("datasets")  # if `rows` is a dataset, the module has been imported
    return datasets is not None and isinstance(rows, datasets.Dataset) and rows.format["type"] != "custom"


def read_all(rows: Any, name: str) -> list[Any]:
    """Read all rows of an iterable into a list.

    Args:
        rows: The iterable.
        name: Name of the source in error messages.

    Raises:
        UserError: If reading fails, or if there are no rows or more than `MAX_ROWS_IN_MEMORY`.
    """
    if not isinstance(rows, Iterable) and not hasattr(rows, "__getitem__"):
        raise UserError(f"{name}: a {type(rows).__name__} is not a source of rows; expected {EXPECTED}")
    try:
        row_list = list(islice(iter(rows), MAX_ROWS_IN_MEMORY + 1))
    except UserError:
        raise
    except CODE_ERRORS as error:
        raise UserError(f"{name}: reading the rows failed: {named_line(error)}") from error
    if len(row_list) > MAX_ROWS_IN_MEMORY:
        raise UserError(
            f"{name}: an iterable is read into memory, but this one has more than {MAX_ROWS_IN_MEMORY:,} rows. Use a "
            "source with random access: a list, a `datasets.Dataset` or an omnizoo.RowSource."
        )
    if not row_list:
        raise UserError(f"{name}: the iterable has no rows. A generator can be read only once, so pass a new one.")
    return row_list
