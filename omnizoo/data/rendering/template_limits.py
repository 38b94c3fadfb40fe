"""Limits on the time and memory of chat templates, because templates are untrusted programs.

The sandbox of transformers denies templates access to files and processes. It does not prevent endless loops, or texts
that double in size with every line.
"""

import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import FrameType
from typing import Any

from torch.utils.data import get_worker_info

CHECK_INTERVAL = 0.2  # seconds between two checks of the CPU time
PROCESS_SIZE = Path("/proc/self/statm")  # contains the size of this process; exists on Linux only
_limits_memory = ContextVar("limits_memory", default=False)  # whether `memory_limits` is active


class OutOfTime(BaseException):
    """Raised if a template exceeds the time limit.

    It is not a subclass of `Exception`, because jinja2 suppresses all of its subclasses while it evaluates constants.
    """


@contextmanager
def limits(seconds: float, memory: int) -> Iterator[None]:
    """Context manager: raise `OutOfTime` or `MemoryError` if the code in the block exceeds a limit.

    The time limit applies only in the main thread, because only that thread receives signals. The memory limit applies
    only in loader workers and inside `memory_limits()`. It affects the whole process, so other threads of a training
    process could fail because of it.

    Args:
        seconds: Maximum CPU time. Unlike wall-clock time, it does not depend on the load of the machine.
        memory: Maximum number of bytes by which the process may grow. It has no effect on systems other than Linux.
    """
    with ExitStack() as stack:
        if threading.current_thread() is threading.main_thread():
            stack.enter_context(_time_limit(seconds))
        if (get_worker_info() is not None or _limits_memory.get()) and PROCESS_SIZE.exists():
            stack.enter_context(_memory_limit(memory))
        yield


@contextmanager
def memory_limits() -> Iterator[None]:
    """Context manager: `limits` also limits memory in the block. Use it in commands that do not train."""
    token = _limits_memory.set(True)
    try:
        yield
    finally:
        _limits_memory.reset(token)


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Context manager: raise `OutOfTime` if the block uses more than `seconds` of CPU time.

    A timer sends signals, because signals interrupt even a single long operation. The timer counts wall-clock time,
    and its handler checks the CPU time, because timers of CPU time may stop in virtual machines. A timer that was
    active before the block is restored afterwards.
    """
    end = time.thread_time() + seconds

    def check(number: int, frame: FrameType | None) -> None:
        if time.thread_time() > end:
            raise OutOfTime

    def report_unraisable(lost: Any) -> None:
        if lost.exc_type is not OutOfTime:
            previous_hook(lost)

    previous_handler = signal.signal(signal.SIGALRM, check)
    previous_hook = sys.unraisablehook
    sys.unraisablehook = report_unraisable
    blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    start = time.monotonic()
    # The timer repeats, because Python discards an error that the handler raises while a finalizer runs.
    remaining, interval = signal.setitimer(signal.ITIMER_REAL, seconds, CHECK_INTERVAL)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        signal.signal(signal.SIGALRM, previous_handler)
        sys.unraisablehook = previous_hook
        if remaining:
            signal.setitimer(signal.ITIMER_REAL, max(remaining - (time.monotonic() - start), 1e-6), interval)


@contextmanager
def _memory_limit(memory: int) -> Iterator[None]:
    """Context manager: limit the address space of this process to its current size plus `memory` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = int(PROCESS_SIZE.read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE") + memory
    if soft != resource.RLIM_INFINITY:
        limit = min(limit, soft)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
