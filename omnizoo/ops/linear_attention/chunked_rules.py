"""Chunked linear attention in plain torch: the gated delta rule (Yang et al., 2024) and linear attention with decay.

The latter covers state space duality (Dao and Gu, 2024) and lightning attention.

A run is a range of consecutive tokens of one sample. Runs are concatenated, and `lengths` contains the number of tokens
of each run. No state is passed from one run to the next, so the caller must pass the state before each run. There must
be at least one token.

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

CHUNK = 64  # number of tokens per chunk


@dataclass(frozen=True)
class Chunks:
    """Runs split into chunks. The first chunks of all runs come first, then the second chunks, and so on."""

    runs_per_round: list[int]  # number of runs with at least one chunk, at least two chunks, and so on
    rows: torch.Tensor  # [chunks, CHUNK], index of each token; T for padding
    flat_index: torch.Tensor  # [T], index of each token in the flattened `rows`
    order: torch.Tensor  # [N], runs from most to fewest chunks
    inverse_order: torch.Tensor  # [N], inverse of `order`

    def split_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """Split `[T, H, ...]` into chunks `[chunks, H, CHUNK, ...]`.

        Runs are padded with zeros. Zeros neither decay the state nor write to it, so they leave it unchanged.
        """
        return torch.cat([x, x.new_zeros(1, *x.shape[1:])])[self.rows].transpose(1, 2)

    def join_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """Join chunks `[chunks, H, CHUNK, V]` to `[T, H, V]`."""
        out: torch.Tensor = x.transpose(1, 2).flatten(0, 1)[self.flat_index]
        return out


@lru_cache(maxsize=64)
def _chunk_indices(lengths: tuple[int, ...]) -> tuple[Indices, Indices, Indices, list[int]]:
    """Return `rows`, `flat_index`, `order` and `runs_per_round` of `Chunks`, on the host."""
    num_chunks = np.array([-(-length // CHUNK) for length in lengths], np.int64)
    order = np.argsort(-num_chunks, kind="stable")
    starts = np.concatenate([[0], np.cumsum(lengths)])
    num_tokens = int(starts[-1])
    num_rounds = int(num_chunks.max(initial=0))
    runs_per_round = [int((num_chunks > i).sum()) for i in range(num_rounds)]

    rows = np.full((sum(runs_per_round), CHUNK), num_tokens)
    flat_index = np.empty(num_tokens, np.int64)
    chunk = 0
    for i, num_runs in enumerate(runs_per_round):
        first = i * CHUNK
        for run in order[:num_runs]:
            size = min(CHUNK, lengths[run] - first)
            tokens = starts[run] + first + np.arange(size)
            rows[chunk, :size] = tokens
            flat_index[tokens] = chunk * CHUNK + np.arange(size)
            chunk += 1
    return rows, flat_index, order, runs_per_round


def _chunked(lengths: Sequence[int], device: torch.device) -> Chunks:
    """Return the chunks of runs of these lengths, on `device`."""
    rows, flat_index, order, runs_per_round = _chunk_indices(tuple(lengths))
    inverse_order = np.argsort(order, kind="stable")
    return Chunks(
        runs_per_round=runs_per_round,
        rows=to_device(torch.from_numpy(rows), device),
        flat_index=to_device(torch.from_numpy(flat_index), device),
        order=to_device(torch.from_numpy(order), device),
        inverse_order=to_device(torch.from_numpy(inverse_order), device),
    )


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
    value_width = value.shape[2]
    key_width = key.shape[2]
    chunks = _chunked(lengths, value.device)
    q = chunks.split_tokens(query)
    k = chunks.split_tokens(key)
    v = chunks.split_tokens(value)
    b = chunks.split_tokens(beta).unsqueeze(-1)
    g = chunks.split_tokens(decay).cumsum(2)  # log of the decay since the start of the chunk
    is_later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=value.device).triu(1)
    if decay.dim() == 2:
        decay_between = (g.unsqueeze(3) - g.unsqueeze(2)).masked_fill(is_later, float("-inf")).exp()
        key_products = (k @ k.mT) * decay_between
        query_products = (q @ k.mT) * decay_between
        g = g.unsqueeze(-1)
    else:
        # If each channel has its own decay, the decay is part of the product over channels.
        key_products = _decayed_products(k, k, g, is_later)
        query_products = _decayed_products(q, k, g, is_later)
    decay_since_start = g.exp()
    end = g[:, :, -1:]
    # Within a chunk, a token's update depends on the updates of earlier tokens, so the updates solve a triangular
    # system.
    system = b * key_products.tril(-1) + torch.eye(CHUNK, dtype=value.dtype, device=value.device)
    solved = torch.linalg.solve_triangular(
        system, torch.cat([b * v, b * k * decay_since_start], -1), upper=False, unitriangular=True
    )
    written, read = solved.split([value_width, key_width], -1)
    q = q * decay_since_start
    k = k * (end - g).exp()
    chunk_decay = end.exp().mT  # [chunks, H, K or 1, 1]

    # Use `split` instead of slices in the loop, because the backward of each slice would allocate a gradient of the
    # full size.
    per_chunk = (written, read, q, query_products, chunk_decay, k)
    rounds = zip(*(x.split(chunks.runs_per_round) for x in per_chunk), strict=True)
    state = state[chunks.order]
    finished_states = []
    outputs = []
    for round_written, round_read, round_q, round_products, round_decay, round_k in rounds:
        state, finished = _split_finished(state, len(round_written))
        finished_states += finished
        update = round_written - round_read @ state
        outputs.append(round_q @ state + round_products @ update)
        state = state * round_decay + round_k.mT @ update
    states_after = torch.cat([state, *reversed(finished_states)])[chunks.inverse_order]
    return chunks.join_tokens(torch.cat(outputs)), states_after


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

    `query` and `key` are `[T, G, K]`, shared by the heads of a group, and `decay` is `[T, H]`. All other arguments are
    as in `delta_rule`.
    """
    heads = value.shape[1]
    groups = key.shape[1]
    chunks = _chunked(lengths, value.device)

    def by_group(x: torch.Tensor) -> torch.Tensor:
        """Reshape `[chunks, H, ...]` to `[chunks, G, H / G, ...]`."""
        return x.reshape(len(x), groups, heads // groups, *x.shape[2:])

    q = chunks.split_tokens(query).unsqueeze(2)  # [chunks, G, 1, CHUNK, K]
    k = chunks.split_tokens(key).unsqueeze(2)  # [chunks, G, 1, CHUNK, K]
    v = by_group(chunks.split_tokens(value * beta.unsqueeze(-1)))
    g = by_group(chunks.split_tokens(decay).cumsum(2))  # log of the decay since the start of the chunk
    is_later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=value.device).triu(1)
    decay_between = (g.unsqueeze(4) - g.unsqueeze(3)).masked_fill(is_later, float("-inf")).exp()
    out = (q @ k.mT * decay_between) @ v
    end = g[..., -1:]
    written = (k.mT @ (v * (end - g).exp().unsqueeze(-1))).flatten(1, 2)  # [chunks, H, K, V]
    chunk_decay = end.exp().flatten(1, 2).unsqueeze(-1)  # [chunks, H, 1, 1]

    state = state[chunks.order]
    finished_states = []
    states_before = []
    rounds = zip(written.split(chunks.runs_per_round), chunk_decay.split(chunks.runs_per_round), strict=True)
    for round_written, round_decay in rounds:
        state, finished = _split_finished(state, len(round_written))
        finished_states += finished
        states_before.append(state)
        state = state * round_decay + round_written
    states_after = torch.cat([state, *reversed(finished_states)])[chunks.inverse_order]
    out = out + (q @ by_group(torch.cat(states_before))) * g.exp().unsqueeze(-1)
    return chunks.join_tokens(out.flatten(1, 2)), states_after


def _split_finished(state: torch.Tensor, num_active: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Split `state [N, ...]` into the states of the first `num_active` runs and of the other runs, if any."""
    num_finished = len(state) - num_active
    if not num_finished:
        return state, []
    active, finished = state.split([num_active, num_finished])
    return active, [finished]


def _decayed_products(x: torch.Tensor, k: torch.Tensor, g: torch.Tensor, is_later: torch.Tensor) -> torch.Tensor:
    """Return the sum over channels of x_i k_j exp(g_i - g_j) for j <= i, as `[chunks, H, CHUNK, CHUNK]`."""
    decay_between = (g.unsqueeze(3) - g.unsqueeze(2)).masked_fill(is_later[:, :, None], float("-inf")).exp()
    return torch.einsum("nhik,nhjk,nhijk->nhij", x, k, decay_between)
