"""Bounds on code that comes with data: how long it may compute, and how much memory it may take.

Chat templates are programs. The sandbox they run in keeps them from files and processes, but not from loops without end
or from texts that double with every line.
"""

import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from torch.utils.data import get_worker_info

EVERY = 1000  # lines between two looks at the clock, in threads
LOOKS = 0.2  # seconds between two of them, in the main thread
IDLE = ("concurrent.futures.thread", "_worker")  # where a thread of an executor waits; seen in Python 3.11


class OutOfTime(BaseException):
    """No `Exception`: jinja2 swallows those while it folds constants, and may fail while it reports others."""


@contextmanager
def limits(seconds: float, memory: int) -> Iterator[None]:
    """Raises `OutOfTime`, or MemoryError, in what runs inside. `seconds` are of the processor: what a busy machine
    makes slow is not refused.
    """
    with ExitStack() as stack:
        in_main = threading.current_thread() is threading.main_thread()
        stack.enter_context(_alarm(seconds) if in_main else _watched(seconds))
        if get_worker_info() is not None or not _has_busy_threads():
            stack.enter_context(_memory(memory))
        yield


def _has_busy_threads() -> bool:
    """The limit of memory is the whole process's: it could fail another thread that does real work, like one that
    writes a checkpoint. Daemon threads draw a progress line or watch a parent, those of a pool may wait for work.
    """
    own = (threading.current_thread(), threading.main_thread())
    frames = sys._current_frames()
    others = (thread for thread in threading.enumerate() if thread not in own and not thread.daemon)
    return any(not _waits_for_work(frames.get(thread.ident or 0)) for thread in others)


def _waits_for_work(frame: FrameType | None) -> bool:
    """Whether a thread of an executor is in its loop, and not in what it was given. Compilers keep such threads."""
    return frame is not None and (frame.f_globals.get("__name__"), frame.f_code.co_name) == IDLE


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """By a signal: costs nothing, and stops long arithmetic too. Only the main thread gets signals.

    The timer is one of real time whose handler looks at the clock of the processor: timers of processor time stand
    still where a host takes time from its virtual machine. An alarm that somebody else has set rings afterwards.
    """
    end = time.thread_time() + seconds

    def look(number: int, frame: FrameType | None) -> None:
        if time.thread_time() > end:
            raise OutOfTime

    def report(lost: Any) -> None:
        if lost.exc_type is not OutOfTime:
            unraisable(lost)

    handler, unraisable = signal.signal(signal.SIGALRM, look), sys.unraisablehook
    sys.unraisablehook = report
    blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    # again and again: what is raised inside of a finalizer, or of a callback of the garbage collector, is lost
    started, (left, interval) = time.monotonic(), signal.setitimer(signal.ITIMER_REAL, seconds, LOOKS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        signal.signal(signal.SIGALRM, handler)
        sys.unraisablehook = unraisable
        if left:
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - started), 1e-6), interval)


@contextmanager
def _watched(seconds: float) -> Iterator[None]:
    """By a look at the clock every so many lines of what is called inside; makes Python several times slower."""
    end, lines, before = time.thread_time() + seconds, 0, sys.gettrace()

    def look(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal lines
        lines += 1
        if lines % EVERY == 0 and time.thread_time() > end:
            raise OutOfTime
        return look

    sys.settrace(look)
    try:
        yield
    finally:
        sys.settrace(before)


@contextmanager
def _memory(most: int) -> Iterator[None]:
    """So many bytes more than the process has now; where the system does not tell (not Linux), no bound."""
    sizes = Path("/proc/self/statm")
    if not sizes.exists():
        yield
        return
    before, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = int(sizes.read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE") + most
    if before != resource.RLIM_INFINITY:
        limit = min(limit, before)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (before, hard))
