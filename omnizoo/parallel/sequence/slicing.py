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
        indices = [np.empty(0, np.int64)]
        for start, sample_runs in zip(starts, runs, strict=False):
            for run in sample_runs:
                first = start + run.position
                indices.append(np.arange(first, first + run.length))
        tokens = np.concatenate(indices)
        slices += [part.astype(np.int64) for part in np.array_split(tokens, ulysses)]
    return slices


def ring_runs(lengths: Sequence[int], ring: int) -> list[list[list[TokenRun]]]:
    """Return, for each ring rank and sample, the runs of tokens that the rank holds, in order.

    A sample is cut into 2 x ring chunks, and rank r holds chunk r from the start and chunk r from the end. In causal
    attention, early tokens attend to few tokens and late tokens to many, so this balances the work within every sample.
    """
    num_tokens = [0] * ring  # number of tokens of each rank
    num_chunks = 2 * ring
    runs: list[list[list[TokenRun]]] = [[] for _ in range(ring)]
    for length in lengths:
        base, remainder = divmod(length, num_chunks)
        sizes = [base] * num_chunks
        # Assign the remainder to the ranks with the fewest tokens, so that counts differ by at most 1.
        order = sorted(range(ring), key=num_tokens.__getitem__)
        chunk_order = order + [num_chunks - 1 - rank for rank in order]
        for chunk in chunk_order[:remainder]:
            sizes[chunk] += 1

        position = [0, *accumulate(sizes)]
        for rank in range(ring):
            sample_runs = []
            for chunk in (rank, num_chunks - 1 - rank):
                if sizes[chunk]:
                    sample_runs.append(TokenRun(num_tokens[rank], position[chunk], sizes[chunk]))
                    num_tokens[rank] += sizes[chunk]
            runs[rank].append(sample_runs)
    return runs
