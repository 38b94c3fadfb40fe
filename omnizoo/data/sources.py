"""Open a path of `data.sources` as rows with random access: JSONL, Parquet, tar (WebDataset), a folder of them, or a
`datasets` folder. Media that rows name are found here too, and are kept from leaving the dataset's folder.

Opening reads sizes only (line offsets, Parquet footers, tar headers); rows are decoded when asked for. Nothing is ever
unpickled.
"""

import bisect
import functools
import json
import logging
import mimetypes
import os
import re
import stat
import tarfile
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow
import pyarrow.parquet

from omnizoo.config import schema
from omnizoo.config.errors import UserError, first_line
from omnizoo.modalities.item import BadMedia, kind_of_file

log = logging.getLogger(__name__)

Row = dict[str, Any]
Rows = npt.NDArray[np.int64]

EXTENT = 256  # rows of an extent where any row is equally cheap to reach
JSON_LINES = (".jsonl", ".ndjson", ".json")
MOST_BYTES = 1 << 30  # of one line, or one member of a tar file: more is no row, and would not fit into one read
MOST_ROWS_PER_BYTE = 1000  # of a Parquet file: a footer that promises more is damaged
PARQUET = (".parquet",)
TAR = (".tar",)
CONVERSATION = ("messages", "conversations", "text")  # what a row is read from, the first one that it has
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # halves of pairs, and whole pairs, which are fine
STRUCTS = ("messages", "conversations", "tools")  # fields that are lists of objects
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
    `find` gives the file, or the bytes, that a row calls by name; it raises BadMedia if there is none.
    """

    extents: Rows

    def __len__(self) -> int: ...
    def read(self, row: int) -> Row: ...
    def find(self, row: int, name: str) -> Path | bytes: ...
    def where(self, row: int) -> str: ...


def blocks(rows: int) -> Rows:
    return np.append(np.arange(0, rows, EXTENT), rows)


@dataclass(frozen=True)
class Folder:
    """Media files by name: relative to `base`, and nowhere outside of `root`, also not through links."""

    base: Path
    root: Path | None  # resolved; None: anywhere

    def find(self, name: str) -> Path:
        path = self.base / name
        shown = path if len(name) < 256 else f"{name[:64]}..."
        try:
            if self.root is not None and not path.resolve().is_relative_to(self.root):
                raise BadMedia(f"{shown} is outside of {self.root} (data.media_outside: true allows such paths)")
            about = path.stat()
            if not stat.S_ISREG(about.st_mode):  # to open a pipe would wait for its writer, and a device may never end
                raise BadMedia(f"{shown} is {kind_of_file(about.st_mode)}, not a file")
            if about.st_size == 0:
                raise BadMedia(f"{shown} is empty")
        except FileNotFoundError:
            raise BadMedia(f"{shown} does not exist") from None
        except (OSError, RuntimeError, ValueError) as error:  # names too long, links in a circle, zero bytes
            raise BadMedia(f"{shown} cannot be a file: {getattr(error, 'strerror', None) or error}") from None
        return path


class JsonLines:
    """One JSON object per line; blank lines are ignored, line numbers count them."""

    def __init__(self, path: Path, folder: Folder, open_file: Callable[[Path], FileIO]) -> None:
        self.path, self.folder, self.open_file = path, folder, open_file
        self.starts, self.stops, self.lines = index_lines(path)
        self.extents = blocks(len(self))

    def __len__(self) -> int:
        return len(self.starts)

    def read(self, row: int) -> Row:
        start, stop = int(self.starts[row]), int(self.stops[row])
        return parse_object(read_bytes(self.open_file, self.path, start, stop - start))

    def find(self, row: int, name: str) -> Path:
        return self.folder.find(name)

    def where(self, row: int) -> str:
        return f"{self.path}:{self.lines[row]}"


def read_bytes(open_file: Callable[[Path], FileIO], path: Path, start: int, size: int) -> bytes:
    """A part of a file. By pread: forked workers share the file, so they must not share a position in it."""
    if size > MOST_BYTES:
        raise BadRow(f"its {size:,} bytes are more than the {MOST_BYTES:,} that are read at once")
    try:
        found = os.pread(open_file(path).fileno(), size, start)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None
    if len(found) < size:
        raise BadRow(f"{len(found)} of its {size} bytes are there: the file has been cut since it was opened")
    return found


def parse_object(text: bytes) -> Row:
    try:
        value = json.loads(text.decode("utf-8-sig"), object_pairs_hook=without_repeats)
    except UnicodeDecodeError as error:
        raise BadRow(f"not valid JSON: not UTF-8 ({error.reason} at byte {error.start})") from None
    except ValueError as error:
        raise BadRow(f"not valid JSON ({error})") from None
    except RecursionError:
        raise BadRow("not valid JSON: nested too deeply") from None
    if not isinstance(value, dict):
        raise BadRow(f"a JSON object was expected, not {type(value).__name__}")
    if SURROGATE.search(text):
        check_characters(value)
    return value


def without_repeats(pairs: list[tuple[str, Any]]) -> Row:
    """JSON leaves open which value of a repeated key counts, so neither does."""
    value = dict(pairs)
    if len(value) < len(pairs):
        twice = next(key for key in value if sum(name == key for name, _ in pairs) > 1)
        raise ValueError(f"the key {twice!r} is there twice in one object")
    return value


def check_characters(value: Any) -> None:
    """No tokenizer, terminal or file takes half of a surrogate pair, which JSON can spell."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            half = value[error.start].encode("unicode_escape").decode()
            raise BadRow(f"a string has {half} at character {error.start}, which is half a character") from None
    elif isinstance(value, dict):
        for key, part in value.items():
            check_characters(key)
            check_characters(part)
    elif isinstance(value, list | tuple):
        for part in value:
            check_characters(part)


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


def without_nulls(row: Row, names: Sequence[str]) -> Row:
    """Columns of structs give every object the keys of all others: two calls of different tools would each have the
    arguments of both. What is None in them was not there."""
    return row | {name: _without_nulls(row[name]) for name in names if isinstance(row.get(name), list)}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(part) for key, part in value.items() if part is not None}
    if isinstance(value, list) and value and isinstance(value[0], dict | list):
        return [_without_nulls(part) for part in value]
    return value


# What pyarrow raises for damaged files and for values that Python has no type for; its own errors are of these, too.
ARROW_ERRORS = (pyarrow.ArrowException, OSError, ValueError, TypeError, LookupError, ArithmeticError, MemoryError)


class GroupCache:
    """Decoded Parquet row groups, the last used up to `limit` bytes, shared by the files of one source. One that cannot
    be decoded is remembered, too: each of its rows is asked for.
    """

    def __init__(self, limit: int = 1 << 30) -> None:
        self.limit, self.bytes = limit, 0
        self.tables: OrderedDict[tuple[Path, int], pyarrow.Table] = OrderedDict()
        self.damaged: dict[tuple[Path, int], str] = {}

    def get(self, path: Path, group: int) -> pyarrow.Table:
        key = (path, group)
        if key in self.damaged:
            raise BadRow(self.damaged[key])
        if key not in self.tables:
            try:
                with pyarrow.parquet.ParquetFile(path, page_checksum_verification=True) as file:
                    # one thread: arrow's pool and forked workers do not go together
                    table = file.read_row_group(group, use_threads=False)
                table.validate(full=True)  # damaged offsets would be read as they are, wherever they point
            except ARROW_ERRORS as error:
                self.damaged[key] = f"its row group {group} is damaged: {first_line(error)}"
                raise BadRow(self.damaged[key]) from None
            self.tables[key] = table
            self.bytes += self.tables[key].nbytes
            while self.bytes > self.limit and len(self.tables) > 1:
                self.bytes -= self.tables.popitem(last=False)[1].nbytes
        self.tables.move_to_end(key)
        return self.tables[key]


class ParquetRows:
    """A Parquet file; row groups are decoded whole and kept for a while."""

    def __init__(self, path: Path, folder: Folder, cache: GroupCache) -> None:
        self.path, self.folder, self.cache = path, folder, cache
        try:
            metadata = pyarrow.parquet.read_metadata(path)
            sizes = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
            names = metadata.schema.to_arrow_schema().names
        except ARROW_ERRORS as error:
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
            except ARROW_ERRORS as error:
                raise BadRow(f"its {name!r} cannot be read: {first_line(error)}") from None
        return without_nulls(value, STRUCTS)

    def find(self, row: int, name: str) -> Path:
        return self.folder.find(name)

    def where(self, row: int) -> str:
        return f"{self.path} row {row}"


# tarfile has its own errors for most damage, and lets others through
TAR_ERRORS = (
    tarfile.TarError,
    OSError,
    ValueError,
    TypeError,
    ArithmeticError,
    LookupError,
    RecursionError,
    MemoryError,
)


class TarSamples:
    """A tar file as WebDataset has it: files whose paths agree up to the first dot of the name are one sample, and what
    follows that dot is the kind of each. A sample is its `json`, or its `txt` after all its media.
    """

    def __init__(self, path: Path, modalities: Collection[str], open_file: Callable[[Path], FileIO]) -> None:
        self.path, self.modalities, self.open_file = path, modalities, open_file
        samples, self.unusable = index_tar(path)
        self.keys, members = list(samples), list(samples.values())
        known: dict[tuple[str, ...], tuple[str, ...]] = {}  # nearly all samples have the same kinds: kept once
        self.kinds = [known.setdefault(kinds, kinds) for kinds in map(tuple, members)]
        self.firsts = np.cumsum([0, *map(len, members)])
        self.spans = np.array([span for member in members for span in member.values()], np.int64).reshape(-1, 2)
        self.extents = blocks(len(self))

    def __len__(self) -> int:
        return len(self.keys)

    def read(self, row: int) -> Row:
        kinds = self.kinds[row]
        if self.keys[row] in self.unusable:  # to go on without a member would train on something else
            raise BadRow(f"its member {self.unusable[self.keys[row]]}")
        value = parse_object(self._read(row, "json")) if "json" in kinds else {}
        if any(value.get(name) is not None for name in CONVERSATION):
            # members that the row does not name are fields that nothing reads
            named, key = set(strings(value)), self.keys[row].lower()
            prefixes = ("", f"{key}.", f"{key.rpartition('/')[2]}.")
            unnamed = [kind for kind in kinds if not any(prefix + kind in named for prefix in prefixes)]
            return value | {f".{kind}": kind for kind in unnamed if kind != "json"}
        if "txt" not in kinds:
            return dict.fromkeys(kinds)  # says what there is instead
        try:
            text = self._read(row, "txt").decode()
        except UnicodeDecodeError as error:
            raise BadRow(f"its txt is not UTF-8 ({error})") from None
        types = [(kind, content_type(kind, self.modalities)) for kind in kinds]
        media = [{"type": type, type: kind} for kind, type in types if type is not None]
        # the other members are fields that nothing reads, as are those of the json; but a caption is the txt once more
        value = {name: part for name, part in value.items() if (name, part) != ("caption", text)}
        value |= {f".{kind}": kind for kind, type in types if type is None and kind not in ("txt", "json")}
        return value | {"text": [*media, {"type": "text", "text": text}]}

    def find(self, row: int, name: str) -> bytes:
        key, kinds = self.keys[row], self.kinds[row]
        for prefix in (f"{key}.", f"{key.rpartition('/')[2]}.", ""):
            if name.startswith(prefix) and (kind := name.removeprefix(prefix).lower()) in kinds:
                return self._read(row, kind)
        raise BadMedia(f"the sample has no member {name[:64]!r}; it has {', '.join(kinds)}")

    def _read(self, row: int, kind: str) -> bytes:
        start, size = map(int, self.spans[self.firsts[row] + self.kinds[row].index(kind)])
        return read_bytes(self.open_file, self.path, start, size)

    def where(self, row: int) -> str:
        return f"{self.path} sample {self.keys[row]}"


def strings(value: Any) -> Iterator[str]:
    """All strings in a JSON value, in lower case."""
    if isinstance(value, str):
        yield value.lower()
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from strings(part)


def index_tar(path: Path) -> tuple[dict[str, dict[str, tuple[int, int]]], dict[str, str]]:
    """Samples by key: first byte and size of each of their members, by kind. Contents are skipped.
    And samples that have a member which cannot be used: which, and why.
    """
    samples: dict[str, dict[str, tuple[int, int]]] = {}
    unusable: dict[str, str] = {}
    try:
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                folder, slash, name = member.name.removeprefix("./").rpartition("/")
                stem, _, kind = name.partition(".")
                if member.size < 0 or tar.offset <= member.offset:
                    raise tarfile.ReadError(f"the header of {member.name[:64]!r} is damaged")
                if member.isdir() or not stem or not kind:
                    continue
                key = f"{folder}{slash}{stem}"
                kinds = samples.setdefault(key, {})
                if member.issym() or member.islnk():
                    unusable.setdefault(key, f".{kind} is a link")
                elif not member.isfile() or member.issparse():
                    unusable.setdefault(key, f".{kind} is no plain file")
                elif kind.lower() in kinds:
                    unusable.setdefault(key, f".{kind} is there twice")
                kinds[kind.lower()] = (member.offset_data, member.size)
            check_tar_end(path, tar.offset)
    except TAR_ERRORS as error:
        raise UserError(f"{path} is not a readable tar file without compression: {first_line(error)}") from None
    return samples, unusable


def check_tar_end(path: Path, end: int) -> None:
    """`end` is where tarfile found no further member, which it takes for the end whatever is there. An archive ends in
    blocks of zeros, of which one must be whole; only what comes after that may be cut off.
    """
    with open(path, "rb") as file:
        file.seek(end)
        mark = file.read(tarfile.BLOCKSIZE)
        if not mark.rstrip(b"\0") and len(mark) < tarfile.BLOCKSIZE:
            raise tarfile.ReadError(
                "it has no end mark, so it was cut, or never finished (if it is whole: truncate -s +1K FILE adds one)"
            )
        if mark.rstrip(b"\0"):
            raise tarfile.ReadError(f"there is no header at byte {end}, where one was expected")
        while rest := file.read(1 << 20):
            if rest.rstrip(b"\0"):
                raise tarfile.ReadError(f"there is more after its end mark at byte {end}; were archives joined?")


def content_type(kind: str, modalities: Collection[str]) -> str | None:
    """The content type of a member: a modality that its kind names (`depth`, `depth.npy`, `depth2.npy`), or what its
    suffix is registered as; None if that is no medium.
    """
    named = [word for part in kind.split(".") if (word := part.rstrip("0123456789")) in modalities]
    if named:
        return named[0]
    registered = mimetypes.guess_type(f"member.{kind}")[0]
    if registered is None:
        raise BadRow(f"cannot tell what its member .{kind} is: call it .<modality>.{kind}, or describe it in a .json")
    main = registered.partition("/")[0]
    return None if main in ("text", "application") else main


class DatasetRows:
    """Whatever `datasets` made of the path: memory-mapped Arrow. Media stay as they are stored."""

    def __init__(self, path: Path, folder: Folder, dataset: Any) -> None:
        self.path, self.folder = path, folder
        self.dataset, self.features = dataset.with_format("arrow"), undecoded(dataset.features)
        # where columns are JSON, a null is one that its author wrote
        self.structs = [name for name in STRUCTS if "Json(" not in repr(self.features.get(name))]
        self.extents = blocks(len(self))

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, row: int) -> Row:
        try:
            value: Row = self.features.decode_example(self.dataset[row].to_pylist()[0])
        except (*ARROW_ERRORS, RecursionError) as error:
            raise BadRow(f"cannot be read: {first_line(error)}") from None
        check_characters(value)
        return without_nulls(value, self.structs)

    def find(self, row: int, name: str) -> Path:
        return self.folder.find(name)

    def where(self, row: int) -> str:
        return f"{self.path} row {row}"


def undecoded(feature: Any) -> Any:
    """Features of `datasets` such that only JSON, which is stored as text, is decoded."""
    from datasets import Json

    if isinstance(feature, dict):
        return type(feature)({name: undecoded(part) for name, part in feature.items()})
    if isinstance(feature, list):
        return [undecoded(part) for part in feature]
    if hasattr(feature, "feature"):
        return replace(feature, feature=undecoded(feature.feature))
    return replace(feature, decode=False) if hasattr(feature, "decode") and not isinstance(feature, Json) else feature


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
    path = Path(spec.path).expanduser()
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
    if spec.media_dir is not None and not Path(spec.media_dir).expanduser().is_dir():
        raise UserError(f"media_dir {spec.media_dir} of data source {path} is not a folder")

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
            source = concatenate(files, folder_of, modalities)
        else:
            source = open_with_datasets(path, folder_of(path), spec.split, is_saved_dataset)
    except OSError as error:
        raise UserError(f"data source {path}: {error.filename or ''}: {error.strerror or first_line(error)}") from None
    if not len(source):
        raise UserError(f"data source {path} has no rows")
    return source


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


def is_json_lines(path: Path) -> bool:
    """`.json` may hold one array of rows instead; that is `datasets`' to read."""
    if path.suffix not in JSON_LINES:
        return False
    with open(path, "rb") as file:
        return path.suffix != ".json" or not file.read(256).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")


def open_with_datasets(path: Path, folder: Folder, split: str, is_saved_dataset: bool) -> RowSource:
    import datasets  # seconds to import, and most runs never need it

    try:
        if is_saved_dataset:
            dataset = datasets.load_from_disk(str(path))
            dataset = dataset[split] if isinstance(dataset, datasets.DatasetDict) else dataset
        else:
            name, files = (str(path), None) if path.is_dir() else (builder_of(path), {split: str(path)})
            offline = datasets.DownloadConfig(local_files_only=True)
            dataset = datasets.load_dataset(name, data_files=files, split=split, download_config=offline)
    except Exception as error:  # it hands on whatever the parser of the format, or of its compression, raises
        raise UserError(
            f"data source {path} holds no JSONL, Parquet or tar, and `datasets` cannot load it (split {split!r}): "
            f"{first_line(error)}"
        ) from error
    return DatasetRows(path, folder, dataset)


def builder_of(path: Path) -> str:
    builders = {".csv": "csv", ".txt": "text", ".arrow": "arrow", ".json": "json"}
    suffix = path.with_suffix("").suffix if path.suffix in (".gz", ".zst", ".xz", ".bz2") else path.suffix
    if suffix in (".jsonl", ".ndjson"):
        return "json"  # compressed: no random access to its lines
    if suffix not in builders:
        raise ValueError(f"unknown file type {path.suffix!r}; known: .jsonl, .parquet, .tar, {', '.join(builders)}")
    return builders[suffix]
