"""Print errors to stderr, in red on a terminal. An error that occurs on all ranks is printed once."""

import os
from contextlib import suppress

from omnizoo.config.errors import printable

CRASH = "\1"  # prefix of messages about crashes; the launcher prints only the first crash
# Environment variable with the file descriptor to which ranks write errors. The launcher prints each distinct error.
ERROR_FD = "OMNIZOO_ERROR_FD"


def report_error(message: str) -> None:
    """Send an error to the launcher to print it once for all ranks. Without a launcher, print it to stderr."""
    if ERROR_FD in os.environ:
        os.write(int(os.environ[ERROR_FD]), _plain(message).encode() + b"\0")
    else:
        print_error(message)


def report_crash(message: str) -> None:
    """Report a crash to the launcher. The launcher prints the first crash when all ranks have ended.

    Without a launcher, do nothing.
    """
    if ERROR_FD in os.environ:
        os.write(int(os.environ[ERROR_FD]), (CRASH + message).encode() + b"\0")


def print_error(message: str) -> None:
    """Print each line of a message to stderr, with the prefix `error: `."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True)
    with suppress(OSError):  # if stderr is closed or full, the exit code still reports the failure
        for line in _plain(message).split("\n"):
            console.print(Text.assemble(("error: ", "bold red"), line), soft_wrap=True)  # do not wrap long lines


def _plain(message: str) -> str:
    """Escape unprintable characters, for example in file names. Line breaks and tabs are kept."""
    return printable(message.replace("\r\n", "\n"), allowed="\n\t")
