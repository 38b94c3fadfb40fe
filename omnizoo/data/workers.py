"""Loader workers: processes beside a rank that read ahead.

They are forked from a small server process that has imported what they need and does nothing else. A fork of the
rank itself would copy the locks of its threads (of kernels, of process groups, of tokenizers, of Arrow), but not the
threads: once in a while such a worker crashed or hung.
"""

import faulthandler
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

MOST_WORKERS, CORES_PER_WORKER = 4, 4  # of a rank, where nobody has said how many
IMPORTED = ["omnizoo.data.loader", "tokenizers"]
QUIET = "ignore:resource_tracker"
LIGHTER = "use fewer data.workers, or a smaller data.prefetch, data.look_ahead or data.pack_tokens"


class WorkerDeath(RuntimeError):  # noqa: N818 (what it is about)
    """A loader worker is gone; the message is for users."""


def worker_count(asked: int | None) -> int:
    """Loader processes of a rank, where nobody has said how many: enough to stay ahead of most models, and none where
    they would take the cores that compute, or where Python lets this process have none."""
    if asked is not None:
        return asked
    if multiprocessing.current_process().daemon:
        return 0
    cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return min(MOST_WORKERS, cores // CORES_PER_WORKER)


def start_server() -> None:
    """Start the process that workers are forked from. It needs seconds to import torch, while this one goes on."""
    multiprocessing.set_forkserver_preload(IMPORTED)
    # First Python's process that frees what a killed rank leaves: starting it unblocks signals. It would warn of each.
    sys.warnoptions.append(QUIET)
    try:
        resource_tracker.ensure_running()
    finally:
        sys.warnoptions.remove(QUIET)
    # Schedulers send SIGTERM to all processes of a job: the rank saves then, and needs its workers up to the last step.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


class Workers(ForkServerContext):
    """How torch's DataLoader starts processes. Those it has started can be asked for the way they ended."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[ForkServerProcess] = []

    def Process(self, *args: Any, **options: Any) -> ForkServerProcess:  # type: ignore[override]  # noqa: N802
        start_server()
        process = _Process(*args, **options)
        self.started.append(process)
        return process

    def death(self) -> WorkerDeath | None:
        """How the first one that is gone has ended."""
        codes = [process.exitcode for process in self.started if process.exitcode]
        return WorkerDeath(told(codes[0])) if codes else None


class _Process(ForkServerProcess):
    @staticmethod
    def _Popen(process: Any) -> Any:  # noqa: N802
        with _main_left_out():
            return ForkServerProcess._Popen(process)


@contextmanager
def _main_left_out() -> Iterator[None]:
    """Python lets new processes import the script that was started, under another name: one without
    `if __name__ == "__main__"` would train again in every worker. Without a name and a file, it is left out."""
    main = sys.modules["__main__"]
    said: dict[str, Any] = vars(main)
    kept: dict[str, Any] = {name: said[name] for name in ("__spec__", "__file__") if name in said}
    said["__spec__"] = None
    said.pop("__file__", None)
    try:
        yield
    finally:
        said.update(kept)


@dataclass(frozen=True)
class Surroundings:
    """What a worker takes over from its rank, besides its work."""

    environment: Mapping[str, str]
    dtype: torch.dtype
    log_level: int
    transformers_level: int

    @classmethod
    def here(cls) -> "Surroundings":
        levels = logging.getLogger().getEffectiveLevel(), transformers_logging.get_verbosity()
        return cls(dict(os.environ), torch.get_default_dtype(), *levels)

    def start(self, worker: int) -> None:
        """In the worker. Interrupts are the training loop's to handle; it ends when its loader or its rank does."""
        # A worker that crashes in native code says where; `sys.stderr` of notebooks is no file.
        faulthandler.enable(2)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_watch, daemon=True).start()
        os.environ.clear()
        os.environ.update(self.environment)
        torch.set_default_dtype(self.dtype)
        logging.basicConfig(level=self.log_level, format="%(levelname)s: %(message)s")
        transformers_logging.set_verbosity(self.transformers_level)


def _watch() -> None:
    # Python ends the workers of an exiting process by SIGTERM, so that one must be obeyed. A killed process sends
    # none, and what torch watches is the server, which lives for as long as a worker does.
    rank = multiprocessing.parent_process()
    assert rank is not None, "a worker was started by its rank"
    while rank.is_alive():
        received = signal.sigtimedwait({signal.SIGTERM}, 1)
        if received is not None and received.si_pid == rank.pid:
            break
    os._exit(0)


def told(code: int) -> str:
    """How a worker ended, by its exit code."""
    if code == -signal.SIGKILL:
        return f"a loader worker was killed (SIGKILL), as the kernel does when memory runs out; {LIGHTER}"
    if code == -signal.SIGBUS:
        return f"a loader worker was out of shared memory (SIGBUS); make /dev/shm larger, or {LIGHTER}"
    how = f"was killed by a signal ({signal.strsignal(-code)})" if code < 0 else "ended"
    return f"a loader worker {how} without a word; data.workers: 0 shows where, and if memory ran out, {LIGHTER}"
