"""Stream the full tensors of a sharded model one after the other, under the names of its published files."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from omnizoo.config.errors import UserError
from omnizoo.models.adapters.lora import AdapterInfo, attached, merge
from omnizoo.models.adapters.peft_files import published_factor
from omnizoo.models.hf_private import PublishedKeys
from omnizoo.models.user_module import tensors_of
from omnizoo.parallel.fsdp.sharded_tensors import full_tensor

Named = Iterator[tuple[str, torch.Tensor]]


def stream_weights(model: nn.Module, keys: PublishedKeys, dtype: torch.dtype | None, is_kept: bool) -> Named:
    """Yield the published names and full tensors of a model, with its adapter merged.

    Tensors are gathered one group at a time: a group has the tensors that are stored together in the published files.
    Collective: all ranks must exhaust the iterator.

    Args:
        model: The sharded model.
        keys: Mapping to the published names.
        dtype: Precision of the tensors. None keeps that of the model.
        is_kept: Whether this rank needs the tensors. If False, nothing is yielded.
    """
    tensors = _held(model)
    for group in keys.groups(_own(model, tensors)):
        weights = {name: _whole(model, name, tensors) for name in group}
        weights = {name: weight.to(dtype or tensors[name].dtype) for name, weight in weights.items()}
        if is_kept:
            yield from ((name, tensor.contiguous()) for name, tensor in keys.convert(model, weights).items())


def stream_own(model: nn.Module, is_kept: bool) -> Named:
    """Yield names in the model and full tensors, in its precision. Collective: all ranks must exhaust the iterator."""
    tensors = _held(model)
    for name in _own(model, tensors):
        weight = _whole(model, name, tensors)
        if is_kept:
            yield name, weight


def _held(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and persistent buffers by name, as local shards."""
    kept = {name for name, _ in model.named_parameters()} | set(model.state_dict())
    return {name: tensor for name, tensor in tensors_of(model) if name in kept}


def _own(model: nn.Module, tensors: dict[str, torch.Tensor]) -> list[str]:
    """Return the names of all tensors except adapter matrices."""
    found = attached(model)
    return [name for name in tensors if found is None or name not in found.started]


def _whole(model: nn.Module, name: str, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    found, weight = attached(model), full_tensor(tensors[name])
    return weight if found is None else _merged(model, found, name, weight, tensors)


def stream_adapter(model: nn.Module, dtype: torch.dtype | None, is_kept: bool) -> Named:
    """Yield PEFT names and full tensors of the adapter. Collective: all ranks must exhaust the iterator."""
    found = attached(model)
    if found is None:
        raise UserError("adapter_only: the model has no adapter (model.adapter); leave it out")
    for name, parameter in model.named_parameters():
        if name in found.trained:
            whole = full_tensor(parameter)
            if is_kept:
                key, factor = published_factor(name, whole, found)
                yield key, factor.to(dtype or factor.dtype).contiguous()


def _merged(
    model: nn.Module, found: AdapterInfo, name: str, weight: torch.Tensor, tensors: dict[str, torch.Tensor]
) -> torch.Tensor:
    module, is_expert = name.removesuffix(".weight"), name in found.experts
    if not is_expert and (module == name or module not in found.modules):
        return weight
    part = replace(found, modules=() if is_expert else (module,), experts=(name,) if is_expert else ())
    prefix = f"{name}_lora_" if is_expert else f"{module}.lora_"
    factors = {own: full_tensor(tensors[own]) for own in sorted(found.started) if own.startswith(prefix)}
    weights = {name: weight}
    merge(model, weights, part, factors)
    return weights[name]
