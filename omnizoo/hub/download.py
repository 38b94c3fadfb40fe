"""Download files of a repository to the cache of huggingface_hub, and check their hashes.

huggingface_hub downloads single files, and checks only their sizes. This module adds two things: only one process on a
machine downloads a repository, while the others wait for it; and the hash of each new file is compared with the one
that the hub lists. A damaged file is removed.
"""

import fcntl
import hashlib
import queue
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2
from huggingface_hub import constants, get_session, hf_hub_download
from huggingface_hub.utils.tqdm import tqdm
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from omnizoo.config.errors import UserError
from omnizoo.config.hub import repository_folder
from omnizoo.hub.errors import (
    BROKEN,
    HUB_ERRORS,
    check_free_space,
    download_command,
    is_unreachable,
    readable_size,
    unreachable_reason,
    user_error,
)
from omnizoo.hub.repository import HubFile, Repository, record_folder, verified_files, write_record

NUM_THREADS = 8  # maximum number of files that are downloaded at the same time
OLD_PARTIAL = 3600.0  # an incomplete file that has not changed for this number of seconds belongs to a killed process
CHUNK = 2**20  # number of bytes that are hashed at a time


class Interrupted(Exception):  # noqa: N818 - it only ends threads and is never shown
    """Raised in download threads after Ctrl-C."""


class NotReachedError(Exception):
    """Raised if the hub cannot be reached."""


def fetch(repository: Repository, names: Sequence[str], key: str, shows_progress: bool = True) -> None:
    """Download files that are not in the cache, and check their hashes.

    Args:
        repository: The repository.
        names: Paths of the files in the repository.
        key: Config key of the repository, for error messages.
        shows_progress: Whether to show a progress bar (or, if the output is not a terminal, one line of text).

    Raises:
        UserError: If a file cannot be downloaded or is damaged, or if the disk is too small.
    """
    if _is_done(repository, names):
        return
    with _only_process(repository, key):
        if not _is_done(repository, names):  # another process may have downloaded them meanwhile
            _fetch(repository, names, key, shows_progress)


def _is_done(repository: Repository, names: Sequence[str]) -> bool:
    """Whether all files are in the cache, and all hashes that are known have been checked."""
    if repository.absent(names):
        return False
    verified = verified_files(repository.name, repository.repo_type)
    return not any(_has_hash(repository.files[name]) for name in names if name not in verified)


def _has_hash(file: HubFile) -> bool:
    """Whether the hash of a file is known."""
    return bool(file.sha256 or file.blob)


def _fetch(repository: Repository, names: Sequence[str], key: str, shows_progress: bool) -> None:
    """Download the missing files, and check all hashes that have not been checked. The caller must hold the lock."""
    absent = repository.absent(names)
    if absent and (constants.is_offline_mode() or not repository.is_complete):
        raise _incomplete(repository, names, key)
    if absent:
        try:
            _download(repository, absent, key, shows_progress)
        except NotReachedError as error:
            raise _incomplete(repository, names, key) from error
    verified = verified_files(repository.name, repository.repo_type)
    for name in names:
        if name not in verified:
            _check_hash(repository, name, key)
    write_record(repository, verified | set(names))


def _incomplete(repository: Repository, names: Sequence[str], key: str) -> UserError:
    """Return the error for files that are not in the cache and cannot be downloaded."""
    name = repository.name
    absent = repository.absent(names)
    return UserError(
        f"{key}: {name.shown}: the cache has {len(names) - len(absent)} of {len(names)} files and lacks "
        f"{', '.join(absent[:3])}, and {unreachable_reason()}. {download_command(name, repository.repo_type)}."
    )


def _download(repository: Repository, names: Sequence[str], key: str, shows_progress: bool) -> None:
    """Download files in parallel, with one progress bar for all of them.

    Raises:
        NotReachedError: If the hub cannot be reached.
        UserError: If the download fails for another reason.
    """
    size = sum(repository.files[name].size for name in names)
    folder = repository_folder(repository.name, repository.repo_type)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_old_partials(folder)
        check_free_space(size, folder, repository.name, key)
        _check_connection()
        stopped = threading.Event()
        commit = str(repository.name.commit)[:7]
        files = "1 file" if len(names) == 1 else f"{len(names)} files"
        title = f"downloading {repository.name.address}@{commit}: {files}, {readable_size(size)}"
        with _progress(title if shows_progress else None, size, stopped) as bar:
            _download_all(repository, names, bar, stopped)
    except HUB_ERRORS as error:
        if is_unreachable(error) and not isinstance(error, BROKEN):
            raise NotReachedError from error
        raise user_error(error, repository.name, repository.repo_type, key) from error


def _check_connection() -> None:
    """Check that the hub can be reached. Without this check, a download would retry for 24 seconds before it fails.

    Raises:
        NotReachedError: If the hub cannot be reached.
    """
    try:
        get_session().head(constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
        raise NotReachedError from error
    except httpx2.HTTPError:
        return  # the download will report the problem


def _download_all(repository: Repository, names: Sequence[str], bar: type[tqdm], stopped: threading.Event) -> None:
    """Download files in threads, and raise the first error.

    After an error, downloads that have begun are completed, because huggingface_hub would discard incomplete files.
    After Ctrl-C, each thread ends when it receives its next chunk. The threads are daemons, unlike those of
    `concurrent.futures`, so the process can exit before they end.

    Args:
        repository: The repository.
        names: Paths of the files.
        bar: The class of the progress bar.
        stopped: Set this event to end the threads.
    """
    name = repository.name
    waiting = queue.SimpleQueue[str]()
    for filename in names:
        waiting.put(filename)
    errors: list[BaseException] = []

    def work() -> None:
        """Download files until none is waiting."""
        with suppress(queue.Empty):
            while not errors and not stopped.is_set():
                filename = waiting.get_nowait()
                try:
                    hf_hub_download(
                        name.repo, filename, repo_type=repository.repo_type, revision=name.commit, tqdm_class=bar
                    )
                except Exception as error:  # noqa: BLE001 - the calling thread raises it
                    errors.append(error)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(NUM_THREADS, len(names)))]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        stopped.set()
    if errors:
        raise errors[0]


@contextmanager
def _progress(title: str | None, size: int, stopped: threading.Event) -> Iterator[type[tqdm]]:
    """Context manager: show the progress of a download, as a bar on a terminal and as one line elsewhere.

    Args:
        title: Title of the progress bar; None to show nothing.
        size: Total number of bytes.
        stopped: An event that ends the download.

    Yields:
        A class with the interface of `tqdm`. It adds downloaded bytes to the progress bar. It raises `Interrupted`
        if `stopped` is set.
    """
    console = Console(stderr=True)
    has_bar = console.is_terminal and title is not None
    if title is not None and not has_bar:
        print(title, file=sys.stderr, flush=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not has_bar) as progress:
        task = progress.add_task(title or "", total=size)

        class ByteCounter(tqdm):
            """Adds the bytes of one file to the progress bar of all files."""

            def __init__(self, *args: Any, initial: int = 0, **kwargs: Any) -> None:
                super().__init__(disable=True)  # type: ignore[no-untyped-call]
                progress.advance(task, initial)

            def update(self, n: float | None = 1) -> None:
                """Add `n` downloaded bytes to the progress bar."""
                if stopped.is_set():
                    raise Interrupted
                progress.advance(task, n or 0)

        yield ByteCounter


@contextmanager
def _only_process(repository: Repository, key: str) -> Iterator[None]:
    """Context manager: hold the lock of a repository. If another process holds it, print a message and wait.

    If there can be no lock (in a read-only cache, or on a file system without locks), several processes may download
    the same files. Each file is still complete, because huggingface_hub renames it when its download ends.
    """
    try:
        path = record_folder(repository.name, repository.repo_type) / "lock"
        file = open(path, "w")  # noqa: SIM115 - the `with` statement below closes it
    except OSError:
        yield
        return
    with file:
        with suppress(OSError):
            _wait_for_lock(file, repository, key)
        yield


def _wait_for_lock(file: Any, repository: Repository, key: str) -> None:
    """Acquire a file lock. If another process holds it, print a message first."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(
            f"{key}: {repository.name.shown}: another process is downloading it; waiting", file=sys.stderr, flush=True
        )
        fcntl.flock(file, fcntl.LOCK_EX)


def _remove_old_partials(folder: Path) -> None:
    """Remove the incomplete files of killed processes, because huggingface_hub neither resumes nor removes them."""
    for path in folder.glob("blobs/*.incomplete"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > OLD_PARTIAL:
                path.unlink()


def _check_hash(repository: Repository, name: str, key: str) -> None:
    """Compare the hash of a file with the hash that the hub lists. A damaged file is removed from the cache.

    Args:
        repository: The repository.
        name: Path of the file in the repository.
        key: Config key of the repository, for the error message.

    Raises:
        UserError: If the file is damaged.
    """
    file = repository.files[name]
    path = repository.folder / name
    try:
        if not _has_hash(file) or hash_of(path, file) == (file.sha256 or file.blob):
            return
        path.resolve().unlink(missing_ok=True)
        path.unlink(missing_ok=True)
    except OSError as error:
        raise user_error(error, repository.name, repository.repo_type, key) from error
    raise UserError(
        f"{key}: {repository.name.shown}: {name} was damaged during the download: its hash differs from that on the "
        "hub. The file was removed. Run again to download it."
    )


def hash_of(path: Path, file: HubFile) -> str:
    """Return the hash of a file in the same form as on the hub: sha256 for large files, otherwise the git hash."""
    if file.sha256:
        digest = hashlib.sha256()
    else:
        digest = hashlib.sha1(f"blob {path.stat().st_size}\0".encode(), usedforsecurity=False)
    with open(path, "rb", buffering=0) as stream:
        while chunk := stream.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
