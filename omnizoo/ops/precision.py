"""Keeps a float64 run in float64. Models cast to a hard-coded float32 for norms, rotary angles and softmax, whose
rounding would hide small bugs from the proofs that float64 is for; the mode widens those casts, from outside."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class KeepFloat64(TorchFunctionMode):
    """Inside it, asking torch for float32 gives float64. Recomputation in backward must enter it anew."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        return func(*map(_widen, args), **{key: _widen(value) for key, value in (kwargs or {}).items()})


def _widen(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def exact(precision: str) -> AbstractContextManager[Any]:
    """The mode for `fp64`, nothing for any other precision."""
    return KeepFloat64() if precision == "fp64" else nullcontext()
