"""Context managers and hooks that control the precision of a computation.

`keep_precision` keeps a float64 run in float64. Models cast to a hard-coded float32 for norms, rotary angles and
softmax, and the rounding would hide small bugs from the tests that use float64. `keep_precision` turns these casts into
casts to float64, without changes to the models. `compute_in` runs one submodule in a different precision than the
modules around it.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from omnizoo.ops.torch_private import tree_leaves, tree_map_only


class KeepFloat64(TorchFunctionMode):
    """Mode in which torch functions use float64 wherever float32 is requested.

    Recomputation in backward must enter the mode again.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        wide_args = [_widen(value) for value in args]
        wide_kwargs = {key: _widen(value) for key, value in (kwargs or {}).items()}
        return func(*wide_args, **wide_kwargs)


def _widen(value: Any) -> Any:
    """Return float64 if `value` is the dtype float32, and any other value unchanged."""
    return torch.float64 if value is torch.float32 else value


def keep_precision(precision: str) -> AbstractContextManager[Any]:
    """Return the `KeepFloat64` mode for `fp64`, and an empty context for any other precision."""
    return KeepFloat64() if precision == "fp64" else nullcontext()


def at_least_fp32(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` in float32, or unchanged if it is in float64."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def compute_in(module: nn.Module, dtype: torch.dtype) -> None:
    """Register hooks that cast the inputs of `module` to `dtype`, and its outputs back to the dtype of the caller."""
    outer: list[torch.dtype] = []  # the caller's dtype, for each call in progress

    def enter(_: nn.Module, args: Any, kwargs: Any) -> Any:
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and x.is_floating_point()]
        outer.append(tensors[0].dtype)
        return _cast(args, dtype), _cast(kwargs, dtype)

    module.register_forward_pre_hook(enter, with_kwargs=True)
    module.register_forward_hook(lambda _, args, out: _cast(out, outer.pop()))


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    """Return nested arguments with all floating-point tensors cast to `dtype`."""
    return tree_map_only(torch.Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, tree)
