"""Rows of a WebDataset tar file. Opening a file reads the tar headers; members are read when a row needs them."""

import mimetypes
import tarfile
from collections.abc import Callable, Collection, Iterator
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np

from omnizoo.config.errors import UserError, first_line
from omnizoo.config.plugins import CODE_ERRORS
from omnizoo.data.row import CONVERSATION, BadRow, Row
from omnizoo.data.sources.base import RowSource
from omnizoo.data.sources.jsonl import parse_object, read_bytes
from omnizoo.modalities.media import BadMedia

TAR = (".tar",)


class WebDatasetFile(RowSource):
    """A WebDataset tar file.

    Members whose paths agree up to the first dot of the file name form one row. The text after that dot is the kind of
    the member. A row is its `json` member if that contains a conversation, and else its media followed by its `txt`.
    """

    stored_kind = "TarSamples"

    def __init__(self, path: Path, modalities: Collection[str], open_file: Callable[[Path], FileIO]) -> None:
        self.path, self.modalities, self.open_file = path, modalities, open_file
        samples, self.unusable = index_tar(path)
        self.keys, members = list(samples), list(samples.values())
        # Nearly all rows have the same kinds, so equal tuples are stored once.
        known: dict[tuple[str, ...], tuple[str, ...]] = {}
        self.kinds = [known.setdefault(kinds, kinds) for kinds in map(tuple, members)]
        self.firsts = np.cumsum([0, *map(len, members)])
        self.spans = np.array([span for member in members for span in member.values()], np.int64).reshape(-1, 2)

    def __len__(self) -> int:
        return len(self.keys)

    def read(self, row: int) -> Row:
        kinds = self.kinds[row]
        if self.keys[row] in self.unusable:  # without this member, the row would have another meaning
            raise BadRow(f"its member {self.unusable[self.keys[row]]}")
        value = parse_object(self._read(row, "json")) if "json" in kinds else {}
        if any(value.get(name) is not None for name in CONVERSATION):
            # Return members that the row does not refer to as fields, so that they are reported as unused.
            named, key = set(strings(value)), self.keys[row].lower()
            prefixes = ("", f"{key}.", f"{key.rpartition('/')[2]}.")
            unnamed = [kind for kind in kinds if not any(prefix + kind in named for prefix in prefixes)]
            return value | {f".{kind}": kind for kind in unnamed if kind != "json"}
        if "txt" not in kinds:
            return dict.fromkeys(kinds)  # no conversation: the error message lists these fields
        try:
            text = self._read(row, "txt").decode()
        except UnicodeDecodeError as error:
            raise BadRow(f"its txt is not UTF-8 ({error})") from None
        types = [(kind, content_type(kind, self.modalities)) for kind in kinds]
        media = [{"type": type, type: kind} for kind, type in types if type is not None]
        # Other members, and the fields of the json, are reported as unused, except for a caption that repeats the txt.
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
        """Return the content of one member of a row."""
        start, size = map(int, self.spans[self.firsts[row] + self.kinds[row].index(kind)])
        return read_bytes(self.open_file, self.path, start, size)

    def where(self, row: int) -> str:
        return f"{self.path} sample {self.keys[row]}"


def strings(value: Any) -> Iterator[str]:
    """Yield all strings in a JSON value, in lower case. Keys of objects are not included."""
    if isinstance(value, str):
        yield value.lower()
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from strings(part)


def index_tar(path: Path) -> tuple[dict[str, dict[str, tuple[int, int]]], dict[str, str]]:
    """Index the members of a tar file without reading their contents.

    Returns:
        For each row key, the first byte and the size of each member, by kind; and for each row with an unusable
        member, which member it is and why it is unusable.

    Raises:
        UserError: If the file is not a valid tar file without compression.
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
    except (tarfile.TarError, *CODE_ERRORS) as error:  # some damage raises errors other than TarError
        raise UserError(f"{path} is not a readable tar file without compression: {first_line(error)}") from None
    return samples, unusable


def check_tar_end(path: Path, end: int) -> None:
    """Check that the archive has an end mark at byte `end`, where tarfile found no further member.

    tarfile accepts any bytes there as the end. A valid archive ends with blocks of zeros: the first block must be
    complete, and only zeros may follow.

    Raises:
        tarfile.ReadError: If the archive is truncated or damaged, or if several archives were concatenated.
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
    """Return the modality of a member, or None if it is not media.

    The kind may contain the name of a modality (`depth`, `depth.npy`, `depth2.npy`). Otherwise the MIME type of the
    suffix decides. Raises `BadRow` if the suffix has no MIME type.
    """
    named = [word for part in kind.split(".") if (word := part.rstrip("0123456789")) in modalities]
    if named:
        return named[0]
    registered = mimetypes.guess_type(f"member.{kind}")[0]
    if registered is None:
        raise BadRow(f"cannot tell what its member .{kind} is: call it .<modality>.{kind}, or describe it in a .json")
    main = registered.partition("/")[0]
    return None if main in ("text", "application") else main
