"""Sequence parallelism, in which the ranks of a ring x Ulysses grid share the tokens of a pack.

Each rank selects its tokens with `SequenceParallel.index` before the forward pass. Only attention and recurrent layers
communicate. The model's attention interface calls the `SequenceParallel` object, and recurrent layers call its
`convolve` and `run_recurrence`. All other layers process each token independently and need no change.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate, product

import torch

from omnizoo.config.errors import UserError
from omnizoo.ops.attention.bidirectional_spans import BidirectionalSpans, SpansOfSamples
from omnizoo.ops.attention.blocks import AttentionBlock, Blocks, TokenRun, block_between, fuse, span_blocks
from omnizoo.ops.attention.packed import Boundaries, Pattern, packed_attention
from omnizoo.ops.device import to_device
from omnizoo.ops.linear_attention.recurrence import RecurrentInputs
from omnizoo.parallel.exchange import exchange_rows
from omnizoo.parallel.mesh import Mesh
from omnizoo.parallel.sequence.recurrent_states import Recurrence
from omnizoo.parallel.sequence.ring import Ring, repeat_kv, ring_attention
from omnizoo.parallel.sequence.slicing import ring_runs, slice_tokens
from omnizoo.parallel.sequence.ulysses import Exchange, GatherTokens, ScatterTokens, split_heads


def visible_blocks(
    q_runs: Sequence[Sequence[TokenRun]],
    k_runs: Sequence[Sequence[TokenRun]],
    causal: bool,
    window: int | None,
    is_same_rank: bool,
    spans: SpansOfSamples | None = None,
    outer_window: int | None = None,
) -> list[AttentionBlock]:
    """Return the attention blocks between the queries of one ring rank and the keys of another.

    Args:
        q_runs: For each sample, the runs of tokens of the rank with the queries.
        k_runs: For each sample, the runs of tokens of the rank with the keys.
        causal: Whether tokens attend only to earlier tokens, apart from bidirectional tokens.
        window: Number of tokens of sliding-window attention; None for full attention.
        is_same_rank: Whether both ranks are the same.
        spans: For each sample, the spans of bidirectional tokens, which attend to each other.
        outer_window: If set, bidirectional tokens also attend to earlier tokens of their span outside this window.
    """
    blocks: list[AttentionBlock] = []
    for sample, (queries, keys) in enumerate(zip(q_runs, k_runs, strict=True)):
        blocks_of_spans: list[AttentionBlock] = []
        if spans is not None:
            for q, k in product(queries, keys):
                blocks_of_spans += span_blocks(q, k, spans[sample], outer_window)

        if is_same_rank and queries and (window is None or window >= queries[-1].position + queries[-1].length):
            # Without a window only the order of tokens matters, so the gap between the runs can be ignored.
            joined_run = TokenRun(queries[0].index, 0, sum(run.length for run in queries))
            queries = keys = [joined_run]
        candidates = [block_between(q, k, causal, window) for q, k in product(queries, keys)]
        pairs = [block for block in candidates if block is not None]

        if is_same_rank:
            # Each query attends to itself, so the diagonal blocks contain every query once. They are computed first.
            diagonal = [block for block in pairs if (block.q0, block.q1) == (block.k0, block.k1)]
            blocks += [replace(block, first=True) for block in diagonal]
            blocks += [block for block in pairs if block not in diagonal]
            blocks += blocks_of_spans
        else:
            blocks += fuse(pairs + blocks_of_spans)
    return blocks


class SequenceParallel:
    """One packed micro-batch on the ranks that share it. `lengths` are the token counts of its samples, in order."""

    def __init__(
        self, mesh: Mesh, lengths: Sequence[int], overlap: bool, bidirectional: BidirectionalSpans | None = None
    ) -> None:
        layout = mesh.layout
        self.mesh = mesh
        self.lengths = lengths
        self.overlap = overlap
        self.bidirectional = bidirectional
        self.ring = layout.ring
        self.ulysses = layout.ulysses
        self.ring_rank, self.ulysses_rank = divmod(mesh.sp_rank, layout.ulysses)
        self.slices = slice_tokens(lengths, layout.ring, layout.ulysses)
        self.tokens = [len(indices) for indices in self.slices]
        self.index = torch.from_numpy(self.slices[mesh.sp_rank])  # [local tokens] token indices, on the host
        cumulative = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        self.boundaries = Boundaries(to_device(cumulative, mesh.device), max(lengths, default=0), lengths)
        self.runs = ring_runs(lengths, layout.ring)
        self.blocks: dict[tuple[bool, int | None], list[Blocks]] = {}  # cache, keyed by (causal, window)

    @property
    def rank(self) -> int:
        """Index of this rank among the ranks that share the micro-batch."""
        return self.mesh.sp_rank

    def gather_rows(self, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Return the rows of all ranks, in the order of the ranks. Gradients of all ranks are summed.

        Collective: all ranks must call it. `counts` contains the number of rows of each rank.
        """
        ranks = len(counts)
        copies = rows.repeat(ranks, *[1] * (rows.dim() - 1))
        return exchange_rows(copies, [len(rows)] * ranks, counts, self.mesh.group("sp"), "sp")

    @property
    def longest(self) -> int:
        """Number of tokens of the longest sample."""
        return self.boundaries.max_seqlen

    @cached_property
    def recurrence(self) -> Recurrence:
        """Implementation of recurrent layers for this micro-batch."""
        mesh = self.mesh
        return Recurrence(mesh.group("sp"), mesh.sp_rank, self.slices, self.lengths, mesh.device, self.overlap)

    def convolve(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return the causal convolution of this rank's tokens (see `Recurrence.convolve`).

        Collective: all ranks must call it.
        """
        return self.recurrence.convolve(x, weight, bias)

    def run_recurrence(self, inputs: RecurrentInputs) -> torch.Tensor:
        """Return the output of a recurrence for this rank's tokens (see `Recurrence.run_recurrence`).

        Collective: all ranks must call it.
        """
        return self.recurrence.run_recurrence(inputs)

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, pattern: Pattern) -> torch.Tensor:
        """Return the attention output for this rank's tokens, `[1, tokens, heads, width of v]`.

        Collective: all ranks must call it.

        `query [1, heads, tokens, width of k]`, `key [1, kv heads, tokens, width of k]` and `value [1, kv heads, tokens,
        width of v]` contain all heads of these tokens.
        """
        if pattern.dropout > 0.0 and self.ring > 1:
            raise UserError(
                f"parallel.ring: {self.ring} does not support attention dropout, which the model sets to "
                f"{pattern.dropout}. Set its attention_dropout to 0, or use parallel.ulysses: "
                f"{self.ring * self.ulysses} with ring 1."
            )
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        if self.ulysses == 1:
            return self._local(q, k, v, pattern, None).unsqueeze(0)
        split = split_heads(q.shape[1], k.shape[1], self.ulysses)
        first = self.ring_rank * self.ulysses
        exchange = Exchange(
            group=self.mesh.group("ulysses"),
            axis="ulysses",
            rank=self.ulysses_rank,
            tokens=self.tokens[first : first + self.ulysses],
            overlap=self.overlap,
        )
        if pattern.sinks is not None:
            pattern = replace(pattern, sinks=pattern.sinks[slice(*split.heads[self.ulysses_rank])])
        ranges = (split.heads, split.kv_heads, split.kv_heads)
        q, k, v = GatherTokens.apply(exchange, ranges, q, k, v)  # type: ignore[no-untyped-call]
        local_out = self._local(q, k, v, pattern, split.kv_repeats(self.ulysses_rank))
        out: torch.Tensor = ScatterTokens.apply(exchange, split, local_out)  # type: ignore[no-untyped-call]
        return out.unsqueeze(0)

    def _local(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pattern: Pattern, kv_repeats: list[int] | None
    ) -> torch.Tensor:
        """Return the attention output for all tokens of this ring rank and the heads of this Ulysses rank."""
        if self.ring > 1:
            tokens = [sum(self.tokens[i * self.ulysses : (i + 1) * self.ulysses]) for i in range(self.ring)]
            blocks = self._blocks(pattern.causal, pattern.window)
            ring = Ring(self.mesh.group("ring"), self.ring_rank, tokens, blocks, kv_repeats)
            return ring_attention(q, k, v, ring, pattern)
        k = repeat_kv(k, kv_repeats)
        v = repeat_kv(v, kv_repeats)
        query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        return packed_attention(query, key, value, self.boundaries, pattern, self.bidirectional)[0]

    def _blocks(self, causal: bool, window: int | None) -> list[Blocks]:
        """Return, for each ring rank, the blocks between this rank's queries and that rank's keys.

        The runs of all ranks follow from the sample lengths, so no communication is needed.
        """
        if (causal, window) in self.blocks:
            return self.blocks[causal, window]

        spans = None
        outer_window = None
        if self.bidirectional and self.bidirectional.affects(causal, window):
            spans = self.bidirectional.spans
            outer_window = self.bidirectional.outer_window(window)

        local_runs = self.runs[self.ring_rank]
        blocks_by_rank = []
        for runs in self.runs:
            blocks = visible_blocks(
                local_runs,
                runs,
                causal=causal,
                window=window,
                is_same_rank=runs is local_runs,
                spans=spans,
                outer_window=outer_window,
            )
            blocks_by_rank.append(Blocks(blocks, self.mesh.device))
        self.blocks[causal, window] = blocks_by_rank
        return blocks_by_rank
