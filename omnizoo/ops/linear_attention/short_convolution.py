"""A short causal depthwise convolution over runs of tokens.

A run is a range of consecutive tokens of one sample. Runs are concatenated, and `lengths` has the number of tokens of
each. Runs are independent: the caller gives the last tokens before each run.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from omnizoo.ops.device import to_device
from omnizoo.ops.linear_attention.kernels import convolution_kernel

Indices = npt.NDArray[np.int64]


def convolve(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, lengths: Sequence[int], before: torch.Tensor
) -> torch.Tensor:
    """Convolve each channel of each run with its filter.

    Args:
        x: `[tokens, channels]`, concatenated runs.
        weight: `[channels, taps]`.
        bias: `[channels]`.
        lengths: Number of tokens of each run.
        before: `[runs, taps - 1, channels]`, the tokens before each run; zeros at the start of a sample.

    Returns:
        The output, `[tokens, channels]`.
    """
    taps = weight.shape[1]
    if not len(x):
        return x + 0 * (
            weight.sum() + before.sum() + (0 if bias is None else bias.sum())
        )  # depends on every input, so that each gets a gradient
    rows, kept = (to_device(torch.from_numpy(index), x.device) for index in _with_room(tuple(lengths), taps - 1))
    wide = torch.cat([x, before.flatten(0, 1)])[rows]
    kernel = convolution_kernel(x, weight)
    if kernel is not None:
        return kernel(wide.T[None], weight, bias)[0].T[kept + taps - 1]
    out = F.conv1d(wide.T.to(weight.dtype)[None], weight[:, None], bias, groups=len(weight))[0].T
    return out[kept].to(x.dtype)


@lru_cache(maxsize=64)
def _with_room(lengths: tuple[int, ...], room: int) -> tuple[Indices, Indices]:
    """Return the row order that places the `room` preceding rows in front of each run, and the outputs to keep.

    The rows index the tokens followed by the preceding rows of all runs. The second array has the indices of the tokens
    in the output of a convolution without padding.
    """
    tokens, rows, kept, start, at = sum(lengths), [], [], 0, 0
    for number, length in enumerate(lengths):
        first = tokens + number * room
        rows += [np.arange(first, first + room), np.arange(start, start + length)]
        kept.append(np.arange(at, at + length))
        start, at = start + length, at + room + length
    none = np.empty(0, np.int64)
    return np.concatenate([none, *rows]), np.concatenate([none, *kept])
