"""The base class of data sources (`RowSource`), folders of media files, and base classes of the built-in sources."""

import stat
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from omnizoo.data.row import Row
from omnizoo.modalities.media import BadMedia, MissingMedia, kind_of_file
from omnizoo.modalities.precomputed import StoredTargets

Rows = npt.NDArray[np.int64]  # row numbers, or numbers of rows
EXTENT = 256  # number of rows in an extent, for sources with fast random access


class RowSource(ABC):
    """Base class of data sources. Rows can be read in any order, by their number.

    A subclass must implement `__len__` and `read`. It may override `extents`, `find` and `where`.

    Example::

        class Numbers(omnizoo.RowSource):
            def __len__(self) -> int:
                return 1000

            def read(self, row: int) -> dict[str, Any]:
                return {"text": f"The number is {row}."}
    """

    stored_kind: ClassVar[str] = "OwnRows"  # checkpoints store it in their data fingerprint, so it must never change

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of rows. It must not change during a run."""

    @abstractmethod
    def read(self, row: int) -> Row:
        """Return one row. Repeated calls must return the same row.

        Args:
            row: Number of the row, from 0 to `len(self) - 1`.

        Returns:
            The fields of the row by name.

        Raises:
            BadRow: If the row cannot be used.
        """

    @cached_property
    def extents(self) -> Rows:
        """Boundaries between extents, `[extents + 1]`, from 0 to `len(self)`.

        An extent is a range of rows that are best read together. The extents of a Parquet file are its row groups.
        Other sources have small extents of equal size.
        """
        return np.append(np.arange(0, len(self), EXTENT), len(self))

    def find(self, row: int, name: str) -> Path | bytes:
        """Find a media file that a row refers to. By default, names are paths relative to the working directory.

        Args:
            row: Number of the row.
            name: Name of the file in the row.

        Returns:
            The path of the file, or its content.

        Raises:
            BadMedia: If the file does not exist or must not be read.
        """
        return MediaFolder(Path(), Path().resolve()).find(name)

    def files(self, row: int) -> "RowFiles":
        """Return a function that finds the media files of a row by name. See `find`."""
        return RowFiles(self, row)

    def where(self, row: int) -> str:
        """Return the location of a row for error messages, such as `rows.jsonl:17`."""
        return f"{type(self).__name__} row {row}"


@dataclass(frozen=True)
class RowFiles:
    """Finds the media files of one row, and items of the row that were encoded before the run."""

    source: RowSource
    row: int
    stored: Mapping[int, StoredTargets] = field(default_factory=dict)  # by the index of the item in the row

    def __call__(self, name: str) -> Path | bytes:
        """Find a media file. See `RowSource.find`."""
        return self.source.find(self.row, name)


@dataclass(frozen=True)
class MediaFolder:
    """A folder in which the rows of a source find their media files."""

    base: Path  # relative names refer to this folder
    root: Path | None  # resolved folder that files must be in, even after following links; None allows all files

    def find(self, name: str) -> Path:
        """Return the path of a media file.

        Args:
            name: Name of the file in the row.

        Raises:
            MissingMedia: If the file does not exist.
            BadMedia: If it is empty, not a regular file, or outside `root`.
        """
        path = self.base / name
        short_name = path if len(name) < 256 else f"{name[:64]}..."
        try:
            if self.root is not None and not path.resolve().is_relative_to(self.root):
                raise BadMedia(f"{short_name} is outside {self.root}. Set data.media_outside: true to allow this.")
            status = path.stat()
            if not stat.S_ISREG(status.st_mode):  # reading a pipe or a device may never end
                raise BadMedia(f"{short_name} is {kind_of_file(status.st_mode)}, not a file")
            if status.st_size == 0:
                raise BadMedia(f"{short_name} is empty")
        except FileNotFoundError:
            raise MissingMedia(f"{short_name} does not exist", name) from None
        except (OSError, RuntimeError, ValueError) as error:  # raised for long names, circular links and null bytes
            reason = getattr(error, "strerror", None) or error
            raise BadMedia(f"{short_name} is not a valid path: {reason}") from None
        return path


class FolderRows(RowSource):
    """Base class of sources whose media files are in a folder."""

    name: str | Path  # name of the source in error messages
    folder: MediaFolder

    def find(self, row: int, name: str) -> Path:
        """Find a media file in the folder of the source. See `RowSource.find`."""
        return self.folder.find(name)

    def where(self, row: int) -> str:
        """Return the name of the source and the number of the row."""
        return f"{self.name} row {row}"


class RowView(RowSource):
    """Base class of sources that select, rename or concatenate the rows of other sources.

    A subclass sets `extents` and implements `locate`. The last entry of `extents` is the number of rows.
    """

    @abstractmethod
    def locate(self, row: int) -> tuple[RowSource, int]:
        """Return the source that contains a row, and the number of the row in that source."""

    def __len__(self) -> int:
        return int(self.extents[-1])

    def read(self, row: int) -> Row:
        """Read a row from the source that contains it."""
        source, number = self.locate(row)
        return source.read(number)

    def find(self, row: int, name: str) -> Path | bytes:
        """Find a media file with the source that contains the row."""
        source, number = self.locate(row)
        return source.find(number, name)

    def files(self, row: int) -> RowFiles:
        """Return the files of a row in the source that contains it."""
        source, number = self.locate(row)
        return source.files(number)

    def where(self, row: int) -> str:
        """Return the location of a row in the source that contains it."""
        source, number = self.locate(row)
        return source.where(number)
