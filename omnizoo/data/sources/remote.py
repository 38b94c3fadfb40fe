"""Copy files from remote addresses that fsspec supports, such as `s3://` and `hf://`, to a local cache.

The name of the local folder contains a hash of all file versions (sizes, checksums, dates). If a file changes,
it is therefore copied to a new folder, and copies that are in use never change. Files with rows are copied when the
source is opened. A media file is copied when a row refers to it for the first time.
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
from omnizoo.config.versions import install_command
from omnizoo.data.sources.base import MediaFolder
from omnizoo.modalities.media import BadMedia

log = logging.getLogger(__name__)
ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
# Fields that file systems provide for a file, and that change with its content.
VERSIONS = ("ETag", "etag", "checksum", "md5", "sha256", "blob_id", "last_commit", "mtime", "LastModified", "created")
PROTOCOLS_OF_EXTRA = ("s3", "s3a", "gs", "gcs")  # protocols that `pip install 'omnizoo[remote]'` adds


def is_address(path: str) -> bool:
    """Whether a path is a remote address, such as `s3://bucket/rows.jsonl`."""
    match = ADDRESS.match(path)
    return match is not None and match[1].lower() != "file"


@dataclass(frozen=True)
class RemoteFolder(MediaFolder):
    """The media folder of a remote source. `base` and `root` are folders of the local copy."""

    remote: "Remote" = field(kw_only=True)

    def find(self, name: str) -> Path:
        """Return the local copy of a media file. The file is downloaded if there is no copy yet.

        Args:
            name: Name of the file in the row.

        Raises:
            BadMedia: If the file does not exist, or if it is outside the remote folder.
        """
        local = Path(os.path.normpath(self.base / name))
        if not local.is_relative_to(self.remote.mirror):
            raise BadMedia(
                f"{name[:256]} is outside {self.remote.address}. Set media_dir to the folder of the media files."
            )
        if not local.exists() and len(name) < 1024:
            self.remote.fetch(local.relative_to(self.remote.mirror).as_posix(), missing_is_bad=True)
        return super().find(name)


class Remote:
    """A remote file or folder. `mirror` is the local folder with the copies. Copies have the same relative paths.

    Args:
        address: An address that fsspec supports.
        cache_dir: Folder for the copies of all addresses; None for `~/.cache/omnizoo`.

    Raises:
        UserError: If fsspec does not support the address.
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
        """Copy the file, or some files of the folder, to the cache.

        If the address cannot be reached, the latest copy is used and a warning is printed.

        Args:
            choose: Receives the names of all files in the folder, and returns the names of the files to copy.

        Returns:
            The local path of the file or folder.

        Raises:
            UserError: If the address does not exist, or if it cannot be reached and there is no copy.
        """
        latest_copy = self.cache / f"{self._folder_name([])}.json"
        try:
            is_file, versions = self._list_files()
        except FileNotFoundError:
            raise UserError(f"{self.address}: the data source does not exist") from None
        except UserError as error:
            if not latest_copy.exists():
                raise
            saved: dict[str, str] = json.loads(latest_copy.read_text())
            self.mirror = self.cache / saved["folder"]
            log.warning("%s; using the copy in %s", error, self.mirror)
            return self.mirror / saved["path"]

        names = list(versions) if is_file else choose(list(versions))
        self.mirror = self.cache / self._folder_name([[name, versions[name]] for name in names])
        for name in names:
            self.fetch(name)
        path = names[0] if is_file else ""
        latest_copy.write_text(json.dumps({"folder": self.mirror.name, "path": path}))
        return self.mirror / path

    def _list_files(self) -> tuple[bool, dict[str, str]]:
        """Return whether the address is a file, and the version of each file, keyed by its relative path."""
        with self._user_errors():
            info = self.system.info(self.path)
            if info["type"] == "file":
                self.path, _, name = self.path.rpartition("/")
                return True, {name: _version(info)}
            infos = self.system.find(self.path, detail=True)
        prefix = self.path.rstrip("/") + "/" if self.path.strip("/") else self.path
        versions = {}
        for full_name, info in sorted(infos.items()):
            versions[full_name.removeprefix(prefix).lstrip("/")] = _version(info)
        return False, versions

    def fetch(self, name: str, missing_is_bad: bool = False) -> Path:
        """Return the local copy of a file. The file is downloaded if there is no copy yet.

        Args:
            name: Path of the file relative to the address.
            missing_is_bad: Whether a missing file raises `BadMedia`, so that only its row is bad, instead of
                `UserError`.

        Raises:
            BadMedia: If the file does not exist and `missing_is_bad` is True.
            UserError: If the file cannot be downloaded or written.
        """
        local = self.mirror / name
        if local.exists():
            return local
        try:
            local.parent.mkdir(parents=True, exist_ok=True)
            with _file_lock(local.with_name(f".{local.name}.lock")):
                if local.exists():  # another process downloaded the file while this one waited
                    return local
                partial = local.with_name(f".{local.name}.{os.getpid()}.partial")
                with self._user_errors():
                    self.system.get_file(str(PurePosixPath(self.path) / name), str(partial))
                partial.replace(local)
        except FileNotFoundError:
            message = f"{self.address}: {name[:256]} does not exist"
            raise (BadMedia(message) if missing_is_bad else UserError(message)) from None
        except OSError as error:
            raise UserError(f"data.cache_dir: writing {local} failed: {error.strerror or error}") from None
        return local

    @contextmanager
    def _user_errors(self) -> Iterator[None]:
        """Context manager: convert errors of the file system, except `FileNotFoundError`, to `UserError`."""
        try:
            yield
        except FileNotFoundError:
            raise
        except Exception as error:  # file systems have different classes for errors of networks, logins and names
            hint = ""
            if self.address.startswith("hf://datasets/"):
                name = "/".join(self.address.removeprefix("hf://datasets/").split("/")[:2]).partition("@")[0]
                command = f"hf download {name} --repo-type dataset --local-dir DIR"
                hint = f". Download it on a machine with network access: `{command}`"
            raise UserError(f"{self.address}: not readable: {first_line(error)}{hint}") from error


def connect(address: str) -> tuple[Any, str]:
    """Return the fsspec file system of an address, and the path in it.

    Raises:
        UserError: If fsspec does not support the address, or if a package is not installed.
    """
    from fsspec.core import url_to_fs

    try:
        system, path = url_to_fs(address)
    except ImportError as error:  # the error message of fsspec names the missing package
        protocol = address.partition("://")[0]
        hint = f". Run `{install_command('remote')}`." if protocol in PROTOCOLS_OF_EXTRA else ""
        raise UserError(f"{address}: a package is not installed: {first_line(error)}{hint}") from None
    except ValueError as error:
        expected = "expected the path of a file or folder, or an address that fsspec supports"
        raise UserError(f"{address}: {first_line(error)}; {expected}") from None
    except Exception as error:
        raise UserError(f"{address}: not readable: {first_line(error)}") from error
    return system, path


def _version(info: dict[str, Any]) -> str:
    """Return a text that changes if the content of a file changes. It contains the size and the `VERSIONS` fields."""
    fields = {key: str(info[key]) for key in VERSIONS if info.get(key) is not None}
    return json.dumps({"size": info.get("size"), **fields}, sort_keys=True)


@contextmanager
def _file_lock(lock: Path) -> Iterator[None]:
    """Context manager: hold a file lock, so that only one process on this machine downloads a file at a time."""
    with open(lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
