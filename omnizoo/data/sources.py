"""Open what `data.sources` names as rows with random access: JSONL, CSV, Parquet, tar (WebDataset), a folder of them, a
`datasets` folder, an address, or rows from Python. Media that rows name are found, too, and only in the folder of the
dataset.

Opening reads sizes only (line offsets, Parquet footers, tar headers); rows are decoded when asked for. Nothing is ever
unpickled.
"""

import bisect
import functools
import logging
import re
import stat
from collections.abc import Callable, Collection, Sequence
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np

from omnizoo.config import data_section
from omnizoo.config.errors import UserError, first_line
from omnizoo.config.hub import hub_hint
from omnizoo.data.columns import RenamedRows, check_columns
from omnizoo.data.csv_rows import CSV, CsvRows
from omnizoo.data.dataset_rows import open_with_datasets
from omnizoo.data.given_rows import open_rows
from omnizoo.data.json_lines import JSON_LINES, JsonArray, JsonLines, is_array
from omnizoo.data.parquet_rows import PARQUET, GroupCache, ParquetRows
from omnizoo.data.remote import Remote, RemoteFolder, is_address
from omnizoo.data.rows import Folder, Row, RowSource
from omnizoo.data.taken_rows import TakenRows
from omnizoo.data.tar_samples import TAR, TarSamples
from omnizoo.modalities.item import kind_of_file

log = logging.getLogger(__name__)
# datasets' own words for splits in file and folder names; delimited, so `contrastive.jsonl` is not a train split
SPLIT_WORDS = {
    "train": "train(?:ing)?",
    "validation": "valid(?:ation)?|val|dev",
    "test": "test(?:ing)?|eval(?:uation)?",
}


SAVED = ("dataset_dict.json", "dataset_info.json")  # of a dataset on disk


class Concatenation(RowSource):
    """The files of a folder as one source."""

    def __init__(self, parts: Sequence[RowSource]) -> None:
        self.parts = parts
        self.firsts: list[int] = [0, *np.cumsum([len(part) for part in parts]).tolist()]
        inner = [part.extents[1:] + first for part, first in zip(parts, self.firsts, strict=False)]
        self.extents = np.unique(np.concatenate(([0], *inner)))

    def __len__(self) -> int:
        return int(self.extents[-1])

    def _locate(self, row: int) -> tuple[RowSource, int]:
        part = bisect.bisect_right(self.firsts, row) - 1
        return self.parts[part], row - self.firsts[part]

    def read(self, row: int) -> Row:
        part, row = self._locate(row)
        return part.read(row)

    def find(self, row: int, name: str) -> Path | bytes:
        part, row = self._locate(row)
        return part.find(row, name)

    def where(self, row: int) -> str:
        part, row = self._locate(row)
        return part.where(row)


def open_source(
    spec: data_section.Source,
    media_outside: bool = False,
    modalities: Collection[str] = frozenset(),
    cache_dir: str | None = None,
    key: str = "data.sources",
) -> RowSource:
    """`media_outside` lets rows name files anywhere; `modalities` are the content types that tar members may be of;
    copies of what is elsewhere go to `cache_dir`; `key` is where the config has the source."""
    media = None
    if spec.media_dir is not None and is_address(spec.media_dir):
        media = Remote(spec.media_dir, cache_dir)
    elif spec.media_dir is not None and not Path(spec.media_dir).expanduser().is_dir():
        raise UserError(f"media_dir {spec.media_dir} of data source {spec.name} is not a folder")
    if spec.path is None:
        source = open_rows(spec, media_outside)
    elif is_address(spec.path):
        remote = Remote(spec.path, cache_dir)
        source = open_path(
            spec, remote.copy(lambda names: row_files(names, spec)), media_outside, modalities, media or remote
        )
    else:
        source = open_path(spec, Path(spec.path).expanduser(), media_outside, modalities, media)
    if spec.take is not None:
        rows, source = len(source), TakenRows(source, spec.take)
        if rows and not len(source):
            raise UserError(f"{key}.take: {spec.take} of the {rows} rows of {spec.name} is none")
    if not len(source):
        raise UserError(f"data source {spec.name} has no rows")
    if spec.columns:
        way = "; columns are written {name here: name in the rows}"
        check_columns(source, list(spec.columns.values()), f"{key}.columns", way)
        source = RenamedRows(source, spec.columns)
    if spec.json_columns:
        check_columns(source, spec.json_columns, f"{key}.json_columns")
    return source


def row_files(names: list[str], spec: data_section.Source) -> list[str]:
    """Of the files of a folder that is elsewhere, those that hold rows."""
    if any(name in SAVED for name in names):
        return names
    suffixes = (*PARQUET, *TAR, *JSON_LINES, *CSV)
    found = [name for name in names if name.endswith(suffixes) and not any(p.startswith(".") for p in name.split("/"))]
    if not found:
        listed = ", ".join(names[:5]) or "nothing"
        raise UserError(f"data source {spec.name} has no file with rows ({', '.join(suffixes)}); it has {listed}")
    return of_split(found, spec.split, spec.name)


def open_path(
    spec: data_section.Source, path: Path, media_outside: bool, modalities: Collection[str], remote: Remote | None
) -> RowSource:
    """`remote`: where media are, if that is elsewhere."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        hint = hub_hint(str(spec.path), "dataset")
        raise UserError(
            f"data source {path} does not exist; give a JSONL, CSV, Parquet or tar file, or a folder of them{hint}"
        ) from None
    except (OSError, ValueError) as error:  # no access, a name too long, links in a circle, zero bytes
        raise UserError(f"data source {path}: {getattr(error, 'strerror', None) or error}") from None
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise UserError(f"data source {path} is {kind_of_file(mode)}, not a file or folder")

    def folder_of(file: Path) -> Folder:
        if remote is not None and spec.media_dir is not None and is_address(spec.media_dir):
            return RemoteFolder(remote.mirror, remote.mirror.resolve(), remote=remote)
        if spec.media_dir is not None:
            base = root = Path(spec.media_dir).expanduser()
        else:
            base, root = (place if place.is_dir() else place.parent for place in (file, path))
        if remote is not None and spec.media_dir is None:
            return RemoteFolder(base, root.resolve(), remote=remote)
        return Folder(base, None if media_outside else root.resolve())

    is_saved_dataset = any((path / name).exists() for name in SAVED)
    try:
        files = [] if is_saved_dataset else data_files(path, spec.split)
        if files:
            return concatenate(files, folder_of, modalities)
        return open_with_datasets(path, folder_of(path), spec.split, is_saved_dataset)
    except OSError as error:
        raise UserError(f"data source {path}: {error.filename or ''}: {error.strerror or first_line(error)}") from None


class OpenFiles:
    """Files by path, of which the last ones asked for stay open: a folder may have more files than may be open. Another
    process opens its own."""

    def __init__(self, most: int = 64) -> None:
        self.most, self.opened = most, functools.lru_cache(maxsize=most)(open_unbuffered)

    def __call__(self, path: Path) -> FileIO:
        return self.opened(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return OpenFiles, (self.most,)


def open_unbuffered(path: Path) -> FileIO:
    return open(path, "rb", buffering=0)


def concatenate(files: list[Path], folder_of: Callable[[Path], Folder], modalities: Collection[str]) -> RowSource:
    cache = GroupCache()
    open_file = OpenFiles()

    def open_part(file: Path) -> RowSource:
        if file.suffix in PARQUET:
            return ParquetRows(file, folder_of(file), cache)
        if file.suffix in TAR:
            return TarSamples(file, modalities, open_file)
        if file.suffix in CSV:
            return CsvRows(file, folder_of(file), open_file)
        return (JsonArray if is_array(file) else JsonLines)(file, folder_of(file), open_file)

    parts = [open_part(file) for file in files]
    return parts[0] if len(parts) == 1 else Concatenation(parts)


def data_files(path: Path, split: str) -> list[Path]:
    """Files with rows at the path, sorted. Where names tell splits apart, those of `split` only."""
    known = (*PARQUET, *TAR, *CSV, *JSON_LINES)
    if path.is_file():
        return [path] if path.suffix in known else []
    files = sorted(
        file
        for file in path.rglob("*")
        if not any(part.startswith(".") for part in file.relative_to(path).parts)
        and file.is_file()
        and file.suffix in known
    )
    shards = {file.with_suffix("") for file in files if file.suffix in TAR}
    if shards:  # tools that write shards put tables about each of them beside it
        beside = {file: file.with_name(file.stem.removesuffix("_stats")) for file in files if file.suffix not in TAR}
        if strangers := [file for file, shard in beside.items() if shard not in shards]:
            raise UserError(
                f"data source {path} has tar files and others ({strangers[0].relative_to(path)}); "
                "give the files or folders that hold the rows as sources of their own"
            )
        files = [file for file in files if file not in beside]
    return [path / name for name in of_split([str(file.relative_to(path)) for file in files], split, str(path))]


def of_split(names: list[str], split: str, source: str) -> list[str]:
    """Of the files of a folder, those of a split, where their names tell several apart."""
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
            f"data source {source} has the splits {', '.join(splits)}, not {split!r}; set `split` of the source"
        )
    log.info("%s: reading the %d files of split %s", source, len(splits[split]), split)
    return splits[split]
