"""Weights into a model whose base is quantised: each is read or drawn as it is, quantised, and let go."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from omnizoo.ops.quantised import Packing, packed_names, packings_of
from omnizoo.parallel.shard import local_of, resized, with_local


@dataclass(frozen=True)
class Held:
    """A quantised weight of a model."""

    module: nn.Module
    own: str
    packing: Packing


def held_of(model: nn.Module) -> dict[str, Held]:
    """By the name that each weight has in the files."""
    return {
        f"{prefix}.{own}": Held(module, own, packing)
        for prefix, module in model.named_modules()
        for own, packing in packings_of(module).items()
    }


def plain_names(model: nn.Module) -> set[str]:
    """Names of all parameters, those of quantised ones as they were."""
    held = held_of(model)
    packed = {packed for name in held for packed in packed_names(name)}
    return {name for name, _ in model.named_parameters()} - packed | set(held)


def load_held(model: nn.Module, load: Callable[[], set[str]]) -> set[str]:
    """Run `load`, which fills parameters of `model` from files and returns what they lack, with quantised ones as they
    were; then quantise what it brought. Until then a rank holds its shards of them in full."""
    held = list(held_of(model).values())
    parts = [_take_out(each) for each in held]
    missing = load()
    for i, each in enumerate(held):
        _put_back(each, parts[i])
    return missing


def _take_out(held: Held) -> tuple[nn.Parameter, ...]:
    """Swap codes and scales for a parameter on meta as the files have it, sharded alike."""
    names = packed_names(held.own)
    parts = tuple(held.module.get_parameter(name) for name in names)
    for name in names:
        delattr(held.module, name)
    plain = resized(parts[0], 1, held.packing.shape[1], held.packing.dtype)
    held.module.register_parameter(held.own, nn.Parameter(plain, requires_grad=False))
    return parts


def _put_back(held: Held, parts: tuple[nn.Parameter, ...]) -> None:
    plain = held.module.get_parameter(held.own)
    delattr(held.module, held.own)
    values: Iterable[torch.Tensor] = parts
    if not plain.is_meta:  # else the files lack it, and it will be drawn
        packed = held.packing.pack(local_of(plain))
        values = [with_local(part, local) for part, local in zip(parts, packed, strict=True)]
    for name, value in zip(packed_names(held.own), values, strict=True):
        held.module.register_parameter(name, nn.Parameter(value.detach(), requires_grad=False))


def quantised(model: nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Whole tensors by name, with codes and scales for those that `model` holds quantised."""
    held = held_of(model)
    for name, whole in weights:
        if (found := held.get(name)) is None:
            yield name, whole
        else:
            yield from zip(packed_names(name), found.packing.pack(whole.to(found.packing.dtype)), strict=True)
