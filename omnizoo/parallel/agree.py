"""An error on one rank is the error of all: no rank waits for one that has given up."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from omnizoo.config.errors import UserError
from omnizoo.parallel.mesh import Mesh

T = TypeVar("T")


def agree(mesh: Mesh, work: Callable[[], T], kind: type[Exception] = UserError) -> T:
    """Do `work`; if it raises an error of `kind` on any rank, raise that of the lowest such rank on every rank.

    All ranks must call it, and `work` must not wait for other ranks before it raises.
    """
    error, result = None, None
    try:
        result = work()
    except kind as caught:
        error = caught
    if mesh.sum([error is not None])[0]:
        raise_first(mesh.from_first(mesh.gather(str(error) if error else None)), kind, error)
    return result  # type: ignore[return-value]  # what `work` gave, whatever that is


def raise_first(
    messages: Iterable[str | None], kind: type[Exception] = UserError, cause: Exception | None = None
) -> None:
    """Raise what the first rank that failed has to say, given what each rank said: None where all is well."""
    for message in messages:
        if message is not None:
            raise kind(message) from cause


def rank_apart(mesh: Mesh, value: Any) -> int | None:
    """The first rank whose `value` is not that of rank 0; None if all have the same. The answer is the same on all."""
    values = mesh.gather(value)
    apart: int | None = mesh.from_first(next((rank for rank, own in enumerate(values) if own != values[0]), None))
    return apart
