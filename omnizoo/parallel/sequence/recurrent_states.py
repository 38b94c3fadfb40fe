"""Recurrent layers under sequence parallelism: short convolutions and recurrences over tokens on several ranks.

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
    number: int  # index among the stretches of its rank
    sample: int  # index of the sample in the pack
    position: int  # position of the first token in the sample
    at: int  # index of the first token among the tokens of its rank
    length: int  # tokens


def stretches(slices: Sequence[Indices], lengths: Sequence[int]) -> list[list[Stretch]]:
    """Return the stretches of each rank.

    Args:
        slices: For each rank, the indices of its tokens in the pack.
        lengths: Tokens of each sample of the pack.
    """
    starts = np.array([0, *accumulate(lengths)])
    found: list[list[Stretch]] = []
    for rank, tokens in enumerate(slices):
        sample = np.searchsorted(starts, tokens, side="right") - 1
        goes_on = (np.diff(tokens, prepend=-2) == 1) & (np.diff(sample, prepend=-1) == 0)
        begins = np.flatnonzero(~goes_on)
        positions = (tokens - starts[sample])[begins]
        sizes = np.diff(begins, append=len(tokens))
        found.append(
            [
                Stretch(rank, number, *map(int, each))
                for number, each in enumerate(zip(sample[begins], positions, begins, sizes, strict=True))
            ]
        )
    return found


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
        self.group, self.rank, self.slices, self.lengths, self.device = group, rank, slices, lengths, device
        self.overlap = overlap
        self.held = stretches(slices, lengths)
        self.own = self.held[rank]
        self.chains: dict[int, list[Stretch]] = {}  # sample -> its stretches, by position
        for stretch in sorted((s for held in self.held for s in held), key=lambda s: (s.sample, s.position)):
            self.chains.setdefault(stretch.sample, []).append(stretch)
        self.is_cut = any(len(chain) > 1 for chain in self.chains.values())
        self._halos: dict[int, tuple[Sending, torch.Tensor]] = {}

    @property
    def own_lengths(self) -> list[int]:
        """Tokens of each stretch of this rank."""
        return [stretch.length for stretch in self.own]

    def convolve(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return the causal convolution of `x` `[T, C]` with `weight` `[C, K]`, as `[T, C]`. Collective."""
        room = weight.shape[1] - 1
        before = x.new_zeros(len(self.own), room, x.shape[1])
        if self.is_cut and room:
            sending, place = self._halo(room)
            came = exchange_rows(x[sending.rows], sending.sent, sending.received, self.group, "sp")
            before = torch.cat([came, came.new_zeros(1, x.shape[1])])[place]
            # The exchange in backward is a collective. Every rank reaches it only if its output depends on the received
            # rows, even if it uses none of them.
            before = before + 0 * came.sum()
        return convolve(x, weight, bias, self.own_lengths, before)

    def carry(self, steps: RecurrentInputs, by: str | None = None) -> torch.Tensor:
        """Return the output of the recurrence for this rank's tokens, `[T, H, V]`. Collective.

        `by` is `states` or `heads`. None selects the one with fewer bytes sent by the busiest rank.
        """
        if not self.is_cut:
            return ops.run_recurrence(steps, self.own_lengths)[0]
        if by is None:
            costs = self.bytes_sent(steps)
            by = min(costs, key=lambda way: max(costs[way]))
        return self._by_heads(steps) if by == "heads" else self._by_states(steps)

    def bytes_sent(self, steps: RecurrentInputs) -> dict[str, list[int]]:
        """Return the bytes that each rank sends in a forward pass, for each method that is possible.

        By states: `H K (V + K)` fp32 numbers (delta rule), or `H K (V + 1)`, for each stretch and each rank that holds
        later stretches of its sample. By heads: query, key, value and gates of each token are sent to the ranks of its
        heads, and its output is sent back. `steps` may have any number of tokens.
        """
        (heads, wide), (groups, deep) = steps.value.shape[1:], steps.key.shape[1:]
        ranks, size, full = range(len(self.slices)), steps.value.itemsize, steps.wide.itemsize
        pairs = [0 for _ in ranks]
        for chain in self.chains.values():
            for stretch, to in _later(chain):
                pairs[stretch.rank] += len(to - {stretch.rank})
        each = heads * deep * (wide + (deep if steps.is_delta else 1)) * full
        costs = {"states": [count * each for count in pairs]}
        if heads >= len(ranks):
            split, tokens = split_heads(heads, groups, len(ranks)), [len(own) for own in self.slices]
            gates = 1 + (deep if steps.decay.dim() == 3 else 1)
            given = [
                (last - first) * (wide * size + gates * full) + (end - begin) * 2 * deep * size
                for (first, last), (begin, end) in zip(split.heads, split.kv_heads, strict=True)
            ]
            back = [(last - first) * wide * size for first, last in split.heads]
            costs["heads"] = [
                sum(tokens[rank] * given[other] + tokens[other] * back[rank] for other in ranks if other != rank)
                for rank in ranks
            ]
        return costs

    def _by_states(self, steps: RecurrentInputs) -> torch.Tensor:
        """Compute each stretch without an incoming state, then add the contributions of the received states."""
        wide = steps.value.shape[2]
        alone = ops.apart(steps, self.own_lengths)
        sending, row_of = self._pair_rows
        came = exchange_rows(alone.effect[sending.rows], sending.sent, sending.received, self.group, "sp")
        pieces, effects = list(alone.out.split(self.own_lengths)), came.unbind()
        for chain in self.chains.values():
            last = max((i for i, stretch in enumerate(chain) if stretch.rank == self.rank), default=0)
            state: torch.Tensor | None = None
            for stretch in chain[: last + 1]:
                if stretch.rank == self.rank and state is not None:
                    pieces[stretch.number] = pieces[stretch.number] + alone.added(stretch.number, state)
                if stretch in row_of:
                    state = ops.advance(effects[row_of[stretch]], state, wide)
        # The exchange in backward is a collective. Every rank reaches it only if its output depends on `came`.
        return torch.cat([alone.out[:0], *pieces]) + 0 * came.sum().to(alone.out.dtype)

    def _by_heads(self, steps: RecurrentInputs) -> torch.Tensor:
        """Gather all tokens of this rank's heads, run the recurrence, and scatter the outputs back."""
        split = split_heads(steps.value.shape[1], steps.key.shape[1], len(self.slices))
        exchange = Exchange(self.group, "sp", self.rank, [len(tokens) for tokens in self.slices], self.overlap)
        order, back = self._order
        deep, by_channel = steps.key.shape[2], steps.decay.dim() == 3
        decay = steps.decay if by_channel else steps.decay.unsqueeze(-1)
        gates = torch.cat([steps.beta.unsqueeze(-1).to(steps.wide), decay.to(steps.wide)], -1)
        pairs = torch.cat([steps.query, steps.key], -1)
        ranges = (split.kv_heads, split.heads, split.heads)
        gathered = GatherTokens.apply(exchange, ranges, pairs, gates, steps.value)  # type: ignore[no-untyped-call]
        pairs, gates, value = (x[order] for x in gathered)
        query, key = repeat_kv(pairs, split.kv_repeats(self.rank)).split([deep, deep], -1)
        decay = gates[..., 1:] if by_channel else gates[..., 1]
        own = replace(steps, query=query, key=key, value=value, decay=decay, beta=gates[..., 0])
        out = ops.run_recurrence(own, self.lengths)[0]
        result: torch.Tensor = ScatterTokens.apply(exchange, split, out[back])  # type: ignore[no-untyped-call]
        return result

    def _sending(self, wanted: Iterator[tuple[int, int, int]]) -> tuple[Sending, list[int]]:
        """Plan an exchange of rows.

        Args:
            wanted: (rank that needs a row, rank that holds it, index of the row there), in the same order on all ranks.

        Returns:
            The rows to send and receive, and for each row that this rank needs, its index among the received rows.
        """
        ranks = range(len(self.slices))
        sent: list[list[int]] = [[] for _ in ranks]
        mine: list[list[int]] = [[] for _ in ranks]
        count = 0
        for to, owner, row in wanted:
            if owner == self.rank:
                sent[to].append(row)
            if to == self.rank:
                mine[owner].append(count)
                count += 1
        arrived = [number for numbers in mine for number in numbers]
        place = np.argsort(np.array(arrived, np.int64), kind="stable").tolist()
        rows = to_device(torch.tensor([row for rows in sent for row in rows], dtype=torch.int64), self.device)
        return Sending(rows, [len(rows) for rows in sent], [len(numbers) for numbers in mine]), place

    def _halo(self, room: int) -> tuple[Sending, torch.Tensor]:
        """Plan the exchange of the `room` tokens before each stretch, for a convolution.

        Returns:
            The rows to send and receive, and an index `[stretches, room]` into the received rows. Positions before the
            start of a sample get an index one past the last received row.
        """
        if room not in self._halos:
            starts = [0, *accumulate(self.lengths)]
            owner, row = np.empty(starts[-1], np.int64), np.empty(starts[-1], np.int64)
            for rank, tokens in enumerate(self.slices):
                owner[tokens], row[tokens] = rank, np.arange(len(tokens))

            def wanted() -> Iterator[tuple[int, int, int]]:
                for held in self.held:
                    for stretch in held:
                        first = starts[stretch.sample]
                        for position in range(max(0, stretch.position - room), stretch.position):
                            yield stretch.rank, int(owner[first + position]), int(row[first + position])

            sending, place = self._sending(wanted())
            there, coming = np.full((len(self.own), room), len(place)), iter(place)
            for stretch in self.own:
                for gap in range(max(0, room - stretch.position), room):
                    there[stretch.number, gap] = next(coming)
            self._halos[room] = sending, to_device(torch.from_numpy(there), self.device)
        return self._halos[room]

    @cached_property
    def _pair_rows(self) -> tuple[Sending, dict[Stretch, int]]:
        """Exchange of (M, U) pairs for `_by_states`, and the received row of each stretch whose pair is needed here."""
        needed = [(stretch, to) for chain in self.chains.values() for stretch, to in _later(chain)]
        sending, place = self._sending(
            (to, stretch.rank, stretch.number) for stretch, ranks in needed for to in sorted(ranks)
        )
        here = [stretch for stretch, ranks in needed if self.rank in ranks]
        return sending, dict(zip(here, place, strict=True))

    @cached_property
    def _order(self) -> tuple[torch.Tensor, ...]:
        """Permutation from tokens sorted by rank to tokens in pack order, and its inverse."""
        places = np.concatenate(self.slices)
        both = (np.argsort(places, kind="stable"), places)
        return tuple(to_device(torch.from_numpy(index), self.device) for index in both)


def _later(chain: Sequence[Stretch]) -> Iterator[tuple[Stretch, set[int]]]:
    """Yield each stretch of a sample except the last, with the ranks that hold later stretches."""
    for number, stretch in enumerate(chain[:-1]):
        yield stretch, {later.rank for later in chain[number + 1 :]}
