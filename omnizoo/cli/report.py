"""Errors on stderr: one line each, red on a terminal, and once even if every rank makes the same mistake."""

import os

ERROR_FD = "OMNIZOO_ERROR_FD"  # set by our launcher, which prints what its ranks write there, without repetition


def report_error(message: str) -> None:
    if ERROR_FD in os.environ:
        os.write(int(os.environ[ERROR_FD]), _plain(message).encode() + b"\0")
    else:
        print_error(message)


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
