"""Stochastic rounding to bf16: up or down by chance, so that on average nothing is lost.

Chance is a hash of where an element is in its whole tensor, of a key and of the step, not of a generator: every layout
rounds alike, and so does a run that goes on from a checkpoint.
"""

import torch


def round_to_bf16(values: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, key: int) -> torch.Tensor:
    """`values [R, C]`, of which `rows [R]` and `columns [C]` say (as int32) where they are in the whole."""
    bits = values.to(torch.float32).view(torch.int32)
    noise = _mixed(_mixed(rows + _int32(key))[:, None] + columns) & 0xFFFF
    # The lower half is cut off; the noise makes it carry as often as it is large.
    return ((bits + noise) & -0x10000).view(torch.float32).to(torch.bfloat16)


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """The finishing of MurmurHash3 (public domain): every bit that goes in reaches every bit that comes out."""
    x = x ^ (x >> 16 & 0xFFFF)
    x = x * _int32(0x85EBCA6B)
    x = x ^ (x >> 13 & 0x7FFFF)
    x = x * _int32(0xC2B2AE35)
    return x ^ (x >> 16 & 0xFFFF)


def _int32(value: int) -> int:
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >> 31 else value
