"""Open what `data.sources` names as rows with random access: JSONL, Parquet, tar (WebDataset), a folder of them, a
`datasets` folder, or rows from Python. Media that rows name are found, too, and only in the folder of the dataset.

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

import numpy as np

from omnizoo.config import schema
from omnizoo.config.errors import UserError, first_line
from omnizoo.data.dataset_rows import open_with_datasets
from omnizoo.data.given_rows import open_rows
from omnizoo.data.json_lines import JsonLines, is_json_lines
from omnizoo.data.parquet_rows import PARQUET, GroupCache, ParquetRows
from omnizoo.data.rows import Folder, Row, RowSource
from omnizoo.data.tar_samples import TAR, TarSamples
from omnizoo.modalities.item import kind_of_file

log = logging.getLogger(__name__)
# datasets' own words for splits in file and folder names; delimited, so `contrastive.jsonl` is not a train split
SPLIT_WORDS = {
    "train": "train(?:ing)?",
    "validation": "valid(?:ation)?|val|dev",
    "test": "test(?:ing)?|eval(?:uation)?",
}


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
    spec: schema.Source, media_outside: bool = False, modalities: Collection[str] = frozenset()
) -> RowSource:
    """`media_outside` lets rows name files anywhere; `modalities` are the content types that tar members may be of."""
    if spec.media_dir is not None and not Path(spec.media_dir).expanduser().is_dir():
        raise UserError(f"media_dir {spec.media_dir} of data source {spec.name} is not a folder")
    source = (
        open_rows(spec, media_outside) if spec.path is None else open_path(spec, spec.path, media_outside, modalities)
    )
    if not len(source):
        raise UserError(f"data source {spec.name} has no rows")
    return source


def open_path(spec: schema.Source, name: str, media_outside: bool, modalities: Collection[str]) -> RowSource:
    path = Path(name).expanduser()
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise UserError(
            f"data source {path} does not exist; give a JSONL, Parquet or tar file, or a folder of them"
        ) from None
    except (OSError, ValueError) as error:  # no access, a name too long, links in a circle, zero bytes
        raise UserError(f"data source {path}: {getattr(error, 'strerror', None) or error}") from None
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise UserError(f"data source {path} is {kind_of_file(mode)}, not a file or folder")

    def folder_of(file: Path) -> Folder:
        if spec.media_dir is not None:
            base = root = Path(spec.media_dir).expanduser()
        else:
            base, root = (place if place.is_dir() else place.parent for place in (file, path))
        return Folder(base, None if media_outside else root.resolve())

    is_saved_dataset = (path / "dataset_dict.json").exists() or (path / "dataset_info.json").exists()
    try:
        files = [] if is_saved_dataset else data_files(path, spec.split)
        if files:
            return concatenate(files, folder_of, modalities)
        return open_with_datasets(path, folder_of(path), spec.split, is_saved_dataset)
    except OSError as error:
        raise UserError(f"data source {path}: {error.filename or ''}: {error.strerror or first_line(error)}") from None


def open_unbuffered(path: Path) -> FileIO:
    return open(path, "rb", buffering=0)


def concatenate(files: list[Path], folder_of: Callable[[Path], Folder], modalities: Collection[str]) -> RowSource:
    cache = GroupCache()
    open_file = functools.lru_cache(maxsize=64)(open_unbuffered)  # a folder may have more files than may be open

    def open_part(file: Path) -> RowSource:
        if file.suffix in PARQUET:
            return ParquetRows(file, folder_of(file), cache)
        if file.suffix in TAR:
            return TarSamples(file, modalities, open_file)
        return JsonLines(file, folder_of(file), open_file)

    parts = [open_part(file) for file in files]
    return parts[0] if len(parts) == 1 else Concatenation(parts)


def data_files(path: Path, split: str) -> list[Path]:
    """JSONL, Parquet and tar files at the path, sorted. Where names tell splits apart, those of `split` only."""
    if path.is_file():
        return [path] if path.suffix in PARQUET + TAR or is_json_lines(path) else []
    files = sorted(
        file
        for file in path.rglob("*")
        if not any(part.startswith(".") for part in file.relative_to(path).parts)
        and file.is_file()
        and (file.suffix in PARQUET + TAR or is_json_lines(file))
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
