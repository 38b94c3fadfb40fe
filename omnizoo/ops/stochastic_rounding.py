"""Stochastic rounding to bf16. It is unbiased: the expected value of the result is the value before rounding.

The random bits are not the output of a generator, but a hash of a key and of the element's position in the full tensor.
Rounding is therefore the same in every layout, and the same in a resumed run as in an uninterrupted one.
"""

import torch


def round_to_bf16(values: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, key: int) -> torch.Tensor:
    """Round `values` to bf16 stochastically.

    Args:
        values: `[rows, columns]`, a part of the full tensor.
        rows: `[rows]`, int32, the index of each row in the full tensor.
        columns: `[columns]`, int32, the index of each column in the full tensor.
        key: Seed of the hash. It must differ between tensors and between steps.
    """
    bits = values.to(torch.float32).view(torch.int32)
    noise = _mixed(_mixed(rows + _int32(key))[:, None] + columns) & 0xFFFF
    # bf16 is the upper half of fp32. Random noise is added to the lower half, so it carries into the upper half with a
    # probability proportional to the lower half. Then the lower half is cleared.
    return ((bits + noise) & -0x10000).view(torch.float32).to(torch.bfloat16)


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """Apply the finalizer of MurmurHash3 (public domain), in which every input bit affects every output bit."""
    x = x ^ (x >> 16 & 0xFFFF)
    x = x * _int32(0x85EBCA6B)
    x = x ^ (x >> 13 & 0x7FFFF)
    x = x * _int32(0xC2B2AE35)
    return x ^ (x >> 16 & 0xFFFF)


def _int32(value: int) -> int:
    """Return the lower 32 bits of `value` as a signed integer."""
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >> 31 else value
