"""Layers with a state along the sequence: a short causal convolution, and the gated delta rule, on runs of tokens.

A run is a stretch of one sample, `lengths` those of all runs, one after the other. State never passes from a run to the
next: what comes before a run is given, as the last tokens before it (convolution) or as a state (delta rule).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from omnizoo.ops.device import to_device

Indices = npt.NDArray[np.int64]

CHUNK = 64  # tokens that the delta rule takes at once


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


@dataclass(frozen=True)
class Chunks:
    """Runs cut into chunks, in the order in which states need them: the first one of every run, then the second ..."""

    steps: list[int]  # how many runs have a first chunk, a second one, ...
    rows: torch.Tensor  # [chunks, CHUNK] which token; the number of tokens itself where there is none
    place: torch.Tensor  # [T] of each token in `rows`
    order: torch.Tensor  # [N] runs, the longest first
    back: torch.Tensor  # [N] its inverse


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
    """The gated delta rule (Yang et al., 2024), by chunks: S <- exp(decay) S; S <- S + beta k (v - k S); out = q S.

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

    def chunked(x: torch.Tensor) -> torch.Tensor:
        """[chunks, H, CHUNK, ...]; zeros where a run has ended: they neither decay nor write."""
        return torch.cat([x, x.new_zeros(1, *x.shape[1:])])[cut.rows].transpose(1, 2)

    q, k, v = chunked(query), chunked(key), chunked(value)
    b, g = chunked(beta).unsqueeze(-1), chunked(decay).cumsum(2)  # log of what is left of the state of the beginning
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

    state, finished, out, at = state[cut.order], [], [], 0
    for active in cut.steps:
        if active < len(state):
            finished.append(state[active:])
            state = state[:active]
        now = slice(at, at + active)
        new = written[now] - read[now] @ state
        out.append(q[now] @ state + of_queries[now] @ new)
        state = state * kept[now] + k[now].mT @ new
        at += active
    after = torch.cat([state, *reversed(finished)])[cut.back]
    return torch.cat(out).transpose(1, 2).flatten(0, 1)[cut.place], after


def _decayed(x: torch.Tensor, k: torch.Tensor, g: torch.Tensor, later: torch.Tensor) -> torch.Tensor:
    """Sum over channels of x_i k_j exp(g_i - g_j), for j <= i: `[chunks, H, CHUNK, CHUNK]`."""
    between = (g.unsqueeze(3) - g.unsqueeze(2)).masked_fill(later[:, :, None], float("-inf")).exp()
    return torch.einsum("nhik,nhjk,nhijk->nhij", x, k, between)
