"""Initial weights as a stream of whole tensors, the same on every rank and in every layout.

The model is built once more on meta, with a recording of all that its constructor and its own rules do to tensors; each
tensor is then made by itself. So no rank ever holds the whole model, and every tensor is what the model's authors say:
drawn by their rule, or set by their constructor. One that nobody sets is refused by its name.
"""

from collections.abc import Callable, Iterator

import torch
from torch import nn

from omnizoo.config.errors import UserError
from omnizoo.modalities.frozen import Frozen
from omnizoo.models.hf_private import rules_on_meta
from omnizoo.models.recording import NotSetError, Recording, recording


def initial_weights(
    construct: Callable[[], nn.Module], seed: int, wanted: set[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of the `wanted` parameters and buffers of the model that `construct` builds on meta.

    Drawn in fp32 whatever the precision of the run, if `construct` builds so: fp64 then widens the same numbers.
    """
    if not wanted:
        return
    with recording() as record, rules_on_meta():
        model = construct()
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    read = set()
    for name, tensor in _read_from_folders(model, wanted):
        read.add(name)
        yield name, tensor
    for name, tensor in tensors.items():
        if name in wanted - read:
            yield name, _value(record, model, name, tensor, seed)


def _read_from_folders(model: nn.Module, wanted: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """What frozen tokenisers read from folders of their own."""
    for prefix, module in model.named_modules():
        if isinstance(module, Frozen) and any(name.startswith(f"{prefix}.") for name in wanted):
            stored = {f"{prefix}.{name}": tensor for name, tensor in module.stored().items()}
            yield from ((name, tensor) for name, tensor in stored.items() if name in wanted)


def _value(record: Recording, model: nn.Module, name: str, tensor: torch.Tensor, seed: int) -> torch.Tensor:
    try:
        return record.value(tensor, seed)
    except NotSetError:
        owner, _, own = name.rpartition(".")
        kind = type(model.get_submodule(owner)).__name__
        raise UserError(
            f"model: nobody sets the initial value of {name}: let the constructor of {kind} do it (`{own}` is "
            "uninitialised memory when it ends), or start from weights that have it"
        ) from None
