"""Errors that end a run with a one-line message instead of a traceback, and helpers that format such messages."""

import json
from collections.abc import Iterable
from typing import Any

MAX_MISTAKES = 20  # maximum number of mistakes that one error message lists
ALLOCATION_FAILED = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory")


class ShownAsLine:
    """Mixin for errors. A notebook shows the message of such an error without a traceback."""

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython prints instead of a traceback."""
        return f"{type(self).__name__}: {self}".splitlines()


class UserError(ShownAsLine, Exception):
    """A mistake that the user can fix, such as an invalid config. The command line exits with code 2.

    The message states the file or config key, the value, and what to do.
    """


class TrainingError(ShownAsLine, RuntimeError):
    """A run cannot continue although its config is valid, for example after several non-finite losses.

    The command line exits with code 1.
    """


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the host or a device ran out of memory. Compare class names, because torch may not be imported."""
    is_device_error = any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__)
    is_allocation_error = any(message in str(error) for message in ALLOCATION_FAILED)
    return isinstance(error, MemoryError) or is_device_error or is_allocation_error


def first_line(error: BaseException) -> str:
    """Return the message of an error as one line. Messages of libraries and user code may have several lines."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        lines = [type(error).__name__]
    if lines[0].startswith("Caught "):  # torch puts the traceback of a loader worker before the message
        lines = lines[-1:]
    line = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return line if len(line) <= 300 else line[:297] + "..."


def named_line(error: BaseException) -> str:
    """Return `CLASS: MESSAGE` of an error as one line, or the class alone if the error has no message."""
    kind = type(error).__name__
    line = first_line(error)
    return line if line == kind else f"{kind}: {line}"


def join_mistakes(mistakes: Iterable[str], total: int | None = None) -> str:
    """Return an error message with one line for each mistake.

    Args:
        mistakes: The mistakes to list.
        total: Number of all mistakes. If it is larger, a last line states how many are not listed.
    """
    lines = [printable(mistake) for mistake in mistakes]
    if total is not None and total > len(lines):
        num_hidden = total - len(lines)
        lines.append(f"and {num_hidden:,} more mistakes")
    return "\n".join(lines)


def show_value(value: Any) -> str:
    """Return a config value as printable JSON of at most 80 characters."""
    return shorten(printable(json.dumps(value, ensure_ascii=False, default=str)))


def shorten(text: str) -> str:
    """Truncate `text` to 80 characters, with an ellipsis at the end if it was longer."""
    return text if len(text) <= 80 else text[:77] + "..."


def printable(text: str, allowed: str = "") -> str:
    """Escape line breaks and other unprintable characters, so that a message stays on one line.

    Args:
        text: The text to escape.
        allowed: Unprintable characters that stay unchanged.
    """
    characters = []
    for character in text:
        if not character.isprintable() and character not in allowed:
            character = character.encode("unicode_escape", "surrogatepass").decode()
        characters.append(character)
    return "".join(characters)
