"""Rules by which a state is carried along runs of tokens, by chunks, in plain torch: the gated delta rule (Yang et al.,
2024) and linear attention with decay (state space duality, Dao and Gu, 2024; lightning attention).

A run is a stretch of one sample, `lengths` those of all runs, one after the other. State never passes from a run to the
next: that before each run is given, or zero.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from omnizoo.ops.device import to_device

Indices = npt.NDArray[np.int64]

CHUNK = 64  # tokens that are taken at once


@dataclass(frozen=True)
class Chunks:
    """Runs cut into chunks, in the order in which states need them: the first one of every run, then the second ..."""

    steps: list[int]  # how many runs have a first chunk, a second one, ...
    rows: torch.Tensor  # [chunks, CHUNK] which token; the number of tokens itself where there is none
    place: torch.Tensor  # [T] of each token in `rows`
    order: torch.Tensor  # [N] runs, the longest first
    back: torch.Tensor  # [N] its inverse

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H, ...] -> [chunks, H, CHUNK, ...]; zeros where a run has ended: they neither decay nor write."""
        return torch.cat([x, x.new_zeros(1, *x.shape[1:])])[self.rows].transpose(1, 2)

    def give(self, x: torch.Tensor) -> torch.Tensor:
        """[chunks, H, CHUNK, V] -> [T, H, V]"""
        out: torch.Tensor = x.transpose(1, 2).flatten(0, 1)[self.place]
        return out


@lru_cache(maxsize=64)
def _chunks(lengths: tuple[int, ...]) -> tuple[Indices, Indices, Indices, list[int]]:
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
    state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gated delta rule: S <- exp(decay) S; S <- S + beta k (v - k S); out = q S.

    `query, key [T, H, K]`, `value [T, H, V]`, `beta [T, H]`; `decay <= 0` of a head, `[T, H]`, or of each of its
    channels, `[T, H, K]`. `state [N, H, K, V]` before each run, None for zeros. Returns the output `[T, H, V]` and the
    states after each run, all in the dtype of `value`.
    """
    heads, wide, deep = key.shape[1], value.shape[2], key.shape[2]
    if state is None:
        state = value.new_zeros(len(lengths), heads, deep, wide)
    if not sum(lengths):
        # Gradients still have to reach what was given.
        return value + 0 * (query.sum() + key.sum() + decay.sum() + beta.sum()), state
    cut = _chunked(lengths, value.device)
    q, k, v = cut.take(query), cut.take(key), cut.take(value)
    b, g = cut.take(beta).unsqueeze(-1), cut.take(decay).cumsum(2)  # log of what is left of the state of the beginning
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=value.device).triu(1)
    if decay.dim() == 2:
        between = (g.unsqueeze(3) - g.unsqueeze(2)).masked_fill(later, float("-inf")).exp()
        of_keys, of_queries = (k @ k.mT) * between, (q @ k.mT) * between
        g = g.unsqueeze(-1)
    else:
        # A decay of its own for each channel: the product over channels has to be taken with it.
        of_keys, of_queries = (_decayed(x, k, g, later) for x in (k, q))
    left, end = g.exp(), g[:, :, -1:]
    # Within a chunk, what a token writes depends on what those before it have written: a triangular system.
    system = b * of_keys.tril(-1) + torch.eye(CHUNK, dtype=value.dtype, device=value.device)
    solved = torch.linalg.solve_triangular(
        system, torch.cat([b * v, b * k * left], -1), upper=False, unitriangular=True
    )
    written, read = solved.split([wide, deep], -1)
    q, k = q * left, k * (end - g).exp()
    kept = end.exp().mT  # [chunks, H, K or 1, 1]

    # Split once: the gradient of a slice is as large as the whole.
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
    state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Linear attention with decay: S <- exp(decay) S + beta k v; out = q S.

    `query, key [T, G, K]` of G groups of heads, `value [T, H, V]`, `decay, beta [T, H]`; otherwise as `delta_rule`.
    """
    (tokens, heads, wide), (groups, deep) = value.shape, key.shape[1:]
    if state is None:
        state = value.new_zeros(len(lengths), heads, deep, wide)
    if not tokens:
        return value + 0 * (query.sum() + key.sum() + decay.sum() + beta.sum()), state
    cut = _chunked(lengths, value.device)

    def by_group(x: torch.Tensor) -> torch.Tensor:
        """[chunks, H, ...] -> [chunks, G, H / G, ...]"""
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
    """Sum over channels of x_i k_j exp(g_i - g_j), for j <= i: `[chunks, H, CHUNK, CHUNK]`."""
    between = (g.unsqueeze(3) - g.unsqueeze(2)).masked_fill(later[:, :, None], float("-inf")).exp()
    return torch.einsum("nhik,nhjk,nhijk->nhij", x, k, between)
