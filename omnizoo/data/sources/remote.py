"""Remote sources: addresses that fsspec supports (`hf://`, `s3://`, `memory://`), copied to disk and read from there.

The name of the local folder contains a hash of the versions of the files (sizes, checksums, dates). A changed file
therefore gets a new copy, and files that are open never change. A media file is copied when a row first refers to it.
"""

import fcntl
import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from omnizoo.config.errors import UserError, first_line
from omnizoo.data.sources.base import MediaFolder
from omnizoo.modalities.media import BadMedia

log = logging.getLogger(__name__)
ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
VERSIONS = ("ETag", "etag", "checksum", "md5", "sha256", "blob_id", "last_commit", "mtime", "LastModified", "created")


def is_address(path: str) -> bool:
    """Whether a path is a remote address, such as `s3://bucket/rows.jsonl`."""
    match = ADDRESS.match(path)
    return match is not None and match[1].lower() != "file"


@dataclass(frozen=True)
class RemoteFolder(MediaFolder):
    """Media files of a remote source. `base` and `root` are folders of the local copy."""

    remote: "Remote" = field(kw_only=True)

    def find(self, name: str) -> Path:
        """Return the local copy of a media file, and download it if it does not exist yet."""
        local = Path(os.path.normpath(self.base / name))
        if not local.is_relative_to(self.remote.mirror):
            raise BadMedia(f"{name[:256]} is outside of {self.remote.address}, of which media are copied")
        if not local.exists() and len(name) < 1024:
            self.remote.fetch(local.relative_to(self.remote.mirror).as_posix(), missing_is_bad=True)
        return super().find(name)


class Remote:
    """A remote file or folder. `mirror` is the local folder of the copies, with the same relative paths.

    Args:
        address: An address that fsspec supports.
        cache_dir: Folder of all copies; None for `~/.cache/omnizoo`.
    """

    def __init__(self, address: str, cache_dir: str | None) -> None:
        self.address = address
        self.cache = Path(cache_dir or Path.home() / ".cache" / "omnizoo").expanduser()
        self.system, self.path = connect(address)
        self.mirror = self.cache / self._folder_name([])

    def _folder_name(self, versions: Sequence[Any]) -> str:
        """Return a folder name that is unique for the address and the versions of its files."""
        digest = hashlib.blake2b(json.dumps([self.address, *versions], default=str).encode(), digest_size=8)
        readable = re.sub(r"[^A-Za-z0-9.-]+", "_", self.address)[:80]
        return f"{readable}-{digest.hexdigest()}"

    def copy(self, choose: Callable[[list[str]], list[str]]) -> Path:
        """Copy the file, or the chosen files of the folder, to the cache.

        If the address cannot be reached, the latest copy is used, with a warning.

        Args:
            choose: Selects the files to copy from the names of all files in the folder.

        Returns:
            The local path of the file or folder.

        Raises:
            UserError: If the address does not exist, or cannot be reached and has no copy.
        """
        note = self.cache / f"{self._folder_name([])}.json"
        try:
            is_file, found = self._look()
        except FileNotFoundError:
            raise UserError(f"data source {self.address} does not exist") from None
        except UserError as error:
            if not note.exists():
                raise
            known: dict[str, str] = json.loads(note.read_text())
            log.warning("%s; using the copy of it in %s", error, self.cache / known["folder"])
            self.mirror = self.cache / known["folder"]
            return self.mirror / known["path"]
        names = list(found) if is_file else choose(list(found))
        self.mirror = self.cache / self._folder_name([[name, found[name]] for name in names])
        for name in names:
            self.fetch(name)
        local = self.mirror / (names[0] if is_file else "")
        note.write_text(json.dumps({"folder": self.mirror.name, "path": names[0] if is_file else ""}))
        return local

    def _look(self) -> tuple[bool, dict[str, str]]:
        """Return whether the address is a file, and the version of each file by its relative name."""
        with self._explained():
            about = self.system.info(self.path)
            if about["type"] == "file":
                self.path, _, name = self.path.rpartition("/")
                return True, {name: _version(about)}
            below = self.system.find(self.path, detail=True)
        start = self.path.rstrip("/") + "/" if self.path.strip("/") else self.path
        return False, {full.removeprefix(start).lstrip("/"): _version(about) for full, about in sorted(below.items())}

    def fetch(self, name: str, missing_is_bad: bool = False) -> Path:
        """Return the local copy of a file, and download it if it does not exist yet.

        Args:
            name: Path of the file relative to the address.
            missing_is_bad: Whether a missing file raises `BadMedia`, which makes its row a bad row, instead of
                `UserError`.
        """
        local = self.mirror / name
        if local.exists():
            return local
        try:
            local.parent.mkdir(parents=True, exist_ok=True)
            with _held(local.with_name(f".{local.name}.lock")):
                if local.exists():  # another process has downloaded it meanwhile
                    return local
                partial = local.with_name(f".{local.name}.{os.getpid()}.partial")
                with self._explained():
                    self.system.get_file(str(PurePosixPath(self.path) / name), str(partial))
                partial.replace(local)
        except FileNotFoundError:
            if missing_is_bad:
                raise BadMedia(f"{self.address}: there is no {name[:256]}") from None
            raise UserError(f"{self.address}: there is no {name[:256]}") from None
        except OSError as error:
            raise UserError(f"data.cache_dir: {local} cannot be written: {error.strerror or error}") from None
        return local

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Context manager: convert errors of the file system, except `FileNotFoundError`, to `UserError`."""
        try:
            yield
        except FileNotFoundError:
            raise
        except Exception as error:  # each file system has its own error classes for network, login and names
            way = ""
            if self.address.startswith("hf://datasets/"):
                name = "/".join(self.address.removeprefix("hf://datasets/").split("/")[:2]).partition("@")[0]
                way = f"; where there is a network: `hf download {name} --repo-type dataset --local-dir DIR`"
            raise UserError(f"{self.address} cannot be read: {first_line(error)}{way}") from error


def connect(address: str) -> tuple[Any, str]:
    """Return the fsspec file system of an address, and the path in it."""
    from fsspec.core import url_to_fs

    try:
        system, path = url_to_fs(address)
    except ImportError as error:  # the message of fsspec contains the name of the package
        raise UserError(f"{address}: a package is not installed: {first_line(error)}") from None
    except ValueError as error:
        expected = "expected a file, a folder, or an address that fsspec reads"
        raise UserError(f"{address}: {first_line(error)}; {expected}") from None
    except Exception as error:
        raise UserError(f"{address} cannot be read: {first_line(error)}") from error
    return system, path


def _version(about: dict[str, Any]) -> str:
    """Return a string that changes with the content of a file: its size and the version fields of the file system."""
    known = {key: str(about[key]) for key in VERSIONS if about.get(key) is not None}
    return json.dumps({"size": about.get("size"), **known}, sort_keys=True)


@contextmanager
def _held(lock: Path) -> Iterator[None]:
    """Context manager: hold a file lock, so that one process of this machine at a time downloads a file."""
    with open(lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
