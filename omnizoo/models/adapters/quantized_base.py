"""Quantize the frozen base model of an adapter to 4 or 8 bits (`model.adapter.base`), and compute with its weights.

Linear layers in the language model's blocks and fused experts are quantized, because they contain most weights of a
large model. Embeddings, heads, routers, norms, biases, encoders, decoders and trained weights keep their precision.
"""

from collections.abc import Collection
from types import MethodType
from typing import Any

import torch
from torch import nn

from omnizoo.config.errors import UserError
from omnizoo.models.adapters.lora import KEY, attached, linear_of_blocks, set_base
from omnizoo.models.hf_private import count_owners, kept_in_fp32
from omnizoo.ops.quantization import PACKINGS, Nf4Table, Packed, Packing, multiply, packed_names, packings_of


def quantize_base(model: nn.Module, experts: Collection[str]) -> None:
    """Replace the base weights of `model` with quantized parameters, as its adapter settings specify.

    `model` is on meta and not sharded. `experts` are the paths of modules with fused experts.
    """
    adapter = attached(model)
    if adapter is None or adapter.settings.base is None:
        return
    if adapter.settings.kind == "dora":
        raise UserError(
            f"{KEY}.base: {adapter.settings.base} is not supported with {KEY}.kind: dora. Use lora or rslora."
        )
    owners = count_owners(model)
    in_fp32 = {id(parameter) for parameter in kept_in_fp32(model).values()}
    table = Nf4Table()

    def quantize(module: nn.Module, attribute: str) -> bool:
        """Replace a weight with empty quantized parameters. Return False if the weight keeps its precision."""
        weight = module.get_parameter(attribute)
        if weight.requires_grad or owners[id(weight)] > 1 or id(weight) in in_fp32:
            return False
        packing = Packing(adapter.settings.base or "", weight.shape, weight.dtype, table)
        vars(module).setdefault(PACKINGS, {})[attribute] = packing
        delattr(module, attribute)
        code_dtype = torch.int8 if packing.kind == "int8" else torch.uint8
        dtypes = (code_dtype, torch.int32)
        for name, shape, dtype in zip(packed_names(attribute), packing.shapes, dtypes, strict=True):
            empty = torch.empty(shape, dtype=dtype, device=weight.device)
            module.register_parameter(name, nn.Parameter(empty, requires_grad=False))
        return True

    num_quantized = 0
    for name in linear_of_blocks(model):
        module = model.get_submodule(name)
        if type(module) is nn.Linear and quantize(module, "weight"):
            set_base(module, MethodType(_linear, module))
            num_quantized += 1
    for name in experts:
        module = model.get_submodule(name)
        parameters = dict(module.named_parameters(recurse=False))
        for attribute, parameter in parameters.items():
            if parameter.ndim == 3 and not parameter.requires_grad:
                num_quantized += quantize(module, attribute)
    if not num_quantized:
        raise UserError(
            f"{KEY}.base: {adapter.settings.base} has no effect, because the blocks of this model have no weights that "
            "can be quantized. Remove the key."
        )


def packed_weight(module: Any, attribute: str, is_transposed: bool) -> Packed | None:
    """Return the quantized weight `attribute` of `module`, or None if it is not quantized."""
    packing = packings_of(module).get(attribute)
    if packing is None:
        return None
    codes, scales = (local_part(getattr(module, name)) for name in packed_names(attribute))
    return Packed(codes, scales, packing, is_transposed)


def local_part(parameter: torch.Tensor) -> torch.Tensor:
    """Return the local shard of a parameter. With expert parallelism, the parameter is a DTensor."""
    to_local = getattr(parameter, "to_local", None)
    return parameter if to_local is None else to_local()


def _linear(module: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """Compute the output of a linear layer with a quantized weight."""
    weight = packed_weight(module, "weight", is_transposed=True)
    assert weight is not None
    out = multiply(x, weight, torch.matmul)
    return out if module.bias is None else out + module.bias
