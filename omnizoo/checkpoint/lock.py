"""Lock a folder, so that only one run uses it at a time. The lock file contains the host and process id of the run."""

import errno
import fcntl
import json
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from omnizoo.config.errors import UserError

logger = logging.getLogger(__name__)
LOCK = ".lock"


@contextmanager
def hold(folder: Path, key: str) -> Iterator[None]:
    """Context manager: lock `folder` for this process, creating the folder if needed.

    The operating system releases the lock when the process ends, however it ends. Folders that were created here and
    are still empty at the end are removed.

    Args:
        folder: The folder to lock.
        key: Config key of the folder, for error messages.

    Raises:
        UserError: If the folder is not writable or another run uses it.
    """
    missing_folders = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    path = folder / LOCK
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = _lock(path, key)
    except OSError as error:
        _remove_empty(missing_folders)
        raise UserError(
            f"{key}: {folder} is not writable: {error.strerror}. Choose another folder, or change its permissions."
        ) from None
    try:
        yield
    finally:
        with suppress(OSError):  # the disk may be unavailable by now
            path.unlink(missing_ok=True)
        os.close(lock)
        _remove_empty(missing_folders)


def _remove_empty(folders: list[Path]) -> None:
    """Remove the folders that are empty."""
    for folder in folders:
        with suppress(OSError):  # the folder is not empty
            folder.rmdir()


def _lock(path: Path, key: str) -> int:
    """Create and lock the file `path`, write the owner into it, and return its descriptor."""
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            # Use a record lock. Loader workers do not inherit it, so it is released when this process ends. A flock
            # would be released when the workers end, a second later. Both kinds of locks work across the hosts of a
            # network file system.
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The previous owner may have removed the file after it was opened here. In this case, try again.
            if _is_at(lock, path):
                break
            os.close(lock)
        except OSError as error:
            is_locked = error.errno in (errno.EACCES, errno.EAGAIN)
            owner = _read_owner(lock)
            if is_locked or _may_be_running(owner):
                os.close(lock)
                host = (owner or {}).get("host", "?")
                pid = (owner or {}).get("pid", "?")
                advice = "Wait until that run ends, or use another folder."
                if not is_locked:
                    advice += f" If that run has ended, delete {path}."
                raise UserError(f"{key}: {path.parent} is in use by a run on {host}, process {pid}. {advice}") from None
            logger.warning(
                "%s: the file system does not support locks (%s), so a second run in this folder is not detected",
                path,
                error,
            )
            break
    try:
        this_process = {"host": socket.gethostname(), "pid": os.getpid(), "started": psutil.Process().create_time()}
        os.ftruncate(lock, 0)
        os.pwrite(lock, json.dumps(this_process).encode(), 0)
    except OSError:
        os.close(lock)
        raise
    return lock


def _is_at(lock: int, path: Path) -> bool:
    """Whether the open file `lock` is the file at `path`."""
    try:
        return os.path.samestat(os.fstat(lock), os.stat(path))
    except FileNotFoundError:
        return False


def _read_owner(lock: int) -> dict[str, object] | None:
    """Return the host, process id and start time of the lock's owner; None if the file does not contain them."""
    try:
        owner = json.loads(os.pread(lock, 4096, 0))
    except (ValueError, OSError):
        return None
    return owner if isinstance(owner, dict) else None


def _may_be_running(owner: dict[str, object] | None) -> bool:
    """Whether the owner of the lock may still be running. This is always True if the owner is on another host.

    This check is only needed on file systems without locks.
    """
    if owner is None:
        return False
    if owner.get("host") != socket.gethostname():
        return True
    try:
        return psutil.Process(int(str(owner["pid"]))).create_time() == owner.get("started")
    except (psutil.Error, KeyError, ValueError):
        return False
