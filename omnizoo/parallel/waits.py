"""Waiting for collectives, made visible: for a profiler, which sees operators and what is named."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch.distributed as dist


@contextmanager
def named_waits(named: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """For the length of the block, every wait of this process for a collective is inside of a `named()`."""
    wait = dist.Work.wait

    @wraps(wait)
    def named_wait(*args: Any, **kwargs: Any) -> Any:
        with named():
            return wait(*args, **kwargs)

    with patch.object(dist.Work, "wait", named_wait):
        yield
