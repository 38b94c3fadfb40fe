"""Errors that end a run with one line instead of a traceback, and the formatting of such lines."""

import json
from collections.abc import Iterable
from typing import Any

MAX_MISTAKES = 20  # maximum number of printed mistakes
ALLOCATION_FAILED = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory")


class ShownAsLine:
    """An error that notebooks show as its message, without the frames of this package."""

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython prints instead of a traceback."""
        return f"{type(self).__name__}: {self}".splitlines()


class UserError(ShownAsLine, Exception):
    """A mistake that the user can fix. Exit code 2.

    The message contains the file or key, the value, and what to do.
    """


class TrainingError(ShownAsLine, RuntimeError):
    """A run that cannot continue although its config is valid, for example after non-finite losses. Exit code 1."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the host or a device ran out of memory. Compares names, because torch may not be imported."""
    is_device_error = any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__)
    is_allocation_error = any(message in str(error) for message in ALLOCATION_FAILED)
    return isinstance(error, MemoryError) or is_device_error or is_allocation_error


def first_line(error: BaseException) -> str:
    """Return the message of an error, which may come from a library or user code, as one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        lines = [type(error).__name__]
    if lines[0].startswith("Caught "):  # the text of a loader worker's error is a traceback followed by the message
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
        num_hidden = total - len(lines)
        lines.append(f"and {num_hidden:,} more mistakes")
    return "\n".join(lines)


def show_value(value: Any) -> str:
    """Return a config value as short, printable JSON."""
    return shorten(printable(json.dumps(value, ensure_ascii=False, default=str)))


def shorten(text: str) -> str:
    """Return at most 80 characters of `text`."""
    return text if len(text) <= 80 else text[:77] + "..."


def printable(text: str, allowed: str = "") -> str:
    """Escape all line breaks and control characters that are not in `allowed`, so that a message stays on one line."""
    characters = []
    for character in text:
        if not character.isprintable() and character not in allowed:
            character = character.encode("unicode_escape", "surrogatepass").decode()
        characters.append(character)
    return "".join(characters)
