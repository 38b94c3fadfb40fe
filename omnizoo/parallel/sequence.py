"""Sequence parallelism: the ranks of a ring x Ulysses grid share the tokens of a pack; attention and states talk.

Each rank selects its tokens with `SequenceParallel.index` before the model. The model's attention interface calls the
object itself, and layers with a state along the sequence its `convolve` and `carry`; everything else in a model
works on tokens one by one and never notices.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate, product

import numpy as np
import numpy.typing as npt
import torch

from omnizoo.config.errors import UserError
from omnizoo.ops.attention import Boundaries, Pattern, packed_attention
from omnizoo.ops.attention_blocks import Block, Blocks, Run, block_between, blocks_of_stretches, fuse
from omnizoo.ops.device import to_device
from omnizoo.ops.mutual import Mutual, Stretches
from omnizoo.ops.recurrence import Steps
from omnizoo.parallel.mesh import Mesh
from omnizoo.parallel.ring import Ring, repeat_kv, ring_attention
from omnizoo.parallel.states import Recurrence
from omnizoo.parallel.ulysses import Exchange, GatherTokens, ScatterTokens, split_heads


def slice_tokens(lengths: Sequence[int], ring: int, ulysses: int) -> list[npt.NDArray[np.int64]]:
    """For each sequence-parallel rank, the indices of its tokens in a pack of samples of these lengths.

    Token counts of any two ranks differ by at most 1.
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


def ring_runs(lengths: Sequence[int], ring: int) -> list[list[list[Run]]]:
    """For each ring rank and sample, the runs of tokens it holds, in order.

    A sample is cut into 2 x ring chunks of which rank r holds number r and the r-th from the end: early tokens see
    little and late ones much, so every rank has the same attention work in every sample.
    """
    held = [0] * ring
    runs: list[list[list[Run]]] = [[] for _ in range(ring)]
    for length in lengths:
        base, rest = divmod(length, 2 * ring)
        sizes = [base] * (2 * ring)
        # What does not divide goes to those who hold least, so that counts stay within 1 of each other.
        order = sorted(range(ring), key=held.__getitem__)
        for chunk in [*order, *(2 * ring - 1 - rank for rank in order)][:rest]:
            sizes[chunk] += 1
        position = [0, *accumulate(sizes)]
        for rank in range(ring):
            runs[rank].append([])
            for chunk in (rank, 2 * ring - 1 - rank):
                if sizes[chunk]:
                    runs[rank][-1].append(Run(held[rank], position[chunk], sizes[chunk]))
                    held[rank] += sizes[chunk]
    return runs


def visible_blocks(
    q_runs: Sequence[Sequence[Run]],
    k_runs: Sequence[Sequence[Run]],
    causal: bool,
    window: int | None,
    own: bool,
    mutual: Stretches | None = None,
    beyond: int | None = None,
) -> list[Block]:
    """What the queries of one ring rank see of the keys of another (`own`: of itself), sample by sample. `mutual`:
    stretches of each sample whose tokens see each other, wherever they are, also `beyond` a window."""
    blocks: list[Block] = []
    for number, (queries, keys) in enumerate(zip(q_runs, k_runs, strict=True)):
        stretches = () if mutual is None else mutual[number]
        added = [block for q, k in product(queries, keys) for block in blocks_of_stretches(q, k, stretches, beyond)]
        if own and queries and (window is None or window >= queries[-1].position + queries[-1].length):
            # Without a window only the order counts, and that is the same with the gap between the runs closed.
            whole = Run(queries[0].at, 0, sum(run.length for run in queries))
            queries = keys = [whole]
        pairs = [block for q, k in product(queries, keys) if (block := block_between(q, k, causal, window))]
        if own:
            # Each query sees itself: these blocks are computed first and hold every query once.
            diagonal = [b for b in pairs if (b.q0, b.q1) == (b.k0, b.k1)]
            blocks += [replace(b, first=True) for b in diagonal] + [b for b in pairs if b not in diagonal] + added
        else:
            blocks += fuse(pairs + added)
    return blocks


class SequenceParallel:
    """One packed micro-batch, spread over the ranks that share it. `lengths`: of all its samples, in order."""

    def __init__(self, mesh: Mesh, lengths: Sequence[int], overlap: bool, mutual: Mutual | None = None) -> None:
        layout = mesh.layout
        self.mesh, self.lengths, self.overlap, self.mutual = mesh, lengths, overlap, mutual
        self.ring, self.ulysses = layout.ring, layout.ulysses
        self.ring_rank, self.ulysses_rank = divmod(mesh.sp_rank, layout.ulysses)
        self.slices = slice_tokens(lengths, layout.ring, layout.ulysses)
        self.tokens = [len(indices) for indices in self.slices]
        self.index = torch.from_numpy(self.slices[mesh.sp_rank])  # on the host
        cumulative = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        self.boundaries = Boundaries(to_device(cumulative, mesh.device), max(lengths, default=0), lengths)
        self.runs = ring_runs(lengths, layout.ring)
        self.blocks: dict[tuple[bool, int | None], list[Blocks]] = {}  # by causal and window: layers repeat a few

    @property
    def longest(self) -> int:
        """Tokens of the longest sample."""
        return self.boundaries.max_seqlen

    @cached_property
    def recurrence(self) -> Recurrence:
        """For layers that carry a state along the sequence."""
        mesh = self.mesh
        return Recurrence(mesh.group("sp"), mesh.sp_rank, self.slices, self.lengths, mesh.device, self.overlap)

    def convolve(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return self.recurrence.convolve(x, weight, bias)

    def carry(self, steps: Steps) -> torch.Tensor:
        return self.recurrence.carry(steps)

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, pattern: Pattern) -> torch.Tensor:
        """Attention, of this rank's tokens: `query [1, H, T, Dk]`, `key [1, KV, T, Dk]`, `value [1, KV, T, Dv]`, each
        with its whole heads; returns `[1, T, H, Dv]`."""
        if pattern.dropout > 0.0 and self.ring > 1:
            raise UserError(
                f"attention dropout {pattern.dropout} does not work with parallel.ring {self.ring}: set the model's "
                f"attention_dropout to 0, or use ulysses {self.ring * self.ulysses} x ring 1"
            )
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        if self.ulysses == 1:
            return self._local(q, k, v, pattern, None).unsqueeze(0)
        split = split_heads(q.shape[1], k.shape[1], self.ulysses)
        first = self.ring_rank * self.ulysses
        exchange = Exchange(
            *(self.mesh.group("ulysses"), self.ulysses_rank, self.tokens[first : first + self.ulysses], self.overlap)
        )
        if pattern.sinks is not None:
            pattern = replace(pattern, sinks=pattern.sinks[slice(*split.heads[self.ulysses_rank])])
        ranges = (split.heads, split.kv_heads, split.kv_heads)
        q, k, v = GatherTokens.apply(exchange, ranges, q, k, v)  # type: ignore[no-untyped-call]
        own = self._local(q, k, v, pattern, split.kv_repeats(self.ulysses_rank))
        out: torch.Tensor = ScatterTokens.apply(exchange, split, own)  # type: ignore[no-untyped-call]
        return out.unsqueeze(0)

    def _local(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pattern: Pattern, kv_repeats: list[int] | None
    ) -> torch.Tensor:
        """All tokens of this ring rank, some of the heads."""
        if self.ring > 1:
            tokens = [sum(self.tokens[i * self.ulysses : (i + 1) * self.ulysses]) for i in range(self.ring)]
            blocks = self._blocks(pattern.causal, pattern.window)
            ring = Ring(self.mesh.group("ring"), self.ring_rank, tokens, blocks, kv_repeats)
            return ring_attention(q, k, v, ring, pattern)
        k, v = repeat_kv(k, kv_repeats), repeat_kv(v, kv_repeats)
        query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        return packed_attention(query, key, value, self.boundaries, pattern, self.mutual)[0]

    def _blocks(self, causal: bool, window: int | None) -> list[Blocks]:
        """What this ring rank's queries see of each ring rank's keys; all ranks know all runs, nothing is asked."""
        if (causal, window) not in self.blocks:
            own = self.runs[self.ring_rank]
            mutual = self.mutual if self.mutual and self.mutual.counts(causal, window) else None
            told = (mutual.stretches, mutual.beyond(window)) if mutual else ()
            visible = [visible_blocks(own, runs, causal, window, runs is own, *told) for runs in self.runs]
            self.blocks[causal, window] = [Blocks(blocks, self.mesh.device) for blocks in visible]
        return self.blocks[causal, window]
