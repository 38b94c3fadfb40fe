"""The two ways a run ends early with one clear line instead of a traceback, and what to quote of an error in it."""

ALLOCATION_FAILED = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory")


class UserError(Exception):
    """A mistake the user can fix: names file, key and value, what was expected and what to do. Exit code 2."""


class TrainingError(RuntimeError):
    """The run cannot go on, through no mistake in the config (non-finite losses, a full disk). Exit code 1."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, of the machine or of a device. Asked before torch is imported, and so by name."""
    is_device = any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__)
    return isinstance(error, MemoryError) or is_device or any(words in str(error) for words in ALLOCATION_FAILED)


def first_line(error: BaseException) -> str:
    """What an error of somebody else's code says, in one readable line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    if lines[0].startswith("Caught "):  # in a loader worker: its traceback follows, and last what it is about
        lines = lines[-1:]
    line = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return line if len(line) <= 300 else line[:297] + "..."


def named_line(error: BaseException) -> str:
    """The kind of an error, and what it says."""
    said = first_line(error)
    return said if said == type(error).__name__ else f"{type(error).__name__}: {said}"
