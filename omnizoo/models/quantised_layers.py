"""The frozen base of an adapter in 4 or 8 bits (`model.adapter.base`): which weights, and how layers compute with them.

Linear layers of the language model's blocks and fused experts are quantised, which are nearly all of a large model.
Embeddings, heads, routers, norms, biases, encoders and decoders keep their precision, and so does what is trained.
"""

from collections import Counter
from collections.abc import Collection
from types import MethodType
from typing import Any

import torch
from torch import nn

from omnizoo.config.errors import UserError
from omnizoo.models.adapter import KEY, attached, linear_of_blocks, set_base
from omnizoo.models.hf_private import kept_in_fp32
from omnizoo.ops.quantised import PACKINGS, Packed, Packing, Table, multiply, packed_names, packings_of


def quantise_base(model: nn.Module, experts: Collection[str]) -> None:
    """Let `model` (on meta, before it is sharded) hold its base as its adapter says; `experts` are modules with fused
    experts that are computed by `models.experts`."""
    found = attached(model)
    if found is None or found.settings.base is None:
        return
    if found.settings.kind == "dora":
        raise UserError(f"{KEY}.base: {found.settings.base} cannot be had with kind: dora; use lora or rslora")
    owners = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    kept = {id(parameter) for parameter in kept_in_fp32(model).values()}
    table = Table()

    def hold(module: nn.Module, own: str) -> bool:
        weight = module.get_parameter(own)
        if weight.requires_grad or owners[id(weight)] > 1 or id(weight) in kept:
            return False
        packing = Packing(found.settings.base or "", weight.shape, weight.dtype, table)
        vars(module).setdefault(PACKINGS, {})[own] = packing
        delattr(module, own)
        codes = torch.int8 if packing.kind == "int8" else torch.uint8
        for name, shape, dtype in zip(packed_names(own), packing.shapes, (codes, torch.int32), strict=True):
            empty = torch.empty(shape, dtype=dtype, device=weight.device)
            module.register_parameter(name, nn.Parameter(empty, requires_grad=False))
        return True

    held = 0
    for name in linear_of_blocks(model):
        module = model.get_submodule(name)
        if type(module) is nn.Linear and hold(module, "weight"):
            set_base(module, MethodType(_linear, module))
            held += 1
    for name in experts:
        module = model.get_submodule(name)
        matrices = [own for own, p in module.named_parameters(recurse=False) if p.ndim == 3 and not p.requires_grad]
        held += sum(hold(module, own) for own in matrices)
    if not held:
        raise UserError(f"{KEY}.base: {found.settings.base}, but the blocks of this model have no weights to quantise")


def packed_weight(module: Any, own: str, is_transposed: bool) -> Packed | None:
    """The quantised weight `own` of `module`; None if it is not."""
    packing = packings_of(module).get(own)
    if packing is None:
        return None
    codes, scales = (local_part(getattr(module, name)) for name in packed_names(own))
    return Packed(codes, scales, packing, is_transposed)


def local_part(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's experts: where they are spread over ranks, the parameter is a DTensor."""
    to_local = getattr(parameter, "to_local", None)
    return parameter if to_local is None else to_local()


def _linear(module: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    weight = packed_weight(module, "weight", is_transposed=True)
    assert weight is not None
    out = multiply(x, weight, torch.matmul)
    return out if module.bias is None else out + module.bias
