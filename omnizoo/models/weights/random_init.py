"""Random initialization of a model on meta.

Weights that the `_init_weights` of the family skips are initialized, too. A weight that nothing initializes is an
error.
"""

from collections.abc import Callable, Iterator

import torch
from torch import nn
from transformers import PreTrainedModel

from omnizoo.config.errors import UserError
from omnizoo.config.sections.model import ModelSection
from omnizoo.modalities.frozen_tokenizer import Frozen
from omnizoo.models.build import build_model
from omnizoo.models.hf_private import rules_on_meta
from omnizoo.models.recipe import recipe_for
from omnizoo.models.weights.recording import NotSetError, Recording, recording


@torch.no_grad()
def build_drawn(spec: ModelSection, precision: str) -> nn.Module:
    """Call `build_model`, and initialize the weights that the family's rules omit. The recipe lists these weights.

    These weights are sampled like the matrices of the family.
    """
    model = build_model(spec, precision)
    uninitialized = recipe_for(model).uninitialized
    for module in model.modules() if uninitialized else ():
        class_name = type(module).__name__
        tensors: list[torch.Tensor] = []
        if class_name in uninitialized:
            tensors += module.parameters(recurse=False)
        for name, buffer in module.named_buffers(recurse=False):
            if f"{class_name}.{name}" in uninitialized:
                tensors.append(buffer)

        for tensor in tensors:
            assert isinstance(model, PreTrainedModel)
            tensor.normal_(0.0, float(model.config.initializer_range))
    return model


def initial_weights(
    construct: Callable[[], nn.Module], seed: int, wanted: set[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of the `wanted` parameters and buffers of the model that `construct` builds on meta.

    `construct` usually builds in fp32, regardless of the precision of the run, so that an fp64 run starts from the same
    numbers.
    """
    if not wanted:
        return
    with recording() as record, rules_on_meta():
        model = construct()

    from_folders = set()
    for name, tensor in _read_from_folders(model, wanted):
        from_folders.add(name)
        yield name, tensor

    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    for name, tensor in tensors.items():
        if name in wanted - from_folders:
            yield name, _value(record, model, name, tensor, seed)


def _read_from_folders(model: nn.Module, wanted: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the `wanted` weights that frozen tokenizers read from their folders."""
    for prefix, module in model.named_modules():
        if isinstance(module, Frozen) and any(name.startswith(f"{prefix}.") for name in wanted):
            stored = {f"{prefix}.{name}": tensor for name, tensor in module.stored().items()}
            yield from ((name, tensor) for name, tensor in stored.items() if name in wanted)


def _value(record: Recording, model: nn.Module, name: str, tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """Return the initial value of one tensor. Raise a `UserError` if nothing initializes it."""
    try:
        return record.value(tensor, seed)
    except NotSetError:
        owner, _, attribute = name.rpartition(".")
        class_name = type(model.get_submodule(owner)).__name__
        raise UserError(
            f"model: {name} has no initial value, because the constructor of {class_name} leaves `{attribute}` as "
            "uninitialized memory. Initialize it in the constructor, or start from weights that contain it."
        ) from None
