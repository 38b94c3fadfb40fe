"""Rows of a tar file as WebDataset writes it. Opening reads the headers; members are read when they are asked for."""

import mimetypes
import tarfile
from collections.abc import Callable, Collection, Iterator
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np

from omnizoo.config.errors import UserError, first_line
from omnizoo.data.json_lines import parse_object, read_bytes
from omnizoo.data.rows import CONVERSATION, BadRow, Row, RowSource
from omnizoo.modalities.item import BadMedia

TAR = (".tar",)
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


class TarSamples(RowSource):
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
