"""Errors on stderr: one line each, red on a terminal, and once even if every rank makes the same mistake."""

import os

CRASH = "\1"  # before a message: the rank that says so has crashed, perhaps since another one has
ERROR_FD = "OMNIZOO_ERROR_FD"  # set by our launcher, which prints what its ranks write there, without repetition


def report_error(message: str) -> None:
    if ERROR_FD in os.environ:
        os.write(int(os.environ[ERROR_FD]), _plain(message).encode() + b"\0")
    else:
        print_error(message)


def report_crash(message: str) -> None:
    """To our launcher, which knows of all ranks and prints it as the last line if it was the first crash."""
    if ERROR_FD in os.environ:
        os.write(int(os.environ[ERROR_FD]), (CRASH + message).encode() + b"\0")


def print_error(message: str) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True)
    for line in _plain(message).split("\n"):
        console.print(Text.assemble(("error: ", "bold red"), line), soft_wrap=True)  # a line stays one line


def _plain(message: str) -> str:
    """Without what would end a line early, move the cursor or fail to be written: names in messages are anybody's."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape", "surrogatepass").decode()
        for c in message.replace("\r\n", "\n")
    )
