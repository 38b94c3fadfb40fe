"""Open the entries of `data.sources` as rows with random access.

A source is a JSONL, CSV, Parquet or tar (WebDataset) file, a folder of such files, a `datasets` folder, a remote
address, a dataset on the Hugging Face Hub, or rows from Python. By default, rows may only refer to media files in the
folder of the source.

Opening a source only builds its index (line offsets, Parquet footers, tar headers). A row is parsed when it is read. No
data is ever unpickled, because unpickling can run code.
"""

import bisect
import functools
import logging
import stat
from collections.abc import Callable, Collection, Sequence
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np

from omnizoo.config.errors import UserError, first_line
from omnizoo.config.hub import MODELSCOPE, parse_name
from omnizoo.config.sections import data as data_section
from omnizoo.data.sources.base import MediaFolder, RowSource, RowView
from omnizoo.data.sources.csv_tsv import CsvFile
from omnizoo.data.sources.hf_datasets import open_with_datasets
from omnizoo.data.sources.jsonl import JsonArrayFile, JsonlFile, is_array
from omnizoo.data.sources.parquet import GroupCache, ParquetFile
from omnizoo.data.sources.precomputed import PrecomputedRows, is_precomputed
from omnizoo.data.sources.python_rows import open_rows
from omnizoo.data.sources.remote import Remote, RemoteFolder, is_address
from omnizoo.data.sources.renamed_columns import RenamedRows, check_columns
from omnizoo.data.sources.subset import RowSubset
from omnizoo.data.sources.webdataset import WebDatasetFile
from omnizoo.hub.dataset import DatasetFiles, cached_dataset
from omnizoo.hub.dataset_files import CSV, PARQUET, ROW_FILES, SAVED, TAR, files_of_split, has_rows, row_files
from omnizoo.modalities.media import kind_of_file

log = logging.getLogger(__name__)


class Concatenation(RowView):
    """Several sources, such as the files of a folder, that are read as one source.

    Args:
        parts: The sources, in order.
    """

    def __init__(self, parts: Sequence[RowSource]) -> None:
        self.parts = parts
        self.firsts: list[int] = [0, *np.cumsum([len(part) for part in parts]).tolist()]
        inner = [part.extents[1:] + first for part, first in zip(parts, self.firsts, strict=False)]
        self.extents = np.unique(np.concatenate(([0], *inner)))

    def locate(self, row: int) -> tuple[RowSource, int]:
        part = bisect.bisect_right(self.firsts, row) - 1
        return self.parts[part], row - self.firsts[part]


def open_source(
    spec: data_section.SourceSettings,
    media_outside: bool = False,
    modalities: Collection[str] = frozenset(),
    cache_dir: str | None = None,
    key: str = "data.sources",
) -> RowSource:
    """Open one entry of `data.sources`.

    Args:
        spec: The settings of the source.
        media_outside: Whether rows may refer to media files outside the folder of the source.
        modalities: The modalities of the model, to recognize media members of tar files.
        cache_dir: Folder for copies of remote files; None for the default cache folder.
        key: Config key of the source, for error messages.

    Returns:
        The source, with at least one row.

    Raises:
        UserError: If the source cannot be opened, has no rows, or lacks a column named in the settings.
    """
    media: Remote | None = None
    if spec.media_dir is not None and is_address(spec.media_dir):
        media = Remote(spec.media_dir, cache_dir)
    elif spec.media_dir is not None and not Path(spec.media_dir).expanduser().is_dir():
        raise UserError(f"{key}.media_dir: {spec.media_dir} is not a folder (source {spec.name})")
    if spec.path is None:
        source = open_rows(spec, media_outside)
    else:
        path = Path(spec.path).expanduser()
        downloaded = _downloaded(spec)
        if downloaded is not None:
            path = downloaded.folder
        elif is_address(spec.path):
            remote = Remote(spec.path, cache_dir)
            path = remote.copy(lambda names: row_files(names, spec.split, spec.name))
            media = remote if spec.media_dir is None else media
        source = open_path(spec, path, media_outside, modalities, media, downloaded)
    if spec.take is not None:
        rows = len(source)
        source = RowSubset(source, spec.take)
        if rows and not len(source):
            raise UserError(f"{key}.take: {spec.take} selects none of the {rows} rows of {spec.name}")
    if not len(source):
        raise UserError(f"{spec.name}: the source has no rows. Add rows to it, or remove it from data.sources.")
    if spec.columns:
        syntax = ". Write columns as {new name: name in the rows}"
        check_columns(source, list(spec.columns.values()), f"{key}.columns", syntax)
        source = RenamedRows(source, spec.columns)
    if spec.json_columns:
        check_columns(source, spec.json_columns, f"{key}.json_columns")
    return source


def _downloaded(spec: data_section.SourceSettings) -> DatasetFiles | None:
    """Return the downloaded files if the source is a dataset on the hub; None for other sources."""
    name = parse_name(str(spec.path)) if "@" in str(spec.path) else None
    if name is None or name.commit is None or name.prefix == MODELSCOPE:
        return None
    return cached_dataset(name, spec.split)


def open_path(
    spec: data_section.SourceSettings,
    path: Path,
    media_outside: bool,
    modalities: Collection[str],
    remote: Remote | None,
    downloaded: DatasetFiles | None = None,
) -> RowSource:
    """Open a local file or folder. It may be the copy of a remote file or folder.

    Args:
        spec: The settings of the source.
        path: The local file or folder.
        media_outside: Whether rows may refer to media files outside the folder of the source.
        modalities: The modalities of the model, to recognize media members of tar files.
        remote: Remote location of the media files; None if they are local.
        downloaded: Files of a dataset on the hub; None for other sources.

    Raises:
        UserError: If the file or folder does not exist or cannot be read.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise UserError(
            f"{path}: the data source does not exist. Set the path of a JSONL, CSV, Parquet or tar file, or of a "
            "folder with such files."
        ) from None
    except (OSError, ValueError) as error:  # raised for missing access, long names, circular links and null bytes
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path}: the data source is not readable: {reason}") from None
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise UserError(f"{path}: the data source is {kind_of_file(mode)}, not a file or folder")

    def folder_of(file: Path) -> MediaFolder:
        """Return the folder in which the rows of `file` find their media files."""
        if spec.media_dir is None:
            base = file if file.is_dir() else file.parent
            root = path if path.is_dir() else path.parent
        elif remote is not None:
            base = root = remote.mirror
        else:
            base = root = Path(spec.media_dir).expanduser()
        if remote is not None:
            return RemoteFolder(base, root.resolve(), remote=remote)
        if downloaded is not None and spec.media_dir is None:
            root = downloaded.root  # the files in a snapshot are links to files in another folder
        return MediaFolder(base, None if media_outside else root.resolve())

    if is_precomputed(path):
        media_folder = None if spec.media_dir is None else folder_of(path)
        return PrecomputedRows(path, media_outside, OpenFiles(), media_folder)

    is_saved_dataset = any((path / name).exists() for name in SAVED)
    try:
        if downloaded is not None and downloaded.rows is not None:
            files = without_statistics(path, downloaded.rows)
        else:
            files = [] if is_saved_dataset else data_files(path, spec.split)
        if files:
            return concatenate(files, folder_of, modalities)
        return open_with_datasets(path, folder_of(path), spec.split, is_saved_dataset)
    except OSError as error:
        reason = error.strerror or first_line(error)
        raise UserError(f"{path}: the data source is not readable: {error.filename or ''}: {reason}") from None


class OpenFiles:
    """A function that returns an open file for a path, and keeps the most recently used files open.

    It does not keep all files open, because a folder may have more files than a process can open. The open files are
    not pickled, so a loader worker opens them again.
    """

    def __init__(self) -> None:
        self.cached_open = functools.lru_cache(maxsize=64)(open_unbuffered)

    def __call__(self, path: Path) -> FileIO:
        return self.cached_open(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return OpenFiles, ()


def open_unbuffered(path: Path) -> FileIO:
    """Open a file without a buffer, because `os.pread` needs none."""
    return open(path, "rb", buffering=0)


def concatenate(files: list[Path], folder_of: Callable[[Path], MediaFolder], modalities: Collection[str]) -> RowSource:
    """Open files with rows, and return one source with all their rows in order.

    Args:
        files: The files. Their suffixes determine how they are read.
        folder_of: Returns the folder in which the rows of a file find their media.
        modalities: The modalities of the model, to recognize media members of tar files.
    """
    cache = GroupCache()
    open_file = OpenFiles()

    def open_part(file: Path) -> RowSource:
        if file.suffix in PARQUET:
            return ParquetFile(file, folder_of(file), cache)
        if file.suffix in TAR:
            return WebDatasetFile(file, modalities, open_file)
        if file.suffix in CSV:
            return CsvFile(file, folder_of(file), open_file)
        json_class = JsonArrayFile if is_array(file) else JsonlFile
        return json_class(file, folder_of(file), open_file)

    parts = [open_part(file) for file in files]
    return parts[0] if len(parts) == 1 else Concatenation(parts)


def data_files(path: Path, split: str) -> list[Path]:
    """Return the files with rows at a path, sorted by name.

    Args:
        path: A file, or a folder that is searched with its subfolders.
        split: If the names of the files contain splits, only the files of this split are returned.
    """
    if path.is_file():
        return [path] if path.suffix in ROW_FILES else []
    files = sorted(file for file in path.rglob("*") if has_rows(file.relative_to(path)) and file.is_file())
    names = [str(file.relative_to(path)) for file in without_statistics(path, files)]
    return [path / name for name in files_of_split(names, split, str(path))]


def without_statistics(path: Path, files: list[Path]) -> list[Path]:
    """Return only the tar files if there are any; otherwise, return all files.

    Some tools write a table of statistics next to each tar file. These tables must not be read as rows.

    Args:
        path: The folder.
        files: The files in the folder.

    Raises:
        UserError: If the folder has tar files and other files that are not such tables.
    """
    tar_files = [file for file in files if file.suffix in TAR]
    others = [file for file in files if file.suffix not in TAR]
    if not tar_files:
        return files
    shards = {file.with_suffix("") for file in tar_files}
    for file in others:
        if file.with_name(file.stem.removesuffix("_stats")) not in shards:
            raise UserError(
                f"{path}: the folder has tar files and other files with rows ({file.relative_to(path)}). Add each "
                "file or folder with rows to data.sources separately."
            )
    return tar_files
