"""The weights of a model that is sharded over ranks, whole and one by one, as its published files have them."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from omnizoo.config.errors import UserError
from omnizoo.models.adapter import Attached, attached, merge
from omnizoo.models.adapter_files import published_factor
from omnizoo.models.build import tensors_of
from omnizoo.models.hf_private import PublishedKeys
from omnizoo.parallel.shard import whole_of

Named = Iterator[tuple[str, torch.Tensor]]


def stream_weights(model: nn.Module, keys: PublishedKeys, dtype: torch.dtype | None, is_kept: bool) -> Named:
    """Names and tensors, an adapter merged in; at no time more than one tensor of the model is whole.

    All ranks must go through all of it; those where it is not `is_kept` get nothing. `dtype` None: as they are held.
    """
    tensors = _held(model)
    for group in keys.groups(_own(model, tensors)):
        weights = {name: _whole(model, name, tensors) for name in group}
        weights = {name: weight.to(dtype or tensors[name].dtype) for name, weight in weights.items()}
        if is_kept:
            yield from ((name, tensor.contiguous()) for name, tensor in keys.convert(model, weights).items())


def stream_own(model: nn.Module, is_kept: bool) -> Named:
    """The same by the model's own names, as they are held."""
    tensors = _held(model)
    for name in _own(model, tensors):
        weight = _whole(model, name, tensors)
        if is_kept:
            yield name, weight


def _held(model: nn.Module) -> dict[str, torch.Tensor]:
    """This rank's part of all that belongs to the weights."""
    kept = {name for name, _ in model.named_parameters()} | set(model.state_dict())
    return {name: tensor for name, tensor in tensors_of(model) if name in kept}


def _own(model: nn.Module, tensors: dict[str, torch.Tensor]) -> list[str]:
    """All but the factors of an adapter."""
    found = attached(model)
    return [name for name in tensors if found is None or name not in found.started]


def _whole(model: nn.Module, name: str, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    found, weight = attached(model), whole_of(tensors[name])
    return weight if found is None else _merged(model, found, name, weight, tensors)


def stream_adapter(model: nn.Module, dtype: torch.dtype | None, is_kept: bool) -> Named:
    """The same of an adapter alone, by the names of PEFT's files."""
    found = attached(model)
    if found is None:
        raise UserError("adapter_only: the model has no adapter (model.adapter); leave it out")
    for name, parameter in model.named_parameters():
        if name in found.trained:
            whole = whole_of(parameter)
            if is_kept:
                key, factor = published_factor(name, whole, found)
                yield key, factor.to(dtype or factor.dtype).contiguous()


def _merged(
    model: nn.Module, found: Attached, name: str, weight: torch.Tensor, tensors: dict[str, torch.Tensor]
) -> torch.Tensor:
    module, is_expert = name.removesuffix(".weight"), name in found.experts
    if not is_expert and (module == name or module not in found.modules):
        return weight
    part = replace(found, modules=() if is_expert else (module,), experts=(name,) if is_expert else ())
    prefix = f"{name}_lora_" if is_expert else f"{module}.lora_"
    factors = {own: whole_of(tensors[own]) for own in sorted(found.started) if own.startswith(prefix)}
    weights = {name: weight}
    merge(model, weights, part, factors)
    return weights[name]
