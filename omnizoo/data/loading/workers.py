"""Loader workers: processes of a rank that prefetch data.

Workers are forked from a small server process that has imported the required modules and does nothing else. They are
not forked from the rank, because such workers occasionally crashed or hung: a fork copies the locks that threads of
kernels, process groups, tokenizers and Arrow hold, but not the threads that would release them.
"""

import faulthandler
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from omnizoo.parallel.parent_death import in_lasting_thread, set_server_imports
from omnizoo.parallel.rendezvous import ranks_on_node

MAX_WORKERS = 4  # maximum number of workers per rank if data.workers is not set
CORES_PER_WORKER = 4  # number of CPU cores for each worker if data.workers is not set
IMPORTED = ["omnizoo.data.loading.loader", "tokenizers"]  # modules that the server imports
FILES_PER_WORKER = 16  # number of files that a rank opens for each worker: pipes, and tensors that it receives
SECONDS_TO_END = 0.5  # seconds between SIGTERM and SIGKILL when workers are ended
QUIET = "ignore:resource_tracker"  # Python's option to hide the warnings of the resource tracker
LESS_MEMORY = "reduce data.workers, data.prefetch, data.look_ahead or data.pack_tokens"


class WorkerDeath(RuntimeError):  # noqa: N818 (named after the event)
    """A loader worker has died. The message is written for users."""


def worker_count(setting: int | None) -> int:
    """Return the number of loader workers of a rank: `data.workers` if it is set, otherwise a default.

    The default loads data faster than most models train. It is 0 if a rank has few CPU cores, because the model may
    need them, and in daemon processes, because Python does not allow them to start processes.
    """
    if setting is not None:
        return setting
    if multiprocessing.current_process().daemon:
        return 0
    cores = len(os.sched_getaffinity(0))
    # srun usually gives each task separate cores. Other launchers let all ranks of a node use all cores of the node.
    has_own_cores = "LOCAL_WORLD_SIZE" not in os.environ and cores < (os.cpu_count() or 1)
    if not has_own_cores:
        cores //= ranks_on_node()
    return min(MAX_WORKERS, cores // CORES_PER_WORKER)


def start_server() -> None:
    """Start the server process that workers are forked from.

    The server imports torch in the background, because the import takes a few seconds. The server and its workers are
    killed when this process ends.
    """
    set_server_imports(IMPORTED)
    in_lasting_thread(_start_server)


def _start_server() -> None:
    """Start Python's resource tracker, and then the server with SIGTERM blocked."""
    # The resource tracker frees the resources that a killed rank leaves. It must start first, because starting it
    # unblocks signals. QUIET turns off its warnings about these resources.
    sys.warnoptions.append(QUIET)
    try:
        resource_tracker.ensure_running()
    finally:
        sys.warnoptions.remove(QUIET)
    # Schedulers send SIGTERM to all processes of a job. The rank then saves a checkpoint and needs its workers until
    # the last step, so the signal must not end them.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


class Workers(ForkServerContext):
    """Multiprocessing context for DataLoader. It records its processes, so that it can report how they ended."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[ForkServerProcess] = []
        # The finalizer also runs when Python exits. Python then waits for child processes, but a worker that is stopped
        # (SIGSTOP) would never end.
        self.end = weakref.finalize(self, end_processes, self.started, os.getpid())

    def Process(self, *args: Any, **options: Any) -> ForkServerProcess:  # type: ignore[override]  # noqa: N802
        """Return a new worker process. It is not started yet."""
        start_server()
        process = _Process(*args, **options)
        self.started.append(process)
        return process

    def check_resources(self, num_workers: int) -> None:
        """Check that the system allows enough semaphores and open files for this number of workers.

        Without this check, torch would fail in the middle of starting workers, and its incomplete objects would print
        further errors.

        Raises:
            OSError: If the system allows too few of them.
        """
        queues = []
        with ExitStack() as files:
            for _ in range(num_workers + 2):  # torch creates a queue for each worker, one for results, and an event
                queues.append(self.Queue())
            for _ in range(FILES_PER_WORKER * num_workers):
                files.enter_context(open(os.devnull, "rb"))

    def death(self) -> WorkerDeath | None:
        """Return an error for the first worker that ended with a nonzero exit code; None if there is none."""
        codes = [process.exitcode for process in self.started if process.exitcode]
        return WorkerDeath(exit_message(codes[0])) if codes else None


def end_processes(processes: Sequence[ForkServerProcess], parent: int) -> None:
    """End worker processes with SIGTERM. Those that have not ended after `SECONDS_TO_END` are killed.

    Args:
        processes: The workers.
        parent: Id of the process that started them.
    """
    if os.getpid() != parent:
        return  # this process is a fork of the one that started the workers
    alive = [process for process in processes if process.is_alive()]
    try:
        for process in alive:
            process.terminate()
        until = time.monotonic() + SECONDS_TO_END
        while alive and wait([process.sentinel for process in alive], max(0.0, until - time.monotonic())):
            alive = [process for process in alive if process.is_alive()]
    finally:  # also if a second Ctrl-C interrupts the wait; otherwise, Python would wait for a stopped worker forever
        for process in alive:
            process.kill()


class _Process(ForkServerProcess):
    """A worker process that does not import the main script."""

    @staticmethod
    def _Popen(process: Any) -> Any:  # noqa: N802
        """Start a worker process without importing the main script."""
        with _without_main():
            return ForkServerProcess._Popen(process)


@contextmanager
def _without_main() -> Iterator[None]:
    """Context manager: processes that start in the block do not import the main script.

    Usually, Python imports the main script in every new process, under another name. A script without
    `if __name__ == "__main__"` would then train again in every worker. Python skips this import if the main module has
    neither `__spec__` nor `__file__`, so the block removes them for a moment.
    """
    main: dict[str, Any] = vars(sys.modules["__main__"])
    previous: dict[str, Any] = {name: main[name] for name in ("__spec__", "__file__") if name in main}
    main["__spec__"] = None
    main.pop("__file__", None)
    try:
        yield
    finally:
        main.update(previous)


def worker_setup() -> Callable[[int], None]:
    """Return the function that a worker calls first. It applies the environment and the settings of this rank."""
    log_level = logging.getLogger().getEffectiveLevel()
    transformers_level = transformers_logging.get_verbosity()
    return partial(_set_up, dict(os.environ), torch.get_default_dtype(), log_level, transformers_level)


def _set_up(
    environment: Mapping[str, str], dtype: torch.dtype, log_level: int, transformers_level: int, worker: int
) -> None:
    """Set up this worker process.

    The worker ignores SIGINT (Ctrl+C), which the training loop handles. It ends when its loader or its rank ends.
    """
    # Print a traceback if native code crashes. Use file descriptor 2, because `sys.stderr` has no descriptor in
    # notebooks.
    faulthandler.enable(2)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_watch, daemon=True).start()
    os.environ.clear()
    os.environ.update(environment)
    torch.set_default_dtype(dtype)
    logging.basicConfig(level=log_level, format="%(levelname)s: %(message)s")
    transformers_logging.set_verbosity(transformers_level)


def _watch() -> None:
    """End this worker when its rank has ended, or when the rank sends SIGTERM."""
    # A Python process that exits sends SIGTERM to its children, so a SIGTERM from the rank must end this worker. A
    # killed rank sends no signal, so this thread also checks whether the rank is alive. torch's own watchdog does not
    # help: it watches the parent of the worker. The parent is the server, and the server runs as long as any worker.
    rank = multiprocessing.parent_process()
    assert rank is not None, "a worker was started by its rank"
    while rank.is_alive():
        received = signal.sigtimedwait({signal.SIGTERM}, 1)
        if received is not None and received.si_pid == rank.pid:
            break
    os._exit(0)


def exit_message(code: int) -> str:
    """Return the error message for a loader worker that ended with this exit code."""
    if code == -signal.SIGKILL:
        return (
            "data.workers: a loader worker was killed (SIGKILL), as the kernel does when memory runs out. To use less "
            f"memory, {LESS_MEMORY}."
        )
    if code == -signal.SIGBUS:
        return (
            "data.workers: a loader worker ran out of shared memory (SIGBUS). Make /dev/shm larger; or, to use less "
            f"memory, {LESS_MEMORY}."
        )
    end = f"was killed by a signal ({signal.strsignal(-code)})" if code < 0 else f"ended with exit code {code}"
    return (
        f"data.workers: a loader worker {end}. Set data.workers to 0 to see the error in the main process. If memory "
        f"ran out, {LESS_MEMORY}."
    )
