"""Quantize frozen weights to 4 or 8 bits and dequantize them for each use. Blocks of 64 numbers share a scale.

`nf4` is the data type of QLoRA (Dettmers et al., 2023). A code stands for one of 16 values. These values are equally
likely if weights are normally distributed. The scale is the largest magnitude of the block. `int8` has 255 evenly
spaced values instead.

Codes and scales are plain integer tensors, so FSDP2 shards and gathers them like any other parameter and does not cast
them. Blocks run along dim 1. No layout shards this dim, because linear layers are sharded along dim 0, and experts
along dim 0 or 2. A quantized shard therefore equals the shard of the quantized weight, so results do not depend on the
layout.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from omnizoo.ops.torch_private import without_function_modes

BLOCK = 64  # number of values that share a scale
CHUNK = 2**24  # number of values that are converted at a time, because temporary tensors are several times larger
# The published values, as in bitsandbytes.
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
PACKINGS = "_omnizoo_packings"  # name of the module attribute with a dict from weight name to `Packing`

Multiply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass
class Nf4Table:
    """The values of nf4 codes, cached on the device of the last use. A copy for each use would cause a host sync."""

    values: torch.Tensor = field(default_factory=lambda: torch.tensor(NF4))

    def on(self, device: torch.device) -> torch.Tensor:
        """Return the 16 values on `device`."""
        if self.values.device != device:
            self.values = torch.tensor(NF4, device=device)
        return self.values


@dataclass(frozen=True)
class Packing:
    """Quantization format of a weight."""

    kind: str  # nf4 or int8
    shape: torch.Size  # shape of the full weight
    dtype: torch.dtype  # dtype of the dequantized weight
    table: Nf4Table

    @property
    def shapes(self) -> tuple[list[int], list[int]]:
        """The shapes of the full codes and scales."""
        rows, columns, *rest = self.shape
        num_blocks = -(-columns // BLOCK)
        codes_per_byte = 2 if self.kind == "nf4" else 1
        codes = [rows, num_blocks * BLOCK // codes_per_byte, *rest]
        scales = [rows, num_blocks, *rest]
        return codes, scales

    def pack(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantize `weight`, which may be a shard.

        Returns:
            The codes (uint8 or int8) and the scales (fp32 numbers, viewed as int32).
        """
        with without_function_modes():  # in float64 runs, a mode replaces fp32 with float64, but scales must be fp32
            packed = [self._pack(chunk) for chunk in weight.detach().split(_rows(weight))]
            codes = torch.cat([chunk_codes for chunk_codes, _ in packed])
            scales = torch.cat([chunk_scales for _, chunk_scales in packed])
        return codes, scales

    def unpack(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Return the dequantized weight, or its shard if codes and scales are shards."""
        shape = (codes.shape[0], self.shape[1], *codes.shape[2:])
        weight = torch.empty(shape, dtype=self.dtype, device=codes.device)
        rows = _rows(weight)
        with without_function_modes():
            chunks = zip(weight.split(rows), codes.split(rows), scales.split(rows), strict=True)
            for chunk, chunk_codes, chunk_scales in chunks:
                chunk.copy_(self._unpack(chunk_codes, chunk_scales)[:, : self.shape[1]])
        return weight

    def _pack(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantize a few rows (see `pack`)."""
        rows, columns, *rest = weight.shape
        weight = weight.float()
        padding = -columns % BLOCK
        if padding:
            weight = torch.cat([weight, weight.new_zeros(rows, padding, *rest)], 1)
        blocks = weight.view(rows, -1, BLOCK, *rest)
        scales = blocks.abs().amax(2)
        scaled = (blocks / scales.where(scales > 0, 1.0).unsqueeze(2)).view(weight.shape)
        if self.kind == "int8":
            return (scaled * 127).round().to(torch.int8), scales.view(torch.int32)
        values = self.table.on(weight.device)
        midpoints = (values[1:] + values[:-1]) / 2
        codes = torch.bucketize(scaled, midpoints, out_int32=True).to(torch.uint8)
        low, high = codes.chunk(2, 1)
        return low | (high << 4), scales.view(torch.int32)

    def _unpack(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Dequantize a few rows in fp32, including the padding of the last block."""
        if self.kind == "int8":
            scaled = codes.float() / 127
        else:
            values = self.table.on(codes.device)
            scaled = torch.cat([values[half.int()] for half in (codes & 15, codes >> 4)], 1)
        blocks = scaled.view(len(codes), -1, BLOCK, *codes.shape[2:])
        return (blocks * scales.view(torch.float32).unsqueeze(2)).view(scaled.shape)


def _rows(weight: torch.Tensor) -> int:
    """Return the number of rows along dim 0 that are converted at a time."""
    return max(1, CHUNK // max(1, weight[:1].numel()))


@dataclass(frozen=True)
class Packed:
    """A quantized weight that can be multiplied by rows."""

    codes: torch.Tensor
    scales: torch.Tensor
    packing: Packing
    is_transposed: bool  # whether the weight is stored as [..., out_features, in_features], as in linear layers

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the dequantized weight."""
        return self.packing.dtype

    def __len__(self) -> int:
        return len(self.codes)

    def dequantize(self) -> torch.Tensor:
        """Return the dequantized weight, `[..., in_features, out_features]`."""
        weight = self.packing.unpack(self.codes, self.scales)
        return weight.transpose(-1, -2) if self.is_transposed else weight


def multiply(rows: torch.Tensor, weight: Packed, matmul: Multiply) -> torch.Tensor:
    """Return `matmul(rows, dequantized weight)`, where `matmul` is linear in `rows`.

    Backward dequantizes the weight again, so that it is not kept in memory.
    """
    out: torch.Tensor = _Multiply.apply(rows, weight.codes, weight.scales, weight, matmul)  # type: ignore[no-untyped-call]
    return out


class _Multiply(torch.autograd.Function):
    """Implements `multiply`. The weight gets no gradient."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, weight: Packed, matmul: Multiply
    ) -> torch.Tensor:
        ctx.save_for_backward(codes, scales)
        ctx.packing = weight.packing
        ctx.is_transposed = weight.is_transposed
        ctx.matmul = matmul
        return matmul(rows, weight.dequantize())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        codes, scales = ctx.saved_tensors
        weight = Packed(codes, scales, ctx.packing, ctx.is_transposed)
        grad_rows = ctx.matmul(grad, weight.dequantize().transpose(-1, -2))
        return grad_rows, None, None, None, None


# In the modules that the functions below work with, each quantized weight `<name>` is replaced by the parameters
# `<name>_codes` and `<name>_scales`.


def packed_names(weight_name: str) -> tuple[str, str]:
    """Return the names of the parameters with the codes and the scales of a weight."""
    return f"{weight_name}_codes", f"{weight_name}_scales"


def packings_of(module: nn.Module) -> dict[str, Packing]:
    """Return the packings of the quantized weights of `module`, without its submodules, keyed by weight name."""
    packings: dict[str, Packing] = vars(module).get(PACKINGS, {})
    return packings


def direct_weights(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the names and parameters of `module`, without its submodules.

    For a quantized weight, yield an empty tensor on meta with the shape and dtype of the full weight.
    """
    packings = packings_of(module)
    for name, packing in packings.items():
        yield name, torch.empty(packing.shape, dtype=packing.dtype, device="meta")

    codes_and_scales = {packed_name for name in packings for packed_name in packed_names(name)}
    for name, parameter in module.named_parameters(recurse=False):
        if name not in codes_and_scales:
            yield name, parameter


def count_weights(model: nn.Module) -> int:
    """Return the number of weights of `model`.

    Tied weights count once, and quantized weights count with their full shape.
    """
    total = sum(parameter.numel() for parameter in model.parameters())
    for module in model.modules():
        for name, packing in packings_of(module).items():
            num_stored = sum(module.get_parameter(packed_name).numel() for packed_name in packed_names(name))
            total += packing.shape.numel() - num_stored
    return total
