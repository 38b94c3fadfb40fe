"""The two ways a run ends early with one clear line instead of a traceback."""

ALLOCATION_FAILED = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory")


class UserError(ValueError):
    """A mistake the user can fix: names file, key and value, what was expected and what to do. Exit code 2."""


class TrainingError(RuntimeError):
    """The run cannot go on, through no mistake in the config (non-finite losses, a full disk). Exit code 1."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, of the machine or of a device. Asked before torch is imported, and so by name."""
    is_device = any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__)
    return isinstance(error, MemoryError) or is_device or any(words in str(error) for words in ALLOCATION_FAILED)
