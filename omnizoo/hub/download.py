"""Download files of a repository into the cache of huggingface_hub, once per machine, and check their hashes.

huggingface_hub resumes, retries and locks single files, but compares only their sizes. Here, one process at a time
downloads a repository, while others wait for a lock and then find the files. Each new file is compared with the hash
that the hub lists, and a damaged one is removed.
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

NUM_THREADS = 8  # files that are downloaded at the same time
OLD_PARTIAL = 3600.0  # seconds without a change after which an incomplete file is left over from a killed process
CHUNK = 2**20  # bytes


class Interrupted(Exception):  # noqa: N818 - raised in threads to end them, never shown
    """The download was stopped by Ctrl-C."""


class NotReachedError(Exception):
    """The hub could not be reached."""


def fetch(repository: Repository, names: Sequence[str], key: str, shows_progress: bool = True) -> None:
    """Download the files `names` unless they are in the cache, and check the hashes of those that are new.

    Args:
        repository: The repository.
        names: Paths of files in the repository.
        key: Config key of the repository, for messages.
        shows_progress: Whether to show a progress bar, or one line without a terminal.

    Raises:
        UserError: If a file cannot be downloaded or is damaged, or if the disk is too small.
    """
    if _is_done(repository, names):
        return
    with _only_process(repository, key):
        if not _is_done(repository, names):  # another process may have downloaded them meanwhile
            _fetch(repository, names, key, shows_progress)


def _is_done(repository: Repository, names: Sequence[str]) -> bool:
    """Whether all files are in the cache, with checked hashes if their hashes are known."""
    if repository.absent(names):
        return False
    verified = verified_files(repository.name, repository.repo_type)
    return not any(_has_hash(repository.files[name]) for name in names if name not in verified)


def _has_hash(file: HubFile) -> bool:
    return bool(file.sha256 or file.blob)


def _fetch(repository: Repository, names: Sequence[str], key: str, shows_progress: bool) -> None:
    """Download and check files. The caller holds the lock."""
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
    """Return the error for files that are missing in the cache and cannot be downloaded."""
    name = repository.name
    absent = repository.absent(names)
    return UserError(
        f"{key}: {name.shown}: the cache has {len(names) - len(absent)} of {len(names)} files and lacks "
        f"{', '.join(absent[:3])}, and {unreachable_reason()}. {download_command(name, repository.repo_type)}."
    )


def _download(repository: Repository, names: Sequence[str], key: str, shows_progress: bool) -> None:
    """Download files in parallel, with one progress bar."""
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
    """Raise an error if the hub cannot be reached. A download would retry for 24 seconds before it gives up."""
    try:
        get_session().head(constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
        raise NotReachedError from error
    except httpx2.HTTPError:
        return  # the download reports what is wrong


def _download_all(repository: Repository, names: Sequence[str], bar: type[tqdm], stopped: threading.Event) -> None:
    """Download files in threads, and raise the first error.

    After an error, files that have begun are completed, because huggingface_hub would discard their parts. After
    Ctrl-C, threads end at their next chunk. They are daemons, unlike those of `concurrent.futures`, so the process can
    end.
    """
    name = repository.name
    waiting = queue.SimpleQueue[str]()
    for filename in names:
        waiting.put(filename)
    errors: list[BaseException] = []

    def work() -> None:
        with suppress(queue.Empty):
            while not errors and not stopped.is_set():
                filename = waiting.get_nowait()
                try:
                    hf_hub_download(
                        name.repo, filename, repo_type=repository.repo_type, revision=name.commit, tqdm_class=bar
                    )
                except Exception as error:  # noqa: BLE001 - raised on the calling thread
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
    """Context manager: show a progress bar on a terminal, or one line elsewhere; nothing without a title.

    Yields:
        A class with the interface of `tqdm` that reports the downloaded bytes. It raises `Interrupted` after `stopped`.
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
            def __init__(self, *args: Any, initial: int = 0, **kwargs: Any) -> None:
                super().__init__(disable=True)  # type: ignore[no-untyped-call]
                progress.advance(task, initial)

            def update(self, n: float | None = 1) -> None:
                if stopped.is_set():
                    raise Interrupted
                progress.advance(task, n or 0)

        yield ByteCounter


@contextmanager
def _only_process(repository: Repository, key: str) -> Iterator[None]:
    """Context manager: hold the lock of a repository. Say once that another process holds it, and wait.

    Without a lock (read-only cache, file systems without locks), processes download at the same time. Each file is
    still complete, because huggingface_hub renames it at the end.
    """
    try:
        path = record_folder(repository.name, repository.repo_type) / "lock"
        file = open(path, "w")  # noqa: SIM115 - closed below
    except OSError:
        yield
        return
    with file:
        with suppress(OSError):
            _wait_for_lock(file, repository, key)
        yield


def _wait_for_lock(file: Any, repository: Repository, key: str) -> None:
    """Take a file lock, with a message if it is not free."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(
            f"{key}: {repository.name.shown}: another process is downloading it; waiting", file=sys.stderr, flush=True
        )
        fcntl.flock(file, fcntl.LOCK_EX)


def _remove_old_partials(folder: Path) -> None:
    """Remove incomplete files of killed processes. huggingface_hub neither resumes nor removes them."""
    for path in folder.glob("blobs/*.incomplete"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > OLD_PARTIAL:
                path.unlink()


def _check_hash(repository: Repository, name: str, key: str) -> None:
    """Compare a file with the hash that the hub lists. A damaged file is removed from the cache.

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
        f"{key}: {repository.name.shown}: {name} was damaged on the way: its hash differs from that on the "
        "hub. The file was removed. Run again to download it."
    )


def hash_of(path: Path, file: HubFile) -> str:
    """Return the sha256 of a large file, or the git hash of a small one."""
    if file.sha256:
        digest = hashlib.sha256()
    else:
        digest = hashlib.sha1(f"blob {path.stat().st_size}\0".encode(), usedforsecurity=False)
    with open(path, "rb", buffering=0) as stream:
        while chunk := stream.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
