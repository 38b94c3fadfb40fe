"""A folder belongs to one run at a time (a lock with host and process), and for good (an id in it and in manifests)."""

import errno
import fcntl
import json
import logging
import os
import shutil
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from omnizoo.checkpoint import folder as folders
from omnizoo.config.errors import UserError

logger = logging.getLogger(__name__)

RUN_FILE = "run.json"
LOCK = ".lock"


@dataclass(frozen=True)
class Identity:
    """Which run a run folder is of."""

    id: str
    resume: str  # `checkpoint.resume` when the run began: the same command again goes on with it

    def text(self) -> str:
        return json.dumps(asdict(self)) + "\n"


def new_id() -> str:
    return uuid.uuid4().hex[:12]


def read_identity(root: Path) -> Identity | None:
    """The run that `root` is the folder of; None if there is none yet."""
    try:
        fields = json.loads((root / RUN_FILE).read_bytes())
        return Identity(str(fields["id"]), str(fields["resume"]))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        logger.warning("%s cannot be read (%s): the run is known by its checkpoints only", root / RUN_FILE, error)
        return None


def owners(directory: Path) -> dict[str, Path]:
    """The runs that have checkpoints in `directory`, each with its newest one."""
    found: dict[str, Path] = {}
    for folder in folders.checkpoints(directory):
        if (run := folders.owner(folder)) is not None:
            found.setdefault(run, folder)
    return found


def only_owner(directory: Path, root: Path) -> str | None:
    """The one run that the checkpoints in `directory` are of, which is that of the run folder `root` if this is one."""
    known, found = read_identity(root), owners(directory)
    strangers = {run: newest for run, newest in found.items() if known is not None and run != known.id}
    if strangers:
        run, newest = next(iter(strangers.items()))
        raise UserError(
            f"{newest} is of another run ({run}) than {root} ({known.id if known else ''}): move one of them away, or "
            "give the run a log.dir and a checkpoint.dir of its own"
        )
    if len(found) > 1:
        listed = ", ".join(f"{newest.name} of {run}" for run, newest in found.items())
        raise UserError(f"{directory} holds checkpoints of several runs ({listed}): move those of all but one away")
    return known.id if known is not None else next(iter(found), None)


@contextmanager
def hold(folder: Path, key: str) -> Iterator[None]:
    """Lock `folder` (of the config key `key`) for this process; a UserError if it cannot be written or is in use.

    The lock goes when the process does, however that ends. What is made here and not used is removed at the end.
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
        with suppress(OSError):  # the disk may be gone by now
            path.unlink(missing_ok=True)
        os.close(lock)
        _remove(made)


def _remove(made: list[Path]) -> None:
    for place in made:
        with suppress(OSError):  # in use
            place.rmdir()


def _lock(path: Path, key: str) -> int:
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            # A record lock, not flock: loader workers do not inherit it, so it ends with this process and not with
            # theirs, a second later. Both work between the hosts of a network file system.
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(lock, path):
                break  # else the run that held it has just ended, and removed it
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
    """Where the file system has no locks: what the file says. Of another host nothing can be known."""
    if holder is None:
        return False
    if holder.get("host") != socket.gethostname():
        return True
    try:
        return psutil.Process(int(str(holder["pid"]))).create_time() == holder.get("started")
    except (psutil.Error, KeyError, ValueError):
        return False


def check_space(directory: Path, needed: int, held: int, saves: int, keep: int) -> None:
    """Refuse to start where not even one checkpoint of `needed` bytes fits; warn if not all of them will.

    `held` of them are there already; at most `keep` and the one that is being written are there at a time.
    """
    place = next(place for place in (directory, *directory.absolute().parents) if place.exists())
    free = shutil.disk_usage(place).free
    if free < needed:
        raise UserError(
            f"checkpoint.dir: {directory} has {free / 1e9:.2f} GB free, a checkpoint of this run takes about "
            f"{needed / 1e9:.2f} GB (weights and the optimizer's state): make room, or name another folder"
        )
    more = min(saves, keep + 1 - min(held, keep))
    if free < more * needed:
        logger.warning(
            "checkpoint.dir: %s has %.2f GB free, the checkpoints to come take about %.2f GB (checkpoint.keep: %d)",
            *(directory, free / 1e9, more * needed / 1e9, keep),
        )
