"""Read the rows of WebDataset tar files.

Opening a file reads only the tar headers. The members of a row are read when the row is read.
"""

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


class WebDatasetFile(RowSource):
    """A WebDataset tar file.

    Members whose paths are the same up to the first dot of the file name form one row. The text after that dot is the
    kind of the member, such as `jpg` or `json`. If the `json` member contains a conversation, it is the row. Otherwise,
    the row consists of its media members followed by its `txt` member.

    Args:
        path: The tar file.
        modalities: The modalities of the model, to recognize media members.
        open_file: Returns an open file for a path.

    Raises:
        UserError: If the file is not a valid, uncompressed tar file.
    """

    stored_kind = "TarSamples"

    def __init__(self, path: Path, modalities: Collection[str], open_file: Callable[[Path], FileIO]) -> None:
        self.path = path
        self.modalities = modalities
        self.open_file = open_file
        samples, self.unusable = index_tar(path)
        self.keys = list(samples)
        members = list(samples.values())
        # Nearly all rows have members of the same kinds, so store equal tuples only once.
        stored_kinds: dict[tuple[str, ...], tuple[str, ...]] = {}
        self.kinds = [stored_kinds.setdefault(kinds, kinds) for kinds in map(tuple, members)]
        self.firsts = np.cumsum([0, *map(len, members)])
        spans = [span for spans_by_kind in members for span in spans_by_kind.values()]
        self.spans = np.array(spans, np.int64).reshape(-1, 2)

    def __len__(self) -> int:
        return len(self.keys)

    def read(self, row: int) -> Row:
        """Read the members of a row. Raises `BadRow` if one of them cannot be used."""
        kinds = self.kinds[row]
        if self.keys[row] in self.unusable:  # do not skip the member: without it, the row could have another meaning
            raise BadRow(f"the member {self.unusable[self.keys[row]]}")
        value = parse_object(self._read(row, "json")) if "json" in kinds else {}
        if any(value.get(name) is not None for name in CONVERSATION):
            return value | self._unnamed_members(row, value)
        if "txt" not in kinds:
            return dict.fromkeys(kinds)  # the row has no conversation; the error message will list these fields
        return self._text_with_media(row, value)

    def _unnamed_members(self, row: int, value: Row) -> Row:
        """Return a field for each member that the json does not refer to. These fields are later reported as unused."""
        names = set(strings(value))
        key = self.keys[row].lower()
        prefixes = ("", f"{key}.", f"{key.rpartition('/')[2]}.")
        unnamed: Row = {}
        for kind in self.kinds[row]:
            is_named = any(prefix + kind in names for prefix in prefixes)
            if not is_named and kind != "json":
                unnamed[f".{kind}"] = kind
        return unnamed

    def _text_with_media(self, row: int, value: Row) -> Row:
        """Return a row that consists of its media members followed by its `txt` member.

        The fields of the `json` member (`value`) and other members become fields of the row, so that they are reported
        as unused. A caption in the json that repeats the txt is omitted.
        """
        try:
            text = self._read(row, "txt").decode()
        except UnicodeDecodeError as error:
            raise BadRow(f"the member .txt is not UTF-8 ({error}). Convert it to UTF-8.") from None
        fields = {name: part for name, part in value.items() if (name, part) != ("caption", text)}
        media: list[Row] = []
        for kind in self.kinds[row]:
            modality = content_type(kind, self.modalities)
            if modality is not None:
                media.append({"type": modality, modality: kind})
            elif kind not in ("txt", "json"):
                fields[f".{kind}"] = kind
        return fields | {"text": [*media, {"type": "text", "text": text}]}

    def find(self, row: int, name: str) -> bytes:
        """Return the content of a member, by its kind, its file name or its path in the archive."""
        key = self.keys[row]
        kinds = self.kinds[row]
        for prefix in (f"{key}.", f"{key.rpartition('/')[2]}.", ""):
            kind = name.removeprefix(prefix).lower()
            if name.startswith(prefix) and kind in kinds:
                return self._read(row, kind)
        raise BadMedia(f"the row has no member {name[:64]!r}; its members are {', '.join(kinds)}")

    def _read(self, row: int, kind: str) -> bytes:
        """Return the content of one member of a row."""
        start, size = map(int, self.spans[self.firsts[row] + self.kinds[row].index(kind)])
        return read_bytes(self.open_file, self.path, start, size)

    def where(self, row: int) -> str:
        """Return the path of the tar file and the common beginning of the members' names."""
        return f"{self.path} sample {self.keys[row]}"


def strings(value: Any) -> Iterator[str]:
    """Yield all strings in a JSON value in lower case, except the keys of objects."""
    if isinstance(value, str):
        yield value.lower()
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from strings(part)


def index_tar(path: Path) -> tuple[dict[str, dict[str, tuple[int, int]]], dict[str, str]]:
    """Index the members of a tar file without reading their contents.

    Returns:
        Two mappings. The keys of both are the common beginnings of the member paths of each row. The first one
        contains, for each row, the first byte and the size of each member by its kind. The second one contains, for
        each row with an unusable member, the name of that member and why it is unusable.

    Raises:
        UserError: If the file is not a valid, uncompressed tar file.
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
                    unusable.setdefault(key, f".{kind} is not a plain file")
                elif kind.lower() in kinds:
                    unusable.setdefault(key, f".{kind} occurs twice")
                kinds[kind.lower()] = (member.offset_data, member.size)
            check_tar_end(path, tar.offset)
    except (tarfile.TarError, *CODE_ERRORS) as error:  # some damage raises errors other than TarError
        raise UserError(f"{path}: cannot be read as an uncompressed tar file: {first_line(error)}") from None
    return samples, unusable


def check_tar_end(path: Path, end: int) -> None:
    """Check that an archive has a valid end mark, so that it is not truncated or damaged.

    A valid archive ends with a complete block of zeros, and only zeros may follow. The module `tarfile` does not check
    this.

    Args:
        path: The tar file.
        end: The byte at which `tarfile` found no further member.

    Raises:
        tarfile.ReadError: If the archive is truncated or damaged, or if several archives were concatenated.
    """
    with open(path, "rb") as file:
        file.seek(end)
        mark = file.read(tarfile.BLOCKSIZE)
        if not mark.rstrip(b"\0") and len(mark) < tarfile.BLOCKSIZE:
            raise tarfile.ReadError(
                "the end mark is missing, so the archive was truncated or never finished. If it is complete, add the "
                "mark with `truncate -s +1K FILE`."
            )
        if mark.rstrip(b"\0"):
            raise tarfile.ReadError(f"no tar header at byte {end}")
        while rest := file.read(1 << 20):
            if rest.rstrip(b"\0"):
                raise tarfile.ReadError(
                    f"data follows the end mark at byte {end}. If archives were concatenated, split them."
                )


def content_type(kind: str, modalities: Collection[str]) -> str | None:
    """Return the modality of a member; None if the member is not media.

    The kind may contain the name of a modality, as in `depth`, `depth.npy` or `depth2.npy`. Otherwise, the MIME type of
    the suffix determines the modality.

    Args:
        kind: Kind of the member: its file name after the first dot.
        modalities: The modalities of the model.

    Raises:
        BadRow: If the kind has no modality and no MIME type.
    """
    for part in kind.split("."):
        word = part.rstrip("0123456789")
        if word in modalities:
            return word
    mime_type = mimetypes.guess_type(f"member.{kind}")[0]
    if mime_type is None:
        raise BadRow(
            f"the member .{kind} has an unknown type. Rename it to .<modality>.{kind}, or name it in a .json member."
        )
    main_type = mime_type.partition("/")[0]
    return None if main_type in ("text", "application") else main_type
