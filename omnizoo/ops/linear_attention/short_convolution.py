"""A short causal depthwise convolution over runs of tokens.

A run is a range of consecutive tokens of one sample. Runs are concatenated, and `lengths` contains the number of tokens
of each run. Runs are independent, so the caller must pass the last tokens before each run.
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
        # Without tokens, the output must still depend on every input, so that every input gets a gradient.
        bias_sum = 0 if bias is None else bias.sum()
        return x + 0 * (weight.sum() + before.sum() + bias_sum)

    row_index, output_index = _padded_order(tuple(lengths), taps - 1)
    rows = to_device(torch.from_numpy(row_index), x.device)
    outputs = to_device(torch.from_numpy(output_index), x.device)
    padded = torch.cat([x, before.flatten(0, 1)])[rows]
    kernel = convolution_kernel(x, weight)
    if kernel is not None:
        return kernel(padded.T[None], weight, bias)[0].T[outputs + taps - 1]
    out = F.conv1d(padded.T.to(weight.dtype)[None], weight[:, None], bias, groups=len(weight))[0].T
    return out[outputs].to(x.dtype)


@lru_cache(maxsize=64)
def _padded_order(lengths: tuple[int, ...], padding: int) -> tuple[Indices, Indices]:
    """Return the row order that puts the `padding` preceding rows before each run, and the indices of outputs to keep.

    The indices of rows refer to all tokens, followed by the preceding rows of all runs. The second array contains the
    indices of the tokens in the output of a convolution without padding.
    """
    empty = np.empty(0, np.int64)
    rows = [empty]
    outputs = [empty]
    num_tokens = sum(lengths)
    token = 0
    output = 0
    for run, length in enumerate(lengths):
        first_preceding = num_tokens + run * padding
        rows.append(np.arange(first_preceding, first_preceding + padding))
        rows.append(np.arange(token, token + length))
        outputs.append(np.arange(output, output + length))
        token += length
        output += padding + length
    return np.concatenate(rows), np.concatenate(outputs)
