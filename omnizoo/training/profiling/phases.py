"""Marks for the phases of a step. The profiler records them."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any


class Phases:
    """Marks the phases of a step: `with phases("forward"): ...`. A no-op, unless a profiler sets `enter`."""

    def __init__(self) -> None:
        self.enter: Callable[[str], AbstractContextManager[Any]] = nullcontext

    def __call__(self, name: str) -> AbstractContextManager[Any]:
        return self.enter(name)
