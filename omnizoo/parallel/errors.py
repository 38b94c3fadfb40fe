"""Raise an error on all ranks if it occurs on any rank, so that no rank waits forever."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from omnizoo.config.errors import UserError
from omnizoo.parallel.mesh import Mesh

T = TypeVar("T")


def sync_errors(mesh: Mesh, work: Callable[[], T], kind: type[Exception] = UserError) -> T:
    """Run `work` and return its result.

    If `work` raises `kind` on any rank, all ranks raise the error of the lowest rank on which it failed.

    Collective: all ranks must call it. `work` must not wait for other ranks before it raises.
    """
    error = None
    result = None
    try:
        result = work()
    except kind as caught:
        error = caught
    if mesh.sum([error is not None])[0]:
        messages = mesh.gather(str(error) if error else None)
        raise_first(mesh.from_first(messages), kind, error)
    return result  # type: ignore[return-value]  # T may include None


def raise_first(
    messages: Iterable[str | None], kind: type[Exception] = UserError, cause: Exception | None = None
) -> None:
    """Raise an error with the first message. `messages` has one entry per rank; None stands for no error."""
    for message in messages:
        if message is not None:
            raise kind(message) from cause


def first_different_rank(mesh: Mesh, value: Any) -> int | None:
    """Return the lowest rank whose `value` differs from the value on rank 0, or None if all values are equal.

    All ranks return the same result. Collective: all ranks must call it.
    """
    values = mesh.gather(value)
    different_ranks = [rank for rank, rank_value in enumerate(values) if rank_value != values[0]]
    first: int | None = mesh.from_first(different_ranks[0] if different_ranks else None)
    return first
