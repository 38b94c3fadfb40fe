"""What a checkpoint consists of: every file with its size and hash, the step, the run. Any changed byte is found.

The manifest is text that we write in one way only, with a hash of itself in it: a manifest that would not be written
like this is not ours. xxh3 is not a signature: it finds damage, not forgery.
"""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import xxhash

NAME = "manifest.json"
FORMAT = 2  # 1 had sizes only
HASH = "xxh3_128"
CHUNK = 1 << 24


@dataclass(frozen=True)
class File:
    bytes: int
    hash: str


@dataclass(frozen=True)
class Manifest:
    run: str  # id of the run that wrote it
    step: int
    files: Mapping[str, File]  # by path below the checkpoint's folder, with slashes

    def text(self) -> str:
        files = {name: {"bytes": file.bytes, HASH: file.hash} for name, file in sorted(self.files.items())}
        fields = {"format": FORMAT, "run": self.run, "step": self.step, "files": files}
        return json.dumps(fields | {"check": hash_bytes(json.dumps(fields).encode())}, indent=1) + "\n"


class Damage(Exception):  # noqa: N818 (it is passed over where there is a checkpoint before)
    """Why a folder cannot be trusted as a checkpoint: the file, and what is wrong with it."""


def hash_bytes(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def hash_file(path: Path) -> File:
    """In chunks: as fast as the disk, and in little memory."""
    digest, size = xxhash.xxh3_128(), 0
    with open(path, "rb", buffering=0) as file:
        buffer = memoryview(bytearray(min(CHUNK, os.fstat(file.fileno()).st_size + 1)))
        while read := file.readinto(buffer):
            digest.update(buffer[:read])
            size += read
    return File(size, digest.hexdigest())


def read(folder: Path) -> Manifest:
    """The manifest of a checkpoint, if it is one that we wrote; otherwise Damage."""
    try:
        text = (folder / NAME).read_bytes()
    except OSError as error:
        raise Damage(f"{NAME} cannot be read ({error.strerror})") from None
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        raise Damage(f"{NAME} is not JSON") from None
    if isinstance(fields, dict) and "format" not in fields and set(fields) == {"step", "files"}:
        raise Damage(f"{NAME} has no checksums: it was written before OmniZoo had them, and cannot be checked")
    if isinstance(fields, dict) and isinstance(found := fields.get("format"), int) and found > FORMAT:
        raise Damage(f"{NAME} is of format {found}; this OmniZoo reads {FORMAT}")
    try:
        files = {name: File(file["bytes"], file[HASH]) for name, file in fields["files"].items()}
        manifest = Manifest(fields["run"], fields["step"], files)
        written = manifest.text().encode()
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError):
        raise Damage(f"{NAME} lacks fields or has wrong ones") from None
    if written != text:
        raise Damage(f"{NAME} does not match its own checksum")
    if not isinstance(manifest.run, str) or type(manifest.step) is not int:
        raise Damage(f"{NAME} lacks fields or has wrong ones")
    return manifest


def check_outside(folder: Path, manifest: Manifest) -> None:
    """Everything that can be seen without reading large files: names, sizes, strangers, and that steps agree."""
    if folder.name.startswith("step_") and folder.name != f"step_{manifest.step:08d}":
        raise Damage(f"{NAME} is of step {manifest.step}, the folder is called {folder.name}")
    places = {str(parent) for name in manifest.files for parent in PurePosixPath(name).parents}
    for found in sorted(below(folder)):
        if found not in manifest.files and found not in places and found != NAME:
            raise Damage(f"{found} is not in {NAME}")
    for name, file in manifest.files.items():
        path = folder / name
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise Damage(f"{NAME} names {name}, which is outside of the checkpoint")
        if not path.is_file():
            raise Damage(f"{name} is missing")
        if (size := path.stat().st_size) != file.bytes:
            raise Damage(f"{name} has {size} bytes, not {file.bytes}")


def check_hashes(folder: Path, manifest: Manifest, names: Iterable[str]) -> None:
    for name in names:
        try:
            found = hash_file(folder / name)
        except OSError as error:
            raise Damage(f"{name} cannot be read ({error.strerror})") from None
        if found != manifest.files[name]:
            raise Damage(f"{name} does not match its checksum")


def read_state(folder: Path, manifest: Manifest) -> dict[str, Any]:
    """`state.json`, which must be of the same step as the manifest."""
    try:
        state = json.loads((folder / "state.json").read_bytes())
    except OSError as error:
        raise Damage(f"state.json cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError):
        raise Damage("state.json is not JSON") from None
    if not isinstance(state, dict) or "step" not in state:
        raise Damage("state.json has no step")
    if state["step"] != manifest.step:
        raise Damage(f"state.json is of step {state['step']}, {NAME} of step {manifest.step}")
    return state


def below(folder: Path) -> set[str]:
    """Every file, folder and link in `folder`, as a path with slashes relative to it."""
    names = set()
    for place, folders, files in os.walk(folder):
        names |= {str(PurePosixPath(Path(place, name).relative_to(folder))) for name in (*folders, *files)}
    return names
