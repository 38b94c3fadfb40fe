"""Frozen weights in 4 or 8 bits: blocks of 64 numbers with a scale each, made whole again only where they are used.

`nf4` is the data type of QLoRA (Dettmers et al., 2023): 16 values that are equally likely for normally distributed
weights, times the largest magnitude of the block. `int8` has 255 evenly spaced values instead.

Codes and scales are plain tensors of whole numbers, so FSDP2 shards and gathers them like any other parameter and casts
nothing. Blocks go along dim 1, which no layout splits (linear layers are sharded along dim 0, experts along dim 0 or
2): a shard of quantised weights is what quantising the shard gives, and every layout computes with the same numbers.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from omnizoo.ops.torch_private import without_function_modes

BLOCK = 64
PIECE = 2**24  # numbers that are worked on at a time: what is made on the way is several times as large as they are
# The published values, as bitsandbytes has them.
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
PACKINGS = "_omnizoo_packings"  # where a module keeps what its quantised weights were

Multiply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass
class Table:
    """The values of codes, on the device where they were last asked for: bringing them there each time would make the
    host wait."""

    values: torch.Tensor = field(default_factory=lambda: torch.tensor(NF4))

    def on(self, device: torch.device) -> torch.Tensor:
        if self.values.device != device:
            self.values = torch.tensor(NF4, device=device)
        return self.values


@dataclass(frozen=True)
class Packing:
    """How a weight of `shape` and `dtype` is held."""

    kind: str  # nf4 or int8
    shape: torch.Size
    dtype: torch.dtype
    table: Table

    @property
    def shapes(self) -> tuple[list[int], list[int]]:
        """Of codes and scales."""
        first, size, *rest = self.shape
        blocks = -(-size // BLOCK)
        return [first, blocks * BLOCK // (2 if self.kind == "nf4" else 1), *rest], [first, blocks, *rest]

    def pack(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes (uint8 or int8) and scales (the bits of fp32 numbers) of `weight`, which may be a shard."""
        with without_function_modes():  # in a run in fp64, fp32 would not mean fp32
            parts = [self._pack(piece) for piece in weight.detach().split(_rows(weight))]
            codes, scales = (torch.cat(part) for part in zip(*parts, strict=True))
        return codes, scales

    def unpack(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        shape = (codes.shape[0], self.shape[1], *codes.shape[2:])
        weight = torch.empty(shape, dtype=self.dtype, device=codes.device)
        rows = _rows(weight)
        with without_function_modes():
            for whole, *packed in zip(weight.split(rows), codes.split(rows), scales.split(rows), strict=True):
                whole.copy_(self._unpack(*packed)[:, : self.shape[1]])
        return weight

    def _pack(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first, size, *rest = weight.shape
        weight = weight.float()
        if missing := -size % BLOCK:
            weight = torch.cat([weight, weight.new_zeros(first, missing, *rest)], 1)
        blocks = weight.view(first, -1, BLOCK, *rest)
        scales = blocks.abs().amax(2)
        scaled = (blocks / scales.where(scales > 0, 1.0).unsqueeze(2)).view(weight.shape)
        if self.kind == "int8":
            return (scaled * 127).round().to(torch.int8), scales.view(torch.int32)
        values = self.table.on(weight.device)
        codes = torch.bucketize(scaled, (values[1:] + values[:-1]) / 2, out_int32=True).to(torch.uint8)
        low, high = codes.chunk(2, 1)
        return low | (high << 4), scales.view(torch.int32)

    def _unpack(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        if self.kind == "int8":
            scaled = codes.float() / 127
        else:
            values = self.table.on(codes.device)
            scaled = torch.cat([values[half.int()] for half in (codes & 15, codes >> 4)], 1)
        blocks = scaled.view(len(codes), -1, BLOCK, *codes.shape[2:])
        return (blocks * scales.view(torch.float32).unsqueeze(2)).view(scaled.shape)


def _rows(weight: torch.Tensor) -> int:
    """How many along dim 0 are worked on at a time."""
    return max(1, PIECE // max(1, weight[:1].numel()))


@dataclass(frozen=True)
class Packed:
    """A quantised weight as rows are multiplied with it."""

    codes: torch.Tensor
    scales: torch.Tensor
    packing: Packing
    is_transposed: bool  # it is stored [..., leaving, entering], as linear layers are

    @property
    def dtype(self) -> torch.dtype:
        return self.packing.dtype

    def __len__(self) -> int:
        return len(self.codes)

    def whole(self) -> torch.Tensor:
        """`[..., entering, leaving]`."""
        weight = self.packing.unpack(self.codes, self.scales)
        return weight.transpose(-1, -2) if self.is_transposed else weight


def multiply(rows: torch.Tensor, weight: Packed, by: Multiply) -> torch.Tensor:
    """`by(rows, weight)`, which is linear in rows. Backward makes the weight whole once more: it is not kept."""
    out: torch.Tensor = _Multiply.apply(rows, weight.codes, weight.scales, weight, by)  # type: ignore[no-untyped-call]
    return out


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, weight: Packed, by: Multiply
    ) -> torch.Tensor:
        ctx.save_for_backward(codes, scales)
        ctx.packing, ctx.is_transposed, ctx.by = weight.packing, weight.is_transposed, by
        return by(rows, weight.whole())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        codes, scales = ctx.saved_tensors
        weight = Packed(codes, scales, ctx.packing, ctx.is_transposed)
        return ctx.by(grad, weight.whole().transpose(-1, -2)), None, None, None, None


# On modules: the weight `own` becomes two parameters, `own_codes` and `own_scales`.


def packed_names(own: str) -> tuple[str, str]:
    return f"{own}_codes", f"{own}_scales"


def packings_of(module: nn.Module) -> dict[str, Packing]:
    """Of the module's own quantised weights, by the name that each had."""
    found: dict[str, Packing] = vars(module).get(PACKINGS, {})
    return found


def own_weights(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The module's own parameters; of quantised ones the shape of what they stand for, on meta."""
    packings = packings_of(module)
    for own, packing in packings.items():
        yield own, torch.empty(packing.shape, dtype=packing.dtype, device="meta")
    held = {name for own in packings for name in packed_names(own)}
    yield from ((name, p) for name, p in module.named_parameters(recurse=False) if name not in held)


def count_weights(model: nn.Module) -> int:
    """How many numbers the parameters of `model` stand for, tied ones once."""
    total = sum(parameter.numel() for parameter in model.parameters())
    for module in model.modules():
        for own, packing in packings_of(module).items():
            held = sum(module.get_parameter(name).numel() for name in packed_names(own))
            total += packing.shape.numel() - held
    return total
