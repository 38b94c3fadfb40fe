"""The manifest of a checkpoint: the size and hash of every file, the step and the run id. It detects any changed byte.

A manifest contains a hash of itself. Its content has exactly one valid text; any other text is rejected as damaged.
xxh3 is not a cryptographic hash, so it detects damage but not forgery.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import xxhash

NAME = "manifest.json"
FORMAT = 2  # version 1 had sizes but no hashes
HASH = "xxh3_128"


@dataclass(frozen=True)
class File:
    """Size and hash of a file."""

    bytes: int
    hash: str


@dataclass(frozen=True)
class Manifest:
    """The content of a manifest."""

    run: str  # id of the run that wrote it
    step: int
    files: Mapping[str, File]  # keyed by path relative to the checkpoint folder, with slashes

    def text(self) -> str:
        """Return the text of the manifest file. It includes a hash of the other fields."""
        files = {name: {"bytes": file.bytes, HASH: file.hash} for name, file in sorted(self.files.items())}
        fields = {"format": FORMAT, "run": self.run, "step": self.step, "files": files}
        check = hash_bytes(json.dumps(fields).encode())
        return json.dumps(fields | {"check": check}, indent=1) + "\n"


class Damage(Exception):  # noqa: N818 (not an error if there is an earlier checkpoint)
    """A checkpoint is damaged. The message names the file and the reason."""


def hash_bytes(data: bytes) -> str:
    """Return the hash of `data`, as hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(data)


def hash_file(path: Path) -> File:
    """Return the size and hash of a file. The file is read in chunks."""
    with open(path, "rb", buffering=0) as file:
        digest = hashlib.file_digest(file, xxhash.xxh3_128)
        return File(file.tell(), digest.hexdigest())


def read(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint.

    Raises:
        Damage: If the manifest is missing or damaged, or has an unsupported format.
    """
    text, fields = _read_json(folder / NAME)
    if isinstance(fields, dict) and "format" not in fields and set(fields) == {"step", "files"}:
        raise Damage(f"{NAME} has no checksums, because an older version of OmniZoo wrote it")
    version = fields.get("format") if isinstance(fields, dict) else None
    if isinstance(version, int) and version > FORMAT:
        raise Damage(f"{NAME} has format {version}, but this version of OmniZoo reads format {FORMAT}")
    try:
        files = {name: File(file["bytes"], file[HASH]) for name, file in fields["files"].items()}
        manifest = Manifest(fields["run"], fields["step"], files)
        expected = manifest.text().encode()
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError):
        raise Damage(f"{NAME} has missing or invalid fields") from None
    if expected != text:
        raise Damage(f"{NAME} does not match its own checksum")
    if not isinstance(manifest.run, str) or type(manifest.step) is not int:
        raise Damage(f"{NAME} has missing or invalid fields")
    return manifest


def _read_json(path: Path) -> tuple[bytes, Any]:
    """Return the bytes of a file and the JSON value in it."""
    try:
        text = path.read_bytes()
        return text, json.loads(text)
    except OSError as error:
        raise Damage(f"{path.name} cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError):
        raise Damage(f"{path.name} is not JSON") from None


def check_outside(folder: Path, manifest: Manifest) -> None:
    """Check everything that does not require reading large files.

    Raises:
        Damage: If a file is missing, has the wrong size or is not in the manifest, or if the folder name has another
            step.
    """
    if folder.name.startswith("step_") and folder.name != f"step_{manifest.step:08d}":
        raise Damage(f"{NAME} has step {manifest.step}, but the name of the folder is {folder.name}")
    folders = {str(parent) for name in manifest.files for parent in PurePosixPath(name).parents}
    for path_name in sorted(below(folder)):
        if path_name not in manifest.files and path_name not in folders and path_name != NAME:
            raise Damage(f"{path_name} is not in {NAME}")
    for name, file in manifest.files.items():
        path = folder / name
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise Damage(f"{NAME} contains {name}, which is outside the checkpoint")
        if not path.is_file():
            raise Damage(f"{name} is missing")
        size = path.stat().st_size
        if size != file.bytes:
            raise Damage(f"{name} has {size} bytes, but {NAME} lists {file.bytes}")


def check_hashes(folder: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Check the hashes of the files `names`.

    Raises:
        Damage: If a file cannot be read, or if its hash differs from the manifest.
    """
    for name in names:
        try:
            actual = hash_file(folder / name)
        except OSError as error:
            raise Damage(f"{name} cannot be read ({error.strerror})") from None
        if actual != manifest.files[name]:
            raise Damage(f"{name} does not match its checksum")


def read_state(folder: Path, manifest: Manifest) -> dict[str, Any]:
    """Return the content of `state.json`.

    Raises:
        Damage: If the file cannot be read, or if its step differs from that of the manifest.
    """
    _, state = _read_json(folder / "state.json")
    if not isinstance(state, dict) or "step" not in state:
        raise Damage("state.json has no step")
    if state["step"] != manifest.step:
        raise Damage(f"state.json has step {state['step']}, but {NAME} has step {manifest.step}")
    return state


def below(folder: Path) -> set[str]:
    """Return all files, folders and links in `folder`, as relative paths with slashes."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}
