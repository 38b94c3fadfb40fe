"""Open a path of `data.sources` as rows with random access: JSONL, Parquet, a folder of them, or a `datasets` folder.

Opening reads sizes only (line offsets, Parquet footers); rows are decoded when asked for. Nothing is ever unpickled.
"""

import bisect
import functools
import json
import logging
import os
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from io import FileIO
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow
import pyarrow.parquet

from omnizoo.config import schema
from omnizoo.config.errors import UserError

log = logging.getLogger(__name__)

Row = dict[str, Any]
Rows = npt.NDArray[np.int64]

EXTENT = 256  # rows of an extent where any row is equally cheap to reach
JSON_LINES = (".jsonl", ".ndjson", ".json")
PARQUET = (".parquet",)
# datasets' own words for splits in file and folder names; delimited, so `contrastive.jsonl` is not a train split
SPLIT_WORDS = {
    "train": "train(?:ing)?",
    "validation": "valid(?:ation)?|val|dev",
    "test": "test(?:ing)?|eval(?:uation)?",
}


class BadRow(Exception):  # noqa: N818 (no error while `data.on_bad_row: skip`)
    """A row that cannot be used; the message is the reason. The lane adds where the row is."""


class RowSource(Protocol):
    """Rows by number. `extents` are the row numbers where one run of rows best read together ends and the next
    begins (first 0, last `len`): Parquet row groups, small blocks elsewhere. `where` names a row for error messages.
    """

    extents: Rows

    def __len__(self) -> int: ...
    def read(self, row: int) -> Row: ...
    def where(self, row: int) -> str: ...


def blocks(rows: int) -> Rows:
    return np.append(np.arange(0, rows, EXTENT), rows)


class JsonLines:
    """One JSON object per line; blank lines are ignored, line numbers count them."""

    def __init__(self, path: Path, open_file: Callable[[Path], FileIO]) -> None:
        self.path, self.open_file = path, open_file
        self.starts, self.stops, self.lines = index_lines(path)
        self.extents = blocks(len(self))

    def __len__(self) -> int:
        return len(self.starts)

    def read(self, row: int) -> Row:
        start, stop = int(self.starts[row]), int(self.stops[row])
        # pread: forked workers share the file, so they must not share a position in it
        line = os.pread(self.open_file(self.path).fileno(), stop - start, start)
        try:
            value = json.loads(line)
        except ValueError as error:
            raise BadRow(f"not valid JSON ({error})") from None
        if not isinstance(value, dict):
            raise BadRow(f"a JSON object was expected, not {type(value).__name__}")
        return value

    def where(self, row: int) -> str:
        return f"{self.path}:{self.lines[row]}"


def index_lines(path: Path, chunk_bytes: int = 1 << 24) -> tuple[Rows, Rows, Rows]:
    """Start and stop byte of every line that is not blank, and its 1-based number in the file."""
    ends, first_bytes, position, after_newline = [], [], 0, True
    with open(path, "rb") as file:
        while chunk := file.read(chunk_bytes):
            data = np.frombuffer(chunk, np.uint8)
            newlines = np.flatnonzero(data == ord("\n"))
            heads = newlines + 1 if not after_newline else np.concatenate(([0], newlines + 1))
            first_bytes.append(data[heads[heads < len(data)]])
            ends.append(newlines + position)
            position += len(data)
            after_newline = chunk.endswith(b"\n")
    last = np.array([] if after_newline else [position], np.int64)  # a last line without newline
    stops = np.concatenate([*ends, last])
    starts = np.concatenate((np.zeros(1, np.int64), stops[:-1] + 1))[: len(stops)]
    lines = np.arange(1, len(stops) + 1)
    if not len(stops):
        return starts, stops, lines
    # a line may be blank only if it begins with white space: few do, so those are looked at one by one
    keep = np.ones(len(stops), bool)
    with open(path, "rb") as file:
        for line in np.flatnonzero(np.isin(np.concatenate(first_bytes), np.frombuffer(b" \t\r\n\v\f", np.uint8))):
            file.seek(starts[line])
            keep[line] = bool(file.read(stops[line] - starts[line]).strip())
    return (starts, stops, lines) if keep.all() else (starts[keep], stops[keep], lines[keep])


class GroupCache:
    """Decoded Parquet row groups, the last used up to `limit` bytes, shared by the files of one source."""

    def __init__(self, limit: int = 1 << 30) -> None:
        self.limit, self.bytes = limit, 0
        self.tables: OrderedDict[tuple[Path, int], pyarrow.Table] = OrderedDict()

    def get(self, path: Path, group: int) -> pyarrow.Table:
        key = (path, group)
        if key not in self.tables:
            with pyarrow.parquet.ParquetFile(path) as file:
                # one thread: arrow's pool and forked workers do not go together
                self.tables[key] = file.read_row_group(group, use_threads=False)
            self.bytes += self.tables[key].nbytes
            while self.bytes > self.limit and len(self.tables) > 1:
                self.bytes -= self.tables.popitem(last=False)[1].nbytes
        self.tables.move_to_end(key)
        return self.tables[key]


class ParquetRows:
    """A Parquet file; row groups are decoded whole and kept for a while."""

    def __init__(self, path: Path, cache: GroupCache) -> None:
        self.path, self.cache = path, cache
        try:
            metadata = pyarrow.parquet.read_metadata(path)
        except pyarrow.ArrowException as error:
            raise UserError(f"{path} is not a readable Parquet file: {str(error).splitlines()[0]}") from None
        sizes = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        self.extents = np.cumsum([0, *sizes])

    def __len__(self) -> int:
        return int(self.extents[-1])

    def read(self, row: int) -> Row:
        group = int(np.searchsorted(self.extents, row, side="right")) - 1
        table = self.cache.get(self.path, group)
        offset = row - int(self.extents[group])
        return {name: column[offset].as_py() for name, column in zip(table.column_names, table.columns, strict=True)}

    def where(self, row: int) -> str:
        return f"{self.path} row {row}"


class DatasetRows:
    """Whatever `datasets` made of the path: memory-mapped Arrow."""

    def __init__(self, path: Path, dataset: Any) -> None:
        self.path, self.dataset = path, dataset
        self.extents = blocks(len(self))

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, row: int) -> Row:
        value: Row = self.dataset[row]
        return value

    def where(self, row: int) -> str:
        return f"{self.path} row {row}"


class Concatenation:
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

    def where(self, row: int) -> str:
        part, row = self._locate(row)
        return part.where(row)


def open_source(spec: schema.Source) -> RowSource:
    path = Path(spec.path).expanduser()
    if not path.exists():
        raise UserError(f"data source {path} does not exist; give a JSONL or Parquet file, or a folder of them")
    is_saved_dataset = (path / "dataset_dict.json").exists() or (path / "dataset_info.json").exists()
    files = [] if is_saved_dataset else data_files(path, spec.split)
    source = concatenate(files) if files else open_with_datasets(path, spec.split, is_saved_dataset)
    if not len(source):
        raise UserError(f"data source {path} has no rows")
    return source


def open_unbuffered(path: Path) -> FileIO:
    return open(path, "rb", buffering=0)


def concatenate(files: list[Path]) -> RowSource:
    cache = GroupCache()
    open_file = functools.lru_cache(maxsize=64)(open_unbuffered)  # a folder may have more files than may be open
    parts = [ParquetRows(file, cache) if file.suffix in PARQUET else JsonLines(file, open_file) for file in files]
    return parts[0] if len(parts) == 1 else Concatenation(parts)


def data_files(path: Path, split: str) -> list[Path]:
    """JSONL and Parquet files at the path, sorted. Where names tell several splits apart, those of `split` only."""
    if path.is_file():
        return [path] if path.suffix in PARQUET or is_json_lines(path) else []
    files = sorted(
        file
        for file in path.rglob("*")
        if not any(part.startswith(".") for part in file.relative_to(path).parts)
        and file.is_file()
        and (file.suffix in PARQUET or is_json_lines(file))
    )
    splits: dict[str, list[Path]] = {}
    for file in files:
        for name, words in SPLIT_WORDS.items():
            if re.search(rf"(?:^|[\W_\d])(?:{words})(?:[\W_\d]|$)", str(file.relative_to(path)), re.IGNORECASE):
                splits.setdefault(name, []).append(file)
                break
    if len(splits) < 2:
        return files
    if split not in splits:
        raise UserError(
            f"data source {path} has the splits {', '.join(splits)}, not {split!r}; set `split` of the source"
        )
    log.info("%s: reading the %d files of split %s", path, len(splits[split]), split)
    return splits[split]


def is_json_lines(path: Path) -> bool:
    """`.json` may hold one array of rows instead; that is `datasets`' to read."""
    if path.suffix not in JSON_LINES:
        return False
    with open(path, "rb") as file:
        return path.suffix != ".json" or not file.read(256).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")


def open_with_datasets(path: Path, split: str, is_saved_dataset: bool) -> RowSource:
    import datasets  # seconds to import, and most runs never need it

    try:
        if is_saved_dataset:
            dataset = datasets.load_from_disk(str(path))
            dataset = dataset[split] if isinstance(dataset, datasets.DatasetDict) else dataset
        else:
            name, files = (str(path), None) if path.is_dir() else (builder_of(path), {split: str(path)})
            offline = datasets.DownloadConfig(local_files_only=True)
            dataset = datasets.load_dataset(name, data_files=files, split=split, download_config=offline)
    except (ValueError, KeyError, OSError, TypeError, datasets.exceptions.DatasetsError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"data source {path} holds no JSONL or Parquet, and `datasets` cannot load it (split {split!r}): {reason}"
        ) from None
    return DatasetRows(path, dataset)


def builder_of(path: Path) -> str:
    builders = {".csv": "csv", ".txt": "text", ".arrow": "arrow", ".json": "json"}
    suffix = path.with_suffix("").suffix if path.suffix in (".gz", ".zst", ".xz", ".bz2") else path.suffix
    if suffix in (".jsonl", ".ndjson"):
        return "json"  # compressed: no random access to its lines
    if suffix not in builders:
        raise ValueError(f"unknown file type {path.suffix!r}; known: .jsonl, .parquet, {', '.join(builders)}")
    return builders[suffix]
