"""Handle errors of standard output, such as a closed pipe or a full disk.

A command ends without a traceback. A training run continues without output.
"""

import errno
import io
import os
import signal
import sys
from contextlib import suppress
from typing import Any

CLOSED_PIPE = 128 + signal.SIGPIPE  # exit code if the reader has closed the pipe, as in `omnizoo recipes | head`


class OutputError(Exception):
    """Raised if standard output cannot be written.

    It is not a subclass of OSError, because callers that write files would report it as an error of these files.
    """

    def __init__(self, error: OSError) -> None:
        """Create the error. `error` is the cause, from which the reason is copied."""
        super().__init__(f"standard output: {error.strerror}. Free some space, or write to another file.")
        self.is_closed = error.errno == errno.EPIPE


class Output(io.FileIO):
    """File descriptor 1. After an error, all output is discarded."""

    is_required = True  # whether an error ends the command
    has_failed = False

    def write(self, data: Any) -> int:
        """Write `data` to standard output, or discard it after an earlier error.

        Raises:
            OutputError: If the output is required and writing fails for the first time.
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
    """Replace `sys.stdout` with a stream that handles errors, and escapes characters that its encoding lacks."""
    for fd in range(3):  # open closed streams, because the next opened file would get their number
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
    """From now on, print a warning instead of ending the command if standard output cannot be written."""
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    if isinstance(raw, Output):
        raw.is_required = False


def _is_standard_output(stream: io.TextIOWrapper) -> bool:
    """Whether `stream` is the original standard output, instead of an `Output` or the buffer of a notebook or test."""
    try:
        return stream.fileno() == 1 and not isinstance(getattr(stream.buffer, "raw", None), Output)
    except (OSError, ValueError):
        return False
