"""Standard output that may be closed or full: a command ends without a traceback, and a run continues without it."""

import errno
import io
import os
import signal
import sys
from contextlib import suppress
from typing import Any

CLOSED_PIPE = 128 + signal.SIGPIPE  # exit code of a program whose output is no longer read, such as in `... | head`


class OutputError(Exception):
    """Standard output could not be written. This is no OSError, which callers may take for an error of their files."""

    def __init__(self, error: OSError) -> None:
        super().__init__(f"standard output: {error.strerror}. Free some space, or write to another file.")
        self.is_closed = error.errno == errno.EPIPE


class Output(io.FileIO):
    """File descriptor 1. After an error, it drops everything that is written."""

    is_required = True  # whether an error ends the command
    has_failed = False

    def write(self, data: Any) -> int:
        """Write `data`.

        Raises:
            OutputError: If that fails for the first time, and the output is required.
        """
        if self.has_failed:
            return len(data)
        try:
            return super().write(data) or 0
        except OSError as error:
            self.has_failed = True
            if self.is_required:
                raise OutputError(error) from None
            with suppress(OSError):
                reason = f"standard output cannot be written ({error.strerror})"
                print(f"warning: {reason}. The run continues without it.", file=sys.stderr)
            return len(data)


def prepare_streams() -> None:
    """Make standard output robust: to errors, and to characters that its encoding does not have."""
    for fd in range(3):  # otherwise, the next opened file gets the number of a closed stream
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    stream = sys.stdout
    if not isinstance(stream, io.TextIOWrapper) or not _is_standard_output(stream):
        return
    stream.flush()
    raw = Output(1, "w", closefd=False)
    errors = stream.errors if stream.encoding.lower().startswith("utf") else "backslashreplace"
    line_buffering = stream.line_buffering
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(raw), encoding=stream.encoding, errors=errors, line_buffering=line_buffering
    )


def continue_without_output() -> None:
    """Print a warning, in place of ending the command, if standard output cannot be written from now on."""
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    if isinstance(raw, Output):
        raw.is_required = False


def _is_standard_output(stream: io.TextIOWrapper) -> bool:
    """Whether `stream` writes to file descriptor 1, and not to a buffer of a notebook or a test."""
    try:
        return stream.fileno() == 1 and not isinstance(getattr(stream.buffer, "raw", None), Output)
    except (OSError, ValueError):
        return False
