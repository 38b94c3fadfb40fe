"""Lock a folder, so that only one run uses it at a time. The lock file contains the host and process of the run."""

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
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    path = folder / LOCK
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = _lock(path, key)
    except OSError as error:
        _remove(made)
        raise UserError(f"{key}: {folder} cannot be written to: {error.strerror}") from None
    try:
        yield
    finally:
        with suppress(OSError):  # the disk may be unavailable by now
            path.unlink(missing_ok=True)
        os.close(lock)
        _remove(made)


def _remove(made: list[Path]) -> None:
    for place in made:
        with suppress(OSError):  # not empty
            place.rmdir()


def _lock(path: Path, key: str) -> int:
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            # A record lock instead of flock: loader workers do not inherit it, so it ends with this process and not a
            # second later with the workers. Both kinds work between the hosts of a network file system.
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(lock, path):
                break  # otherwise the previous owner has just ended and removed the file
            os.close(lock)
        except OSError as error:
            busy = error.errno in (errno.EACCES, errno.EAGAIN)
            holder = _holder(lock)
            if busy or _may_live(holder):
                os.close(lock)
                host, pid = (holder or {}).get("host", "?"), (holder or {}).get("pid", "?")
                unsure = "" if busy else f"; if it does not run any more, delete {path}"
                raise UserError(
                    f"{key}: {path.parent} is in use by a run on {host}, process {pid}{unsure}; wait for its end, or "
                    "give this run a folder of its own"
                ) from None
            logger.warning("%s: the file system has no locks (%s); a second run may not be noticed", path, error)
            break
    try:
        own = {"host": socket.gethostname(), "pid": os.getpid(), "started": psutil.Process().create_time()}
        os.ftruncate(lock, 0)
        os.pwrite(lock, json.dumps(own).encode(), 0)
    except OSError:
        os.close(lock)
        raise
    return lock


def _is_at(lock: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(lock), os.stat(path))
    except FileNotFoundError:
        return False


def _holder(lock: int) -> dict[str, object] | None:
    try:
        holder = json.loads(os.pread(lock, 4096, 0))
    except (ValueError, OSError):
        return None
    return holder if isinstance(holder, dict) else None


def _may_live(holder: dict[str, object] | None) -> bool:
    """Whether the owner of the lock may be running, on file systems without locks. Assume so for other hosts."""
    if holder is None:
        return False
    if holder.get("host") != socket.gethostname():
        return True
    try:
        return psutil.Process(int(str(holder["pid"]))).create_time() == holder.get("started")
    except (psutil.Error, KeyError, ValueError):
        return False
