"""Errors that end a run with one line instead of a traceback, and the formatting of such lines."""

import json
from collections.abc import Iterable
from typing import Any

MOST_MISTAKES = 20  # maximum number of mistakes that are printed
ALLOCATION_FAILED = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory")


class UserError(Exception):
    """A mistake that the user can fix. Exit code 2.

    The message contains the file or key, the value, and what to do.
    """


class TrainingError(RuntimeError):
    """A run that cannot continue although its config is valid, for example after non-finite losses. Exit code 1."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the host or a device ran out of memory. Compares names, because torch may not be imported."""
    is_device = any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__)
    return isinstance(error, MemoryError) or is_device or any(words in str(error) for words in ALLOCATION_FAILED)


def first_line(error: BaseException) -> str:
    """Return the message of an error, from a library or user code, as one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    if lines[0].startswith("Caught "):  # an error of a loader worker contains a traceback, then the message
        lines = lines[-1:]
    line = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return line if len(line) <= 300 else line[:297] + "..."


def named_line(error: BaseException) -> str:
    """Return the class and the message of an error."""
    kind = type(error).__name__
    line = first_line(error)
    return line if line == kind else f"{kind}: {line}"


def join_mistakes(mistakes: Iterable[str], total: int | None = None) -> str:
    """Return one line per mistake, and a last line with the number of mistakes that are not listed."""
    lines = [printable(mistake) for mistake in mistakes]
    if total is not None and total > len(lines):
        lines.append(f"and {total - len(lines):,} more mistakes")
    return "\n".join(lines)


def show_value(value: Any) -> str:
    """Return a config value as short, printable JSON."""
    return shorten(printable(json.dumps(value, ensure_ascii=False, default=str)))


def shorten(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."


def printable(text: str, allowed: str = "") -> str:
    """Escape line breaks and control characters not in `allowed`, so that a message stays on one line."""
    return "".join(
        c if c.isprintable() or c in allowed else c.encode("unicode_escape", "surrogatepass").decode() for c in text
    )
