"""Initial weights as a stream of whole tensors, each a function of (seed, module name) alone.

The model's own rules draw them, one unit of the model in memory at a time, with the generator reseeded per module: so
every layout and every rank sees the same values, and no rank ever holds the whole model.
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from omnizoo.models.hf_private import init_module, modules_children_first


def initial_weights(
    skeleton: nn.Module, units: Sequence[str], seed: int, wanted: set[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of the `wanted` parameters and buffers of `skeleton`, a model on meta that is never sharded.

    `units` names the modules to have in memory one at a time (the blocks); the rest of the model is the last unit.
    A unit is drawn whole, since some modules rescale what their children drew.
    """
    names = {module: name for name, module in skeleton.named_modules()}
    unit_of = {module: unit for unit in units for module in skeleton.get_submodule(unit).modules()}
    order = list(modules_children_first(skeleton))
    for unit in [*units, None]:
        members = [(module, owner) for module, owner in order if unit_of.get(module) == unit]
        if wanted.isdisjoint(name for module, _ in members for name, _ in _own_tensors(module, names[module])):
            continue
        with _in_memory([module for module, _ in members]), torch.random.fork_rng(devices=[]), torch.no_grad():
            for module, owner in members:
                torch.manual_seed(_seed_of(seed, names[module]))
                init_module(owner, module)
            for module, _ in members:
                yield from ((n, t) for n, t in _own_tensors(module, names[module]) if n in wanted)


def _own_tensors(module: nn.Module, prefix: str) -> list[tuple[str, torch.Tensor]]:
    own = [*module.named_parameters(prefix, recurse=False), *module.named_buffers(prefix, recurse=False)]
    return [(name, tensor) for name, tensor in own]


@contextmanager
def _in_memory(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Give the modules' own tensors memory on the host for the length of the block, tied ones one memory."""
    places = [(module, name, tensor) for module in modules for name, tensor in _own_tensors(module, "")]
    real: dict[int, torch.Tensor] = {}
    for _, _, tensor in places:
        # Drawn in fp32 whatever the precision of the run: fp64 widens the same numbers, it does not draw others.
        drawn = isinstance(tensor, nn.Parameter)
        dtype = torch.float32 if drawn and tensor.dtype == torch.float64 else tensor.dtype
        empty = torch.empty_like(tensor, device="cpu", dtype=dtype, requires_grad=False)
        real[id(tensor)] = nn.Parameter(empty) if drawn else empty
    for module, name, tensor in places:
        setattr(module, name, real[id(tensor)])
    try:
        yield
    finally:
        for module, name, tensor in places:
            setattr(module, name, tensor)


def _seed_of(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "big") >> 1
