"""Assign the tokens of a pack to sequence-parallel ranks."""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from omnizoo.ops.attention.blocks import TokenRun


def slice_tokens(lengths: Sequence[int], ring: int, ulysses: int) -> list[npt.NDArray[np.int64]]:
    """Return, for each sequence-parallel rank, the indices of its tokens in a pack of samples with these lengths.

    The token counts of any two ranks differ by at most 1.
    """
    starts = [0, *accumulate(lengths)]
    slices: list[npt.NDArray[np.int64]] = []
    for runs in ring_runs(lengths, ring):
        pieces = [
            np.arange(start + run.position, start + run.position + run.length)
            for start, sample in zip(starts, runs, strict=False)
            for run in sample
        ]
        tokens = np.concatenate(pieces) if pieces else np.empty(0, np.int64)
        slices += [piece.astype(np.int64) for piece in np.array_split(tokens, ulysses)]
    return slices


def ring_runs(lengths: Sequence[int], ring: int) -> list[list[list[TokenRun]]]:
    """Return, for each ring rank and sample, the runs of tokens that the rank holds, in order.

    A sample is cut into 2 x ring chunks, and rank r holds chunk r from the start and chunk r from the end. In causal
    attention, early tokens attend to few tokens and late ones to many, so this balances the work within every sample.
    """
    held = [0] * ring
    runs: list[list[list[TokenRun]]] = [[] for _ in range(ring)]
    for length in lengths:
        base, rest = divmod(length, 2 * ring)
        sizes = [base] * (2 * ring)
        # The remainder goes to the ranks with the fewest tokens, so that counts differ by at most 1.
        order = sorted(range(ring), key=held.__getitem__)
        for chunk in [*order, *(2 * ring - 1 - rank for rank in order)][:rest]:
            sizes[chunk] += 1
        position = [0, *accumulate(sizes)]
        for rank in range(ring):
            runs[rank].append([])
            for chunk in (rank, 2 * ring - 1 - rank):
                if sizes[chunk]:
                    runs[rank][-1].append(TokenRun(held[rank], position[chunk], sizes[chunk]))
                    held[rank] += sizes[chunk]
    return runs
