"""The host's allocator, told to keep the memory that a step frees for the next one."""

import ctypes
import os
import sys

# Of glibc's malloc.h: what is freed at the top of the heap goes back to the system beyond this, and what is larger than
# this is asked of the system each time.
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
NEVER, LARGE = -1, 2**30
SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Let this process keep what it frees. Every tensor of some MB would otherwise be new memory of the system, which
    clears it page by page: a seventh of a step on a CPU (docs/LOG.md). Returns whether it could be told so: glibc can,
    and users who have set it up already know better."""
    if not sys.platform.startswith("linux") or any(name in os.environ for name in SETTINGS):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    return mallopt is not None and bool(mallopt(TRIM_THRESHOLD, NEVER)) and bool(mallopt(MMAP_THRESHOLD, LARGE))
