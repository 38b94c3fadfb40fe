"""Stream the full tensors of a sharded model one after the other, under their names in the published files."""

from collections.abc import Collection, Iterator
from dataclasses import replace

import torch
from torch import nn

from omnizoo.config.errors import UserError
from omnizoo.models.adapters.expert_matrices import stored_in
from omnizoo.models.adapters.lora import AdapterInfo, attached, merge
from omnizoo.models.adapters.peft_files import peft_tensors
from omnizoo.models.hf_private import PublishedKeys
from omnizoo.models.user_module import tensors_of
from omnizoo.parallel.fsdp.sharded_tensors import full_tensor

Named = Iterator[tuple[str, torch.Tensor]]


def stream_weights(
    model: nn.Module,
    keys: PublishedKeys,
    dtype: torch.dtype | None,
    is_kept: bool,
    fixed: Collection[str] = (),
) -> Named:
    """Yield the published names and full tensors of a model, with its adapter merged.

    Tensors are gathered one group at a time. A group contains tensors that are stored together in the published files.
    Collective: all ranks must exhaust the iterator.

    Args:
        model: The sharded model.
        keys: Mapping to the published names.
        dtype: Precision of the tensors. None keeps the precision of the model.
        is_kept: Whether this rank needs the tensors. If False, nothing is yielded.
        fixed: Names of tensors that keep their precision.
    """
    tensors = _local_tensors(model)

    def dtype_of(name: str) -> torch.dtype:
        tensor = tensors[name]
        is_cast = dtype is not None and name not in fixed and tensor.is_floating_point()
        return dtype if is_cast and dtype is not None else tensor.dtype

    for group in keys.groups(_names_without_adapter(model, tensors)):
        weights = {name: _full_weight(model, name, tensors) for name in group}
        weights = {name: weight.to(dtype_of(name)) for name, weight in weights.items()}
        if is_kept:
            yield from ((name, tensor.contiguous()) for name, tensor in keys.convert(model, weights).items())


def stream_model_weights(model: nn.Module, is_kept: bool) -> Named:
    """Yield full tensors, with their names and precision in the model.

    Collective: all ranks must exhaust the iterator.
    """
    tensors = _local_tensors(model)
    for name in _names_without_adapter(model, tensors):
        weight = _full_weight(model, name, tensors)
        if is_kept:
            yield name, weight


def _local_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and persistent buffers by name, as local shards."""
    names = {name for name, _ in model.named_parameters()} | set(model.state_dict())
    return {name: tensor for name, tensor in tensors_of(model) if name in names}


def _names_without_adapter(model: nn.Module, tensors: dict[str, torch.Tensor]) -> list[str]:
    """Return the names of all tensors except adapter matrices."""
    adapter = attached(model)
    return [name for name in tensors if adapter is None or name not in adapter.started]


def _full_weight(model: nn.Module, name: str, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the full tensor `name`, with the adapter merged. Collective: all ranks must call it."""
    adapter = attached(model)
    weight = full_tensor(tensors[name])
    return weight if adapter is None else _merged(model, adapter, name, weight, tensors)


def stream_trained(model: nn.Module, adapter: AdapterInfo, is_kept: bool) -> Named:
    """Yield the names and full tensors of the trained weights of an adapter, as checkpoints store them.

    Collective: all ranks must exhaust the iterator.
    """
    for name, parameter in model.named_parameters():
        if name in adapter.trained:
            full = full_tensor(parameter)
            if is_kept:
                yield name, full


def stream_adapter(model: nn.Module, dtype: torch.dtype | None, is_kept: bool) -> Named:
    """Yield the PEFT names and full tensors of the adapter. Collective: all ranks must exhaust the iterator."""
    adapter = attached(model)
    if adapter is None:
        raise UserError("adapter_only: the model has no adapter (model.adapter). Remove the argument.")
    state = dict(stream_trained(model, adapter, is_kept))
    if is_kept:
        for key, factor in peft_tensors(adapter, state)[1].items():
            yield key, factor.to(dtype or factor.dtype)


def _stored_in(target: str, model: nn.Module) -> str:
    """Return the full name of the parameter that contains a target of fused experts."""
    owner, _, attribute = target.rpartition(".")
    return f"{owner}.{stored_in(attribute, model.get_submodule(owner))}"


def _merged(
    model: nn.Module, adapter: AdapterInfo, name: str, weight: torch.Tensor, tensors: dict[str, torch.Tensor]
) -> torch.Tensor:
    """Return `weight`, the full tensor `name`, with the adapter merged if the adapter covers it."""
    module = name.removesuffix(".weight")
    experts = [target for target in adapter.experts if _stored_in(target, model) == name]
    if not experts and (module == name or module not in adapter.modules):
        return weight
    if experts:
        adapter_of_weight = replace(adapter, modules=(), experts=tuple(experts))
        prefixes = tuple(f"{target}_lora_" for target in experts)
    else:
        adapter_of_weight = replace(adapter, modules=(module,), experts=())
        prefixes = (f"{module}.lora_",)
    matrices = {key: full_tensor(tensors[key]) for key in sorted(adapter.started) if key.startswith(prefixes)}
    weights = {name: weight}
    merge(model, weights, adapter_of_weight, matrices)
    return weights[name]
