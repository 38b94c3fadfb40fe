"""Run recurrent layers (short convolutions and recurrences) under sequence parallelism, over tokens on several ranks.

A rank holds stretches (contiguous tokens) of samples. A convolution needs the few tokens before each stretch, which
other ranks send. A recurrence is computed in one of two ways, whichever sends less:

- by states: the recurrence is affine in the state before a stretch, so each rank summarizes its stretches in parallel
  as pairs (M, U) with `after = M before + U`. It sends the pairs to the ranks that hold later stretches of the same
  sample, which add the contribution of the incoming state to their outputs. The number of bytes sent does not depend on
  the number of tokens.
- by heads: ranks exchange all heads of some tokens for some heads of all tokens, as in Ulysses.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from omnizoo.ops.device import to_device
from omnizoo.ops.linear_attention import recurrence as ops
from omnizoo.ops.linear_attention.recurrence import RecurrentInputs
from omnizoo.ops.linear_attention.short_convolution import convolve
from omnizoo.parallel.exchange import exchange_rows
from omnizoo.parallel.sequence.ring import repeat_kv
from omnizoo.parallel.sequence.ulysses import Exchange, GatherTokens, ScatterTokens, split_heads

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Stretch:
    """Contiguous tokens of a sample on one rank."""

    rank: int
    index: int  # index among the stretches of its rank
    sample: int  # index of the sample in the pack
    position: int  # position of the first token in the sample
    first_token: int  # index of the first token among the tokens of its rank
    length: int  # number of tokens


def find_stretches(slices: Sequence[Indices], lengths: Sequence[int]) -> list[list[Stretch]]:
    """Return the stretches of each rank.

    Args:
        slices: For each rank, the indices of its tokens in the pack.
        lengths: Number of tokens of each sample of the pack.
    """
    starts = np.array([0, *accumulate(lengths)])
    stretches_by_rank: list[list[Stretch]] = []
    for rank, tokens in enumerate(slices):
        samples = np.searchsorted(starts, tokens, side="right") - 1
        positions = tokens - starts[samples]
        continues = (np.diff(tokens, prepend=-2) == 1) & (np.diff(samples, prepend=-1) == 0)
        first_tokens = np.flatnonzero(~continues)
        sizes = np.diff(first_tokens, append=len(tokens))

        stretches = []
        for index, (first, length) in enumerate(zip(first_tokens.tolist(), sizes.tolist(), strict=True)):
            stretches.append(
                Stretch(
                    rank=rank,
                    index=index,
                    sample=int(samples[first]),
                    position=int(positions[first]),
                    first_token=first,
                    length=length,
                )
            )
        stretches_by_rank.append(stretches)
    return stretches_by_rank


@dataclass(frozen=True)
class Sending:
    """Rows that this rank sends to and receives from each rank."""

    rows: torch.Tensor  # [sent] indices of the rows to send, sorted by destination rank
    sent: list[int]  # number of rows sent to each rank
    received: list[int]  # number of rows received from each rank


class Recurrence:
    """Recurrent layers for one packed micro-batch on the ranks of `group`.

    `slices` contains the indices of each rank's tokens in the micro-batch.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        rank: int,
        slices: Sequence[Indices],
        lengths: Sequence[int],
        device: torch.device,
        overlap: bool,
    ) -> None:
        self.group = group
        self.rank = rank
        self.slices = slices
        self.lengths = lengths
        self.device = device
        self.overlap = overlap
        self.stretches = find_stretches(slices, lengths)  # one list per rank
        self.local_stretches = self.stretches[rank]

        self.chains: dict[int, list[Stretch]] = {}  # sample -> its stretches, sorted by position
        all_stretches = [stretch for stretches in self.stretches for stretch in stretches]
        for stretch in sorted(all_stretches, key=lambda stretch: (stretch.sample, stretch.position)):
            self.chains.setdefault(stretch.sample, []).append(stretch)
        self.has_split_samples = any(len(chain) > 1 for chain in self.chains.values())
        # Cache, keyed by the number of tokens before a stretch.
        self._halos: dict[int, tuple[Sending, torch.Tensor]] = {}

    @property
    def local_lengths(self) -> list[int]:
        """Number of tokens of each stretch of this rank."""
        return [stretch.length for stretch in self.local_stretches]

    def convolve(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return the causal convolution of `x [tokens, channels]` with `weight [channels, taps]`, in the shape of `x`.

        Collective: all ranks must call it.
        """
        num_before = weight.shape[1] - 1
        before = x.new_zeros(len(self.local_stretches), num_before, x.shape[1])
        if self.has_split_samples and num_before:
            sending, row_index = self._halo(num_before)
            received = exchange_rows(x[sending.rows], sending.sent, sending.received, self.group, "sp")
            before = torch.cat([received, received.new_zeros(1, x.shape[1])])[row_index]
            # The exchange in backward is a collective. A rank takes part in it only if its output depends on the
            # received rows, so make the output depend on them even if the rank uses none of them.
            before = before + 0 * received.sum()
        return convolve(x, weight, bias, self.local_lengths, before)

    def run_recurrence(self, inputs: RecurrentInputs, method: str | None = None) -> torch.Tensor:
        """Return the output for this rank's tokens, `[tokens, heads, value width]`. Collective: all ranks must call it.

        `method` is `states` or `heads`. If `method` is None, select the method for which the busiest rank sends fewer
        bytes.
        """
        if not self.has_split_samples:
            return ops.run_recurrence(inputs, self.local_lengths)[0]
        if method is None:
            costs = self.bytes_sent(inputs)
            method = min(costs, key=lambda name: max(costs[name]))
        return self._by_heads(inputs) if method == "heads" else self._by_states(inputs)

    def bytes_sent(self, inputs: RecurrentInputs) -> dict[str, list[int]]:
        """Return the bytes that each rank sends in a forward pass, keyed by method. Unsupported methods are omitted.

        By states: `H K (V + K)` fp32 numbers (delta rule), or `H K (V + 1)`, for each stretch and each rank that holds
        later stretches of its sample (H heads, K and V the widths of keys and values). By heads: query, key, value and
        gates of each token are sent to the ranks of its heads, and its output is sent back. `inputs` may have any
        number of tokens.
        """
        costs = {"states": self._bytes_by_states(inputs)}
        if inputs.value.shape[1] >= len(self.slices):
            costs["heads"] = self._bytes_by_heads(inputs)
        return costs

    def _bytes_by_states(self, inputs: RecurrentInputs) -> list[int]:
        """Return the bytes that each rank sends in `_by_states`."""
        heads, value_width = inputs.value.shape[1:]
        key_width = inputs.key.shape[2]
        transition_width = key_width if inputs.is_delta else 1
        bytes_per_pair = heads * key_width * (value_width + transition_width) * inputs.wide_dtype.itemsize

        num_pairs = [0] * len(self.slices)
        for chain in self.chains.values():
            for stretch, later_ranks in _later(chain):
                num_pairs[stretch.rank] += len(later_ranks - {stretch.rank})
        return [count * bytes_per_pair for count in num_pairs]

    def _bytes_by_heads(self, inputs: RecurrentInputs) -> list[int]:
        """Return the bytes that each rank sends in `_by_heads`."""
        heads, value_width = inputs.value.shape[1:]
        groups, key_width = inputs.key.shape[1:]
        size = inputs.value.itemsize
        num_gates = 1 + (key_width if inputs.decay.dim() == 3 else 1)
        gate_bytes = num_gates * inputs.wide_dtype.itemsize
        ranks = range(len(self.slices))
        split = split_heads(heads, groups, len(ranks))

        input_bytes = []  # for each rank: bytes per token of the inputs of its heads
        output_bytes = []  # for each rank: bytes per token of the outputs of its heads
        for (first, last), (first_kv, last_kv) in zip(split.heads, split.kv_heads, strict=True):
            num_heads = last - first
            num_kv_heads = last_kv - first_kv
            input_bytes.append(num_heads * (value_width * size + gate_bytes) + num_kv_heads * 2 * key_width * size)
            output_bytes.append(num_heads * value_width * size)

        tokens = [len(indices) for indices in self.slices]
        totals = []
        for rank in ranks:
            peers = [peer for peer in ranks if peer != rank]
            totals.append(sum(tokens[rank] * input_bytes[peer] + tokens[peer] * output_bytes[rank] for peer in peers))
        return totals

    def _by_states(self, inputs: RecurrentInputs) -> torch.Tensor:
        """Compute each stretch without an incoming state, then add the contributions of the received states."""
        value_width = inputs.value.shape[2]
        stateless = ops.run_without_states(inputs, self.local_lengths)
        sending, received_row = self._pair_rows
        received = exchange_rows(stateless.effect[sending.rows], sending.sent, sending.received, self.group, "sp")
        effects = received.unbind()

        outputs = list(stateless.out.split(self.local_lengths))
        for chain in self.chains.values():
            last = max((i for i, stretch in enumerate(chain) if stretch.rank == self.rank), default=0)
            state: torch.Tensor | None = None
            for stretch in chain[: last + 1]:
                if stretch.rank == self.rank and state is not None:
                    outputs[stretch.index] = outputs[stretch.index] + stateless.contribution(stretch.index, state)
                if stretch in received_row:
                    state = ops.advance(effects[received_row[stretch]], state, value_width)
        # The exchange in backward is a collective. A rank takes part in it only if its output depends on `received`.
        return torch.cat([stateless.out[:0], *outputs]) + 0 * received.sum().to(stateless.out.dtype)

    def _by_heads(self, inputs: RecurrentInputs) -> torch.Tensor:
        """Gather all tokens of this rank's heads, run the recurrence, and scatter the outputs back."""
        split = split_heads(inputs.value.shape[1], inputs.key.shape[1], len(self.slices))
        exchange = Exchange(
            group=self.group,
            axis="sp",
            rank=self.rank,
            tokens=[len(tokens) for tokens in self.slices],
            overlap=self.overlap,
        )
        key_width = inputs.key.shape[2]
        by_channel = inputs.decay.dim() == 3
        decay = inputs.decay if by_channel else inputs.decay.unsqueeze(-1)
        beta = inputs.beta.unsqueeze(-1)
        gates = torch.cat([beta.to(inputs.wide_dtype), decay.to(inputs.wide_dtype)], -1)
        queries_and_keys = torch.cat([inputs.query, inputs.key], -1)

        ranges = (split.kv_heads, split.heads, split.heads)
        gathered = GatherTokens.apply(exchange, ranges, queries_and_keys, gates, inputs.value)  # type: ignore[no-untyped-call]
        order, inverse_order = self._order
        queries_and_keys, gates, value = (x[order] for x in gathered)
        repeated = repeat_kv(queries_and_keys, split.kv_repeats(self.rank))
        query, key = repeated.split([key_width, key_width], -1)
        decay = gates[..., 1:] if by_channel else gates[..., 1]
        head_inputs = replace(inputs, query=query, key=key, value=value, decay=decay, beta=gates[..., 0])
        out = ops.run_recurrence(head_inputs, self.lengths)[0]
        result: torch.Tensor = ScatterTokens.apply(exchange, split, out[inverse_order])  # type: ignore[no-untyped-call]
        return result

    def _plan_sending(self, needed_rows: Iterator[tuple[int, int, int]]) -> tuple[Sending, list[int]]:
        """Plan which rows this rank sends to and receives from each rank.

        Args:
            needed_rows: (rank that needs a row, rank that holds it, index of the row there), in the same order on all
                ranks.

        Returns:
            The rows to send and receive, and for each row that this rank needs, its index among the received rows.
        """
        ranks = range(len(self.slices))
        sent_rows: list[list[int]] = [[] for _ in ranks]  # one list per destination rank
        # One list per source rank: indices into the rows that this rank needs.
        received_needs: list[list[int]] = [[] for _ in ranks]
        num_needed = 0
        for destination, owner, row in needed_rows:
            if owner == self.rank:
                sent_rows[destination].append(row)
            if destination == self.rank:
                received_needs[owner].append(num_needed)
                num_needed += 1

        needs_in_received_order = [need for needs in received_needs for need in needs]
        received_index = np.argsort(np.array(needs_in_received_order, np.int64), kind="stable").tolist()
        flat_rows = [row for rows in sent_rows for row in rows]
        sending = Sending(
            rows=to_device(torch.tensor(flat_rows, dtype=torch.int64), self.device),
            sent=[len(rows) for rows in sent_rows],
            received=[len(needs) for needs in received_needs],
        )
        return sending, received_index

    def _halo(self, num_before: int) -> tuple[Sending, torch.Tensor]:
        """Plan the exchange of the `num_before` tokens before each stretch, for a convolution.

        Returns:
            The rows to send and receive, and an index `[stretches, num_before]` into the received rows. Positions
            before the start of a sample get an index one past the last received row.
        """
        if num_before in self._halos:
            return self._halos[num_before]

        starts = [0, *accumulate(self.lengths)]
        owner = np.empty(starts[-1], np.int64)  # rank that holds each token
        row = np.empty(starts[-1], np.int64)  # index of each token on that rank
        for rank, tokens in enumerate(self.slices):
            owner[tokens] = rank
            row[tokens] = np.arange(len(tokens))

        def needed_rows() -> Iterator[tuple[int, int, int]]:
            for stretches in self.stretches:
                for stretch in stretches:
                    first = starts[stretch.sample]
                    for position in range(max(0, stretch.position - num_before), stretch.position):
                        yield stretch.rank, int(owner[first + position]), int(row[first + position])

        sending, received_index = self._plan_sending(needed_rows())
        next_index = iter(received_index)
        row_index = np.full((len(self.local_stretches), num_before), len(received_index))
        for stretch in self.local_stretches:
            for column in range(max(0, num_before - stretch.position), num_before):
                row_index[stretch.index, column] = next(next_index)
        self._halos[num_before] = sending, to_device(torch.from_numpy(row_index), self.device)
        return self._halos[num_before]

    @cached_property
    def _pair_rows(self) -> tuple[Sending, dict[Stretch, int]]:
        """Plan of the exchange of (M, U) pairs for `_by_states`, and the received row of each pair of this rank."""
        later_ranks = [entry for chain in self.chains.values() for entry in _later(chain)]
        sending, received_index = self._plan_sending(
            (destination, stretch.rank, stretch.index)
            for stretch, destinations in later_ranks
            for destination in sorted(destinations)
        )
        needed_here = [stretch for stretch, destinations in later_ranks if self.rank in destinations]
        return sending, dict(zip(needed_here, received_index, strict=True))

    @cached_property
    def _order(self) -> tuple[torch.Tensor, ...]:
        """The permutation from tokens sorted by rank to tokens in pack order, and its inverse."""
        tokens = np.concatenate(self.slices)
        order = np.argsort(tokens, kind="stable")
        return tuple(to_device(torch.from_numpy(index), self.device) for index in (order, tokens))


def _later(chain: Sequence[Stretch]) -> Iterator[tuple[Stretch, set[int]]]:
    """Yield each stretch of a sample except the last, with the ranks that hold later stretches."""
    for i, stretch in enumerate(chain[:-1]):
        yield stretch, {later.rank for later in chain[i + 1 :]}
