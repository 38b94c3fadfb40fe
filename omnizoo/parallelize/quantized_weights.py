"""Fill a model that has a quantized base. Each weight is loaded or initialized, quantized, and then freed."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from omnizoo.ops.quantization import Packing, packed_names, packings_of
from omnizoo.parallel.fsdp.sharded_tensors import local_shard, resized, with_local


@dataclass(frozen=True)
class QuantizedWeight:
    """A quantized weight of a model."""

    module: nn.Module
    name: str  # name of the weight within `module`
    packing: Packing


def quantized_weights(model: nn.Module) -> dict[str, QuantizedWeight]:
    """Return the quantized weights, keyed by their name in the files."""
    return {
        f"{prefix}.{name}": QuantizedWeight(module, name, packing)
        for prefix, module in model.named_modules()
        for name, packing in packings_of(module).items()
    }


def plain_names(model: nn.Module) -> set[str]:
    """Return the names of all parameters. Quantized weights are listed under their original name."""
    quantized_names = set(quantized_weights(model))
    codes_and_scales = {packed_name for name in quantized_names for packed_name in packed_names(name)}
    parameter_names = {name for name, _ in model.named_parameters()}
    return parameter_names - codes_and_scales | quantized_names


def load_and_quantize(model: nn.Module, load: Callable[[], set[str]]) -> set[str]:
    """Replace quantized parameters with unquantized ones, run `load`, and quantize the loaded weights.

    `load` fills parameters of `model` from files and returns the names that the files lack. Until `load` returns, each
    rank holds its local shards of these weights without quantization.
    """
    weights = list(quantized_weights(model).values())
    codes_and_scales = [_unpack_parameter(weight) for weight in weights]
    missing = load()
    for i, weight in enumerate(weights):
        _pack_parameter(weight, codes_and_scales[i])
    return missing


def _unpack_parameter(weight: QuantizedWeight) -> tuple[nn.Parameter, ...]:
    """Replace codes and scales with an unquantized parameter on meta with the same sharding.

    Return codes and scales.
    """
    names = packed_names(weight.name)
    codes_and_scales = tuple(weight.module.get_parameter(name) for name in names)
    for name in names:
        delattr(weight.module, name)
    plain = resized(codes_and_scales[0], 1, weight.packing.shape[1], weight.packing.dtype)
    weight.module.register_parameter(weight.name, nn.Parameter(plain, requires_grad=False))
    return codes_and_scales


def _pack_parameter(weight: QuantizedWeight, codes_and_scales: tuple[nn.Parameter, ...]) -> None:
    """Replace the unquantized parameter with codes and scales. If its value was loaded, quantize it."""
    plain = weight.module.get_parameter(weight.name)
    delattr(weight.module, weight.name)
    values: Iterable[torch.Tensor] = codes_and_scales
    if not plain.is_meta:  # otherwise the files lack this weight, and it is initialized later
        packed = weight.packing.pack(local_shard(plain))
        values = [with_local(old, local) for old, local in zip(codes_and_scales, packed, strict=True)]
    for name, value in zip(packed_names(weight.name), values, strict=True):
        weight.module.register_parameter(name, nn.Parameter(value.detach(), requires_grad=False))


def quantized(model: nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, full tensor). For weights that are quantized in `model`, yield codes and scales."""
    quantized_by_name = quantized_weights(model)
    for name, tensor in weights:
        if name not in quantized_by_name:
            yield name, tensor
            continue
        packing = quantized_by_name[name].packing
        yield from zip(packed_names(name), packing.pack(tensor.to(packing.dtype)), strict=True)
