"""Fill a model that has a quantized base: each weight is loaded or initialized, then quantized and freed."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from omnizoo.ops.quantization import Packing, packed_names, packings_of
from omnizoo.parallel.fsdp.sharded_tensors import local_shard, resized, with_local


@dataclass(frozen=True)
class Held:
    """A quantized weight of a model."""

    module: nn.Module
    own: str
    packing: Packing


def held_of(model: nn.Module) -> dict[str, Held]:
    """Return the quantized weights, by their name in the files."""
    return {
        f"{prefix}.{own}": Held(module, own, packing)
        for prefix, module in model.named_modules()
        for own, packing in packings_of(module).items()
    }


def plain_names(model: nn.Module) -> set[str]:
    """Return the names of all parameters; quantized weights have their original name."""
    held = held_of(model)
    packed = {packed for name in held for packed in packed_names(name)}
    return {name for name, _ in model.named_parameters()} - packed | set(held)


def load_held(model: nn.Module, load: Callable[[], set[str]]) -> set[str]:
    """Run `load` with unquantized parameters in place of quantized ones, then quantize what it loaded.

    `load` fills parameters of `model` from files and returns the names that the files lack. Until it returns, a rank
    holds its local shards unquantized.
    """
    held = list(held_of(model).values())
    parts = [_take_out(each) for each in held]
    missing = load()
    for i, each in enumerate(held):
        _put_back(each, parts[i])
    return missing


def _take_out(held: Held) -> tuple[nn.Parameter, ...]:
    """Replace codes and scales by an unquantized parameter on meta with the same sharding."""
    names = packed_names(held.own)
    parts = tuple(held.module.get_parameter(name) for name in names)
    for name in names:
        delattr(held.module, name)
    plain = resized(parts[0], 1, held.packing.shape[1], held.packing.dtype)
    held.module.register_parameter(held.own, nn.Parameter(plain, requires_grad=False))
    return parts


def _put_back(held: Held, parts: tuple[nn.Parameter, ...]) -> None:
    """Replace the unquantized parameter by codes and scales, quantizing its value if it was loaded."""
    plain = held.module.get_parameter(held.own)
    delattr(held.module, held.own)
    values: Iterable[torch.Tensor] = parts
    if not plain.is_meta:  # otherwise the files lack it, and it is initialized later
        packed = held.packing.pack(local_shard(plain))
        values = [with_local(part, local) for part, local in zip(parts, packed, strict=True)]
    for name, value in zip(packed_names(held.own), values, strict=True):
        held.module.register_parameter(name, nn.Parameter(value.detach(), requires_grad=False))


def quantized(model: nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield full tensors by name, with codes and scales in place of weights that `model` has quantized."""
    held = held_of(model)
    for name, whole in weights:
        if (found := held.get(name)) is None:
            yield name, whole
        else:
            yield from zip(packed_names(name), found.packing.pack(whole.to(found.packing.dtype)), strict=True)
