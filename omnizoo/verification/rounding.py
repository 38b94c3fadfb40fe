"""`verify --precision bf16`: a layout in bf16 against one process in fp32, and floats that must not be rounded at all.

bf16 keeps 8 bits of a number, so no layout agrees with fp32 closely; but all of them round alike. One process in bf16
tells how far that is, for each loss and each gradient; a layout passes if it is not much farther away.
Positions and targets are not activations: whether they arrive as they were sent is looked at directly, since one
process would round them, too.
"""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from omnizoo.models.media_batch import MediaBatch

# How much farther from fp32 than one process in bf16. Which additions are rounded depends on the layout, so errors of
# the same kind differ by chance: on the example configs by up to twice.
FACTOR = 3.0
# Errors that cancel in one process by chance, and do not in a layout: half of the distance between two bf16 numbers.
FLOOR = 2.0**-9


def allowed(error: float, usual: float = 0.0) -> float:
    """How large an error may be where one process has `error`, and tensors of the same kind `usual`."""
    return FACTOR * max(error, usual) + FLOOR


@contextmanager
def watching(model: nn.Module, rounded: list[str]) -> Iterator[None]:
    """Inside, whenever a module gets a float argument of the model's own in less than its precision, say so."""
    sent: dict[str, torch.dtype] = {}

    def send(_: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        sent.update({name: tensor.dtype for name, tensor in _floats(kwargs)})

    def arrive(where: str, names: list[str]) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            for name, tensor in _floats(dict(zip(names, args, strict=False)) | dict(kwargs)):
                if name in sent and torch.finfo(tensor.dtype).bits < torch.finfo(sent[name]).bits:
                    kinds = [str(dtype).removeprefix("torch.") for dtype in (sent[name], tensor.dtype)]
                    rounded.append(f"{name} ({kinds[0]}) reach {where} rounded to {kinds[1]}")

        return hook

    handles = [model.register_forward_pre_hook(send, with_kwargs=True, prepend=True)]  # before anything casts
    for name, module in model.named_modules():
        names = list(inspect.signature(module.forward).parameters)
        handles.append(module.register_forward_pre_hook(arrive(name or "the model", names), with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _floats(inputs: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            yield name, value
        elif isinstance(value, MediaBatch):
            for port, items in value.items.items():
                for item in items:
                    yield from ((f"{key} of {port}", tensor) for key, tensor in _floats(item))
