"""Configure the host allocator so that memory freed in one step is reused in the next."""

import ctypes
import os
import sys

# Parameters of `mallopt` in glibc's malloc.h. TRIM_THRESHOLD: free memory at the top of the heap is returned to the
# system if it exceeds this size. MMAP_THRESHOLD: allocations of at least this size are mapped separately.
TRIM_THRESHOLD = -1
MMAP_THRESHOLD = -3
NEVER = -1
LARGE = 2**30
SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Configure malloc to keep freed memory in this process.

    By default, each tensor of several MB is mapped again in every step, and the system clears it page by page. This
    takes a seventh of a step on a CPU (docs/project/experiments.md).

    Returns:
        Whether the setting was changed. It is not changed if the C library is not glibc, or if the user has set one of
        `SETTINGS`.
    """
    if not sys.platform.startswith("linux") or any(name in os.environ for name in SETTINGS):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has no mallopt
    if mallopt is None:
        return False
    return bool(mallopt(TRIM_THRESHOLD, NEVER)) and bool(mallopt(MMAP_THRESHOLD, LARGE))
