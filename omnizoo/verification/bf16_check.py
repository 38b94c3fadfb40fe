"""`verify --precision bf16`: compare a layout in bf16 with one process in fp32, and find inputs that lose precision.

bf16 has 8 significant bits, so no layout agrees closely with fp32, but all layouts have rounding errors of similar
size. One process in bf16 gives the expected error of each loss and gradient, and a layout passes if its error is not
much larger. Positions and targets must not be rounded at all. They are checked directly, because one process in bf16
would have the same defect.
"""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from omnizoo.models.media.batch import MediaBatch

# Maximum ratio between the errors of a layout and of one process in bf16. The layout determines which additions are
# rounded, so errors vary randomly. On the example configs, they vary by a factor of up to 2.
FACTOR = 3.0
# Allowance for errors that cancel by chance in one process, but not in a layout. It is half the relative spacing of
# bf16.
FLOOR = 2.0**-9


def allowed(error: float, usual: float = 0.0) -> float:
    """Return the maximum allowed error of a layout.

    Args:
        error: Error of one process in bf16 for the same value.
        usual: Median error of one process in bf16 over all gradients, if the value is a gradient.
    """
    return FACTOR * max(error, usual) + FLOOR


@contextmanager
def watching(model: nn.Module, rounded: list[str]) -> Iterator[None]:
    """Context manager: append a message to `rounded` if a submodule receives an input of `model` in lower precision.

    Arguments are matched by name, and only floating-point tensors are compared.
    """
    input_dtypes: dict[str, torch.dtype] = {}

    def record_inputs(_: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        for name, tensor in _float_tensors(kwargs):
            input_dtypes[name] = tensor.dtype

    def check_inputs(
        where: str, names: list[str], module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        positional = dict(zip(names, args, strict=False))
        for name, tensor in _float_tensors(positional | dict(kwargs)):
            original = input_dtypes.get(name)
            if original is not None and torch.finfo(tensor.dtype).bits < torch.finfo(original).bits:
                rounded.append(f"{name} ({_dtype_name(original)}) is rounded to {_dtype_name(tensor.dtype)} in {where}")

    with ExitStack() as hooks:
        # This hook runs first, before other hooks cast the inputs.
        hooks.enter_context(model.register_forward_pre_hook(record_inputs, with_kwargs=True, prepend=True))
        for name, module in model.named_modules():
            parameters = list(inspect.signature(module.forward).parameters)
            hook = partial(check_inputs, name or "the model", parameters)
            hooks.enter_context(module.register_forward_pre_hook(hook, with_kwargs=True))
        yield


def _dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without the prefix `torch.`."""
    return str(dtype).removeprefix("torch.")


def _float_tensors(inputs: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and value of each floating-point tensor in the arguments of a module, including media items."""
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            yield name, value
        elif isinstance(value, MediaBatch):
            for port, items in value.items.items():
                for item in items:
                    for key, tensor in _float_tensors(item):
                        yield f"{key} of {port}", tensor
