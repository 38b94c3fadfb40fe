"""Open the entries of `data.sources` as rows with random access.

A source is a JSONL, CSV, Parquet or tar (WebDataset) file, a folder of such files, a `datasets` folder, a remote
address, or rows from Python. By default, rows may only refer to media files in the folder of the source.

Opening a source only builds its index (line offsets, Parquet footers, tar headers). A row is decoded when it is read.
No data is ever unpickled.
"""

import bisect
import functools
import logging
import re
import stat
from collections.abc import Callable, Collection, Sequence
from io import FileIO
from pathlib import Path, PurePath, PurePosixPath
from typing import Any

import numpy as np

from omnizoo.config.errors import UserError, first_line
from omnizoo.config.hub import hub_hint
from omnizoo.config.sections import data as data_section
from omnizoo.data.sources.base import MediaFolder, RowSource, RowView
from omnizoo.data.sources.csv_tsv import CSV, CsvFile
from omnizoo.data.sources.hf_datasets import open_with_datasets
from omnizoo.data.sources.jsonl import JSON_LINES, JsonArrayFile, JsonlFile, is_array
from omnizoo.data.sources.parquet import PARQUET, GroupCache, ParquetFile
from omnizoo.data.sources.python_rows import open_rows
from omnizoo.data.sources.remote import Remote, RemoteFolder, is_address
from omnizoo.data.sources.renamed_columns import RenamedRows, check_columns
from omnizoo.data.sources.subset import RowSubset
from omnizoo.data.sources.webdataset import TAR, WebDatasetFile
from omnizoo.modalities.media import kind_of_file

log = logging.getLogger(__name__)
# Words for splits in file and folder names, as in `datasets`. They must be delimited: `contrastive.jsonl` is not a
# train split.
SPLIT_WORDS = {
    "train": "train(?:ing)?",
    "validation": "valid(?:ation)?|val|dev",
    "test": "test(?:ing)?|eval(?:uation)?",
}
SAVED = ("dataset_dict.json", "dataset_info.json")  # files that mark a folder written by `save_to_disk`
ROW_FILES = (*PARQUET, *TAR, *JSON_LINES, *CSV)


class Concatenation(RowView):
    """Several sources, such as the files of a folder, as one source."""

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
        modalities: Modalities that members of tar files may belong to.
        cache_dir: Folder for copies of remote files; None for the default cache folder.
        key: Config key of the source, for messages.

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
        if is_address(spec.path):
            remote = Remote(spec.path, cache_dir)
            path = remote.copy(lambda names: row_files(names, spec))
            media = remote if spec.media_dir is None else media
        source = open_path(spec, path, media_outside, modalities, media)
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


def row_files(names: list[str], spec: data_section.SourceSettings) -> list[str]:
    """Return the files of a remote folder that contain rows of the requested split."""
    if any(name in SAVED for name in names):
        return names
    with_rows = [name for name in names if has_rows(PurePosixPath(name))]
    if not with_rows:
        listed = ", ".join(names[:5]) or "nothing"
        raise UserError(f"{spec.name}: no file with rows ({', '.join(ROW_FILES)}); the folder contains {listed}")
    return files_of_split(with_rows, spec.split, spec.name)


def has_rows(name: PurePath) -> bool:
    """Whether a file contains rows, judged by its name. Hidden files do not."""
    return name.suffix in ROW_FILES and not any(part.startswith(".") for part in name.parts)


def open_path(
    spec: data_section.SourceSettings,
    path: Path,
    media_outside: bool,
    modalities: Collection[str],
    remote: Remote | None,
) -> RowSource:
    """Open a local file or folder.

    Args:
        spec: The settings of the source.
        path: The file or folder; a local copy if the source is remote.
        media_outside: Whether rows may refer to media files outside the folder of the source.
        modalities: Modalities that members of tar files may belong to.
        remote: Remote location of the media files; None if they are local.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        hint = hub_hint(str(spec.path), "dataset")
        raise UserError(
            f"{path}: the data source does not exist. Give a JSONL, CSV, Parquet or tar file, or a folder of them{hint}"
        ) from None
    except (OSError, ValueError) as error:  # no access, name too long, circular links, null bytes
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
        return MediaFolder(base, None if media_outside else root.resolve())

    is_saved_dataset = any((path / name).exists() for name in SAVED)
    try:
        files = [] if is_saved_dataset else data_files(path, spec.split)
        if files:
            return concatenate(files, folder_of, modalities)
        return open_with_datasets(path, folder_of(path), spec.split, is_saved_dataset)
    except OSError as error:
        reason = error.strerror or first_line(error)
        raise UserError(f"{path}: the data source is not readable: {error.filename or ''}: {reason}") from None


class OpenFiles:
    """A cache of open files by path.

    Only the most recently used files stay open, because a folder may have more files than a process may open. Pickling
    drops the open files, so a worker process opens them again.
    """

    def __init__(self) -> None:
        self.cached_open = functools.lru_cache(maxsize=64)(open_unbuffered)

    def __call__(self, path: Path) -> FileIO:
        return self.cached_open(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return OpenFiles, ()


def open_unbuffered(path: Path) -> FileIO:
    """Open a file for `os.pread`, which needs no buffer."""
    return open(path, "rb", buffering=0)


def concatenate(files: list[Path], folder_of: Callable[[Path], MediaFolder], modalities: Collection[str]) -> RowSource:
    """Open each file according to its suffix, and join the sources in order."""
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
    """Return the sorted files with rows at a path. If file names distinguish splits, return only those of `split`."""
    if path.is_file():
        return [path] if path.suffix in ROW_FILES else []
    files = sorted(file for file in path.rglob("*") if has_rows(file.relative_to(path)) and file.is_file())
    tar_files = [file for file in files if file.suffix in TAR]
    if tar_files:
        _check_other_files(path, tar_files, [file for file in files if file.suffix not in TAR])
        files = tar_files
    names = [str(file.relative_to(path)) for file in files]
    return [path / name for name in files_of_split(names, split, str(path))]


def _check_other_files(path: Path, tar_files: list[Path], others: list[Path]) -> None:
    """Check that the other files of a folder with tar files are tables of statistics.

    Tools that write tar shards also write one such table per shard.
    """
    shards = {file.with_suffix("") for file in tar_files}
    for file in others:
        if file.with_name(file.stem.removesuffix("_stats")) not in shards:
            raise UserError(
                f"{path}: the folder has tar files and other files with rows ({file.relative_to(path)}). Add each "
                "file or folder with rows to data.sources separately."
            )


def files_of_split(names: list[str], split: str, source: str) -> list[str]:
    """Return the files of `split` if the file names distinguish at least two splits, otherwise all files."""
    splits: dict[str, list[str]] = {}
    for file in names:
        for name, words in SPLIT_WORDS.items():
            if re.search(rf"(?:^|[\W_\d])(?:{words})(?:[\W_\d]|$)", file, re.IGNORECASE):
                splits.setdefault(name, []).append(file)
                break
    if len(splits) < 2:
        return names
    if split not in splits:
        raise UserError(
            f"{source}: the source has the splits {', '.join(splits)}, not {split!r}. Set `split` of the source."
        )
    log.info("%s: reading the %d files of split %s", source, len(splits[split]), split)
    return splits[split]
