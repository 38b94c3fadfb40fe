"""Computing in another precision than what is around.

`exact` keeps a float64 run in float64: models cast to a hard-coded float32 for norms, rotary angles and softmax, whose
rounding would hide small bugs from the proofs that float64 is for; the mode widens those casts, from outside.
`compute_in` is for a part whose weights are kept in a precision of its own.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from omnizoo.ops.torch_private import tree_leaves, tree_map_only


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


def compute_in(module: nn.Module, dtype: torch.dtype) -> None:
    """Let `module` see its floats in `dtype`, and whoever calls it get back what it gave in."""
    outer: list[torch.dtype] = []  # of the call in progress

    def enter(_: nn.Module, args: Any, kwargs: Any) -> Any:
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and x.is_floating_point()]
        outer.append(tensors[0].dtype)
        return _cast(args, dtype), _cast(kwargs, dtype)

    module.register_forward_pre_hook(enter, with_kwargs=True)
    module.register_forward_hook(lambda _, args, out: _cast(out, outer.pop()))


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    return tree_map_only(torch.Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, tree)
