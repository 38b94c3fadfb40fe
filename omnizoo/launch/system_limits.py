"""One-line messages about limits of the system that end a run: open files, shared memory and the locale."""

import errno
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import suppress

MAX_OPEN_FILES = 1 << 20
# Parts of error messages. The second one occurs if a process receives a file but cannot open another descriptor.
TOO_MANY_FILES = ("Too many open files", "items of ancillary data")
SHARED_MEMORY = ("unable to open shared memory object", "unable to allocate shared memory", "/dev/shm")


def raise_open_files() -> None:
    """Raise the limit on open files as far as the system allows, because loader workers send tensors as open files."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    with suppress(ValueError, OSError):  # the system may have a lower limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def explain_limit(error: BaseException) -> str | None:
    """Return a one-line message if `error` was caused by a limit of the system, otherwise None."""
    for cause in _chain(error):
        text = str(cause)
        number = cause.errno if isinstance(cause, OSError) else None
        if number in (errno.EMFILE, errno.ENFILE) or any(part in text for part in TOO_MANY_FILES):
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            return f"ulimit -n: {limit} open files are too few. Raise the limit (to 65536), or lower data.workers."
        if any(part in text for part in SHARED_MEMORY):
            return "data.workers: shared memory (/dev/shm) is full or not writable. Make it larger, or use 0 workers."
        if isinstance(cause, UnicodeEncodeError) and sys.getfilesystemencoding() != "utf-8":
            return _locale_message(str(cause.object))
    return None


def check_arguments(argv: list[str]) -> str | None:
    """Return a one-line message if the locale cannot represent an argument of the command line, otherwise None."""
    for argument in argv:
        if sys.getfilesystemencoding() != "utf-8" and not argument.isascii():
            return _locale_message(os.fsencode(argument).decode("utf-8", "replace"))
    return None


def _locale_message(text: str) -> str:
    """Return a message about text that the encoding of the locale cannot represent."""
    encoding = sys.getfilesystemencoding()
    return f"locale: {text[:100]!r} cannot be written in the encoding {encoding}. Set LC_ALL=C.UTF-8 and PYTHONUTF8=1."


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and the errors that caused it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
