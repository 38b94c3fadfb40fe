"""End a process when its parent ends for any reason, so that no process outlives a run.

On Linux, the kernel kills the process. This works even if the process is stopped or waits in native code. Elsewhere, a
thread looks for a new parent once a second.
"""

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

PR_SET_PDEATHSIG = 1  # option of prctl: signal for this process when the thread that started it ends
SERVER_PARENT = "OMNIZOO_SERVER_PARENT"  # process id of the parent of a fork server
TORCHRUN = "TORCHELASTIC_RUN_ID"  # set by torchrun
IS_LINUX = sys.platform.startswith("linux")
POLL_SECONDS = 1.0


def death_signal() -> Callable[[int], None]:
    """Return a function that a new process calls, with the id of its parent, to be killed when its parent ends.

    All libraries are loaded here, so the function may be called between fork and exec. The parent must start the
    process in a thread that lasts as long as the parent, because Linux sends the signal when this thread ends.
    """
    if not IS_LINUX:
        return _watch_parent
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def set_death_signal(parent: int) -> None:
        prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:  # the parent ended before the call
            os._exit(1)

    return set_death_signal


def end_with_torchrun() -> None:
    """Kill this process when torchrun ends, if torchrun has started it."""
    if TORCHRUN in os.environ:
        death_signal()(os.getppid())  # the thread of torchrun that starts the ranks also waits for them


def _watch_parent(parent: int) -> None:
    """Start a thread that ends this process when its parent has ended."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(POLL_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="watch-parent", daemon=True).start()


def set_server_imports(modules: Sequence[str]) -> None:
    """Set the modules that multiprocessing's fork server imports before it forks its first process.

    The server ends when this process ends, and the processes forked from it end with the server.
    """
    os.environ[SERVER_PARENT] = str(os.getpid())
    multiprocessing.set_forkserver_preload(["omnizoo.parallel.tied_server", *modules])


def tie_server() -> None:
    """Make this fork server end with its parent, and make the processes that it forks end with the server."""
    parent = os.environ.get(SERVER_PARENT)
    if parent is None:
        return
    set_death_signal = death_signal()
    set_death_signal(int(parent))
    server = os.getpid()

    def tie_child() -> None:
        if os.getppid() == server:  # forked processes inherit the hook, but their children may outlive them
            set_death_signal(server)

    os.register_at_fork(after_in_child=tie_child)


def in_lasting_thread(work: Callable[[], None]) -> None:
    """Run `work` in a thread that lasts as long as this process. `work` may start processes."""
    if threading.current_thread() is threading.main_thread():
        work()
        return
    result: Future[None] = Future()

    def run() -> None:
        try:
            work()
            result.set_result(None)
        except BaseException as error:  # noqa: BLE001 (raised by `result`)
            result.set_exception(error)
        threading.Event().wait()  # forever

    threading.Thread(target=run, name="parent-of-processes", daemon=True).start()
    result.result()
