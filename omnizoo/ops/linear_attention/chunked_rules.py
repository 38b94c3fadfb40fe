"""Chunked linear attention in plain torch: the gated delta rule (Yang et al., 2024) and linear attention with decay.

The latter covers state space duality (Dao and Gu, 2024) and lightning attention.

A run is a range of consecutive tokens of one sample. Runs are concatenated, and `lengths` has the number of tokens of
each. No state is passed from one run to the next: the caller gives the state before each run. There must be at least
one token.

Shapes: T tokens, N runs, H heads, G groups of heads, K width of keys, V width of values.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from omnizoo.ops.device import to_device

Indices = npt.NDArray[np.int64]

CHUNK = 64  # tokens per chunk


@dataclass(frozen=True)
class Chunks:
    """Runs split into chunks, in the order of the recurrence: the first chunk of every run, then the second, etc."""

    steps: list[int]  # number of runs that have a first chunk, a second chunk, ...
    rows: torch.Tensor  # [chunks, CHUNK], index of each token; T for padding
    place: torch.Tensor  # [T], index of each token in the flattened `rows`
    order: torch.Tensor  # [N], runs from most to fewest chunks
    back: torch.Tensor  # [N], inverse of `order`

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """Split `[T, H, ...]` into chunks `[chunks, H, CHUNK, ...]`.

        Runs are padded with zeros, which leave the state unchanged: they neither decay it nor write to it.
        """
        return torch.cat([x, x.new_zeros(1, *x.shape[1:])])[self.rows].transpose(1, 2)

    def give(self, x: torch.Tensor) -> torch.Tensor:
        """Join chunks `[chunks, H, CHUNK, V]` to `[T, H, V]`."""
        out: torch.Tensor = x.transpose(1, 2).flatten(0, 1)[self.place]
        return out


@lru_cache(maxsize=64)
def _chunks(lengths: tuple[int, ...]) -> tuple[Indices, Indices, Indices, list[int]]:
    """Return `rows`, `place`, `order` and `steps` of `Chunks`, on the host."""
    counts = [-(-length // CHUNK) for length in lengths]
    order = np.argsort([-count for count in counts], kind="stable")
    starts = np.concatenate([[0], np.cumsum(lengths)])
    tokens = int(starts[-1])
    steps = [sum(count > step for count in counts) for step in range(max(counts, default=0))]
    rows = np.full((sum(steps), CHUNK), tokens)
    place = np.empty(tokens, np.int64)
    at = 0
    for step, active in enumerate(steps):
        for run in order[:active]:
            first = step * CHUNK
            size = min(CHUNK, lengths[run] - first)
            there = starts[run] + first + np.arange(size)
            rows[at, :size] = there
            place[there] = at * CHUNK + np.arange(size)
            at += 1
    return rows, place, order, steps


def _chunked(lengths: Sequence[int], device: torch.device) -> Chunks:
    """Return the chunks of runs of these lengths, on `device`."""
    rows, place, order, steps = _chunks(tuple(lengths))
    back = np.argsort(order, kind="stable")
    moved = (to_device(torch.from_numpy(index), device) for index in (rows, place, order, back))
    return Chunks(steps, *moved)


def delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    lengths: Sequence[int],
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the gated delta rule: S <- exp(decay) S; S <- S + beta k (v - k S); out = q S.

    Args:
        query: `[T, H, K]`.
        key: `[T, H, K]`.
        value: `[T, H, V]`.
        decay: `[T, H]` for one decay per head, or `[T, H, K]` for one per channel; at most 0.
        beta: `[T, H]`.
        lengths: Number of tokens of each run.
        state: `[N, H, K, V]`, the state before each run.

    Returns:
        The output `[T, H, V]` and the states after each run `[N, H, K, V]`, in the dtype of `value`.
    """
    wide, deep = value.shape[2], key.shape[2]
    cut = _chunked(lengths, value.device)
    q, k, v = cut.take(query), cut.take(key), cut.take(value)
    b, g = cut.take(beta).unsqueeze(-1), cut.take(decay).cumsum(2)  # g: log of the decay since the start of the chunk
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=value.device).triu(1)
    if decay.dim() == 2:
        between = (g.unsqueeze(3) - g.unsqueeze(2)).masked_fill(later, float("-inf")).exp()
        of_keys, of_queries = (k @ k.mT) * between, (q @ k.mT) * between
        g = g.unsqueeze(-1)
    else:
        # With one decay per channel, the decay is part of the product over channels.
        of_keys, of_queries = (_decayed(x, k, g, later) for x in (k, q))
    left, end = g.exp(), g[:, :, -1:]
    # Within a chunk, a token's update depends on the updates of earlier tokens, which gives a triangular system.
    system = b * of_keys.tril(-1) + torch.eye(CHUNK, dtype=value.dtype, device=value.device)
    solved = torch.linalg.solve_triangular(
        system, torch.cat([b * v, b * k * left], -1), upper=False, unitriangular=True
    )
    written, read = solved.split([wide, deep], -1)
    q, k = q * left, k * (end - g).exp()
    kept = end.exp().mT  # [chunks, H, K or 1, 1]

    # `split` instead of slices in the loop: the backward of each slice would allocate a gradient of the full size.
    by_step = zip(*(x.split(cut.steps) for x in (written, read, q, of_queries, kept, k)), strict=True)
    state, finished, out = state[cut.order], [], []
    for own, asked, query, seen, left, key in by_step:
        if len(own) < len(state):
            state, ended = state.split([len(own), len(state) - len(own)])
            finished.append(ended)
        new = own - asked @ state
        out.append(query @ state + seen @ new)
        state = state * left + key.mT @ new
    after = torch.cat([state, *reversed(finished)])[cut.back]
    return cut.give(torch.cat(out)), after


def linear_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    lengths: Sequence[int],
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute linear attention with decay: S <- exp(decay) S + beta k v; out = q S.

    `query` and `key` are `[T, G, K]`, shared by the heads of a group, and `decay` is `[T, H]`. All else is as in
    `delta_rule`.
    """
    heads, groups = value.shape[1], key.shape[1]
    cut = _chunked(lengths, value.device)

    def by_group(x: torch.Tensor) -> torch.Tensor:
        """Reshape `[chunks, H, ...]` to `[chunks, G, H / G, ...]`."""
        return x.reshape(len(x), groups, heads // groups, *x.shape[2:])

    q, k = cut.take(query).unsqueeze(2), cut.take(key).unsqueeze(2)  # [chunks, G, 1, CHUNK, K]
    v, g = by_group(cut.take(value * beta.unsqueeze(-1))), by_group(cut.take(decay).cumsum(2))
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=value.device).triu(1)
    between = (g.unsqueeze(4) - g.unsqueeze(3)).masked_fill(later, float("-inf")).exp()
    out = (q @ k.mT * between) @ v
    end = g[..., -1:]
    written = (k.mT @ (v * (end - g).exp().unsqueeze(-1))).flatten(1, 2)  # [chunks, H, K, V]
    kept = end.exp().flatten(1, 2).unsqueeze(-1)  # [chunks, H, 1, 1]

    state, finished, before = state[cut.order], [], []
    for own, left in zip(written.split(cut.steps), kept.split(cut.steps), strict=True):
        if len(own) < len(state):
            state, ended = state.split([len(own), len(state) - len(own)])
            finished.append(ended)
        before.append(state)
        state = state * left + own
    after = torch.cat([state, *reversed(finished)])[cut.back]
    out = out + (q @ by_group(torch.cat(before))) * g.exp().unsqueeze(-1)
    return cut.give(out.flatten(1, 2)), after


def _decayed(x: torch.Tensor, k: torch.Tensor, g: torch.Tensor, later: torch.Tensor) -> torch.Tensor:
    """Return the sum over channels of x_i k_j exp(g_i - g_j) for j <= i, as `[chunks, H, CHUNK, CHUNK]`."""
    between = (g.unsqueeze(3) - g.unsqueeze(2)).masked_fill(later[:, :, None], float("-inf")).exp()
    return torch.einsum("nhik,nhjk,nhijk->nhij", x, k, between)
