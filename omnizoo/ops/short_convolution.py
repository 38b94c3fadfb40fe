"""A short causal convolution of each channel by itself, on runs of tokens.

A run is a stretch of one sample, `lengths` those of all runs, one after the other. Nothing passes from a run to the
next: the last tokens before each run are given.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from omnizoo.ops.device import to_device
from omnizoo.ops.state_kernels import convolution_kernel

Indices = npt.NDArray[np.int64]


def convolve(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, lengths: Sequence[int], before: torch.Tensor
) -> torch.Tensor:
    """Of each channel by itself: `x [T, C]`, `weight [C, K]`, and `before [N, K - 1, C]`, the tokens before each run
    (zeros where a sample begins). Returns `[T, C]`."""
    taps = weight.shape[1]
    if not len(x):
        return x + 0 * (
            weight.sum() + before.sum() + (0 if bias is None else bias.sum())
        )  # for gradients to reach them
    rows, kept = (to_device(torch.from_numpy(index), x.device) for index in _with_room(tuple(lengths), taps - 1))
    wide = torch.cat([x, before.flatten(0, 1)])[rows]
    kernel = convolution_kernel(x, weight)
    if kernel is not None:
        return kernel(wide.T[None], weight, bias)[0].T[kept + taps - 1]
    out = F.conv1d(wide.T.to(weight.dtype)[None], weight[:, None], bias, groups=len(weight))[0].T
    return out[kept].to(x.dtype)


@lru_cache(maxsize=64)
def _with_room(lengths: tuple[int, ...], room: int) -> tuple[Indices, Indices]:
    """Rows of tokens and of what is before them, such that each run has its `room` rows in front; and which outputs of
    a convolution over them are those of the tokens."""
    tokens, rows, kept, start, at = sum(lengths), [], [], 0, 0
    for number, length in enumerate(lengths):
        first = tokens + number * room
        rows += [np.arange(first, first + room), np.arange(start, start + length)]
        kept.append(np.arange(at, at + length))
        start, at = start + length, at + room + length
    none = np.empty(0, np.int64)
    return np.concatenate([none, *rows]), np.concatenate([none, *kept])
