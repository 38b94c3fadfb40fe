"""A tag that names the mesh axes along which the collectives inside a block of code communicate.

Different axes may have the same ranks, so a process group does not identify the axis of a collective. Planning reads
the tag to attribute communication and buffer memory to an axis. Training does not use the tag.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_AXES: ContextVar[tuple[str, ...]] = ContextVar("axes", default=())


@contextmanager
def sent_along(*axes: str) -> Iterator[None]:
    """Context manager: tag the collectives inside the block with `axes`.

    Each collective communicates along one of these axes. The innermost tag applies. Backward may run on another thread,
    where the tag is not set, so a `torch.autograd.Function` must set it again.
    """
    token = _AXES.set(axes)
    try:
        yield
    finally:
        _AXES.reset(token)


def tagged_axes() -> tuple[str, ...]:
    """Return the axes of the innermost tag, or an empty tuple if there is none."""
    return _AXES.get()
