"""State along a sequence whose tokens are spread over ranks: convolutions and the gated delta rule, as on one.

A rank holds stretches of samples. A convolution needs the few tokens before each stretch, which their owners send. For
the delta rule there are two ways, and the one that sends less is taken:

- by states: the rule is affine in the state before a stretch, so each rank works on its stretches at once, as a pair
  (M, U) with `after = M before + U`; pairs go to the ranks that hold later stretches of the same sample, and what a
  state adds to the output is added there. What is sent does not grow with the number of tokens.
- by heads: tokens of all heads are exchanged for all tokens of some heads, as Ulysses does it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from omnizoo.ops import recurrence as ops
from omnizoo.ops.device import to_device
from omnizoo.parallel.exchange import exchange_rows
from omnizoo.parallel.ulysses import Exchange, GatherTokens, ScatterTokens, split_heads

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Stretch:
    """Tokens of a sample that follow each other, on one rank."""

    rank: int
    number: int  # among those of its rank
    sample: int
    position: int  # of its first token in the sample
    at: int  # of its first token among those of its rank
    length: int


def stretches(slices: Sequence[Indices], lengths: Sequence[int]) -> list[list[Stretch]]:
    """Of each rank, given the indices of its tokens in a pack of samples of these lengths."""
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
    """Rows for and from each rank."""

    rows: torch.Tensor  # of this rank's table: what it sends, in order
    sent: list[int]
    received: list[int]


class Recurrence:
    """One packed micro-batch on the ranks of `group`. `slices`: the indices of each rank's tokens in it."""

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
        self.chains: dict[int, list[Stretch]] = {}  # the stretches of each sample, in order
        for stretch in sorted((s for held in self.held for s in held), key=lambda s: (s.sample, s.position)):
            self.chains.setdefault(stretch.sample, []).append(stretch)
        self.is_cut = any(len(chain) > 1 for chain in self.chains.values())
        self._halos: dict[int, tuple[Sending, torch.Tensor]] = {}
        self._pairs: tuple[Sending, dict[Stretch, int]] | None = None
        self._order: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def own_lengths(self) -> list[int]:
        return [stretch.length for stretch in self.own]

    def convolve(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """`x [T, C]`, `weight [C, K]`; returns `[T, C]`."""
        room = weight.shape[1] - 1
        before = x.new_zeros(len(self.own), room, x.shape[1])
        if self.is_cut and room:
            sending, place = self._halo(room)
            came = exchange_rows(x[sending.rows], sending.sent, sending.received, self.group)
            before = torch.cat([came, came.new_zeros(1, x.shape[1])])[place]
            # Ranks answer each other in backward only if what came is part of what they made.
            before = before + 0 * came.sum()
        return ops.convolve(x, weight, bias, self.own_lengths, before)

    def delta_rule(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        decay: torch.Tensor,
        beta: torch.Tensor,
        by: str | None = None,
    ) -> torch.Tensor:
        """As `ops.recurrence.delta_rule`, without states to begin with. `by`: `states` or `heads`; None: what is less
        to send."""
        if not self.is_cut:
            return ops.delta_rule(query, key, value, decay, beta, self.own_lengths)[0]
        if by is None:
            costs = self.elements(key.shape[1], key.shape[2], value.shape[2], decay.dim() == 3)
            by = min(costs, key=costs.__getitem__)
        if by == "heads":
            return self._by_heads(query, key, value, decay, beta)
        return self._by_states(query, key, value, decay, beta)

    def elements(self, heads: int, deep: int, wide: int, decays_by_channel: bool) -> dict[str, int]:
        """How many numbers the busiest rank sends to others in a forward pass, by each way."""
        pairs = [0] * len(self.slices)
        for chain in self.chains.values():
            for stretch, to in _later(chain):
                pairs[stretch.rank] += len(to - {stretch.rank})
        costs = {"states": max(pairs) * heads * deep * (deep + wide)}
        if heads >= len(self.slices):
            width = 2 * deep + 2 * wide + 1 + (deep if decays_by_channel else 1)
            most = max(len(tokens) for tokens in self.slices)
            costs["heads"] = most * heads * width * (len(self.slices) - 1) // len(self.slices)
        return costs

    def _by_states(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor
    ) -> torch.Tensor:
        heads, deep, wide = key.shape[1], key.shape[2], value.shape[2]
        # Next to the values, as many columns as the state has rows, which nothing is written to; and a state that is
        # zero for the values and the identity for those: what comes out there is what any state before would give.
        identity = torch.eye(deep, dtype=value.dtype, device=value.device).expand(len(self.own), heads, deep, deep)
        nothing = value.new_zeros(len(self.own), heads, deep, wide)
        padded = torch.cat([value, value.new_zeros(len(value), heads, deep)], -1)
        begin = torch.cat([nothing, identity], -1)
        out, after = ops.delta_rule(query, key, padded, decay, beta, self.own_lengths, begin)
        sending, row_of = self._pair_rows()
        came = exchange_rows(after[sending.rows], sending.sent, sending.received, self.group)
        out, reads = out.split([wide, deep], -1)
        pieces = list(out.split(self.own_lengths))
        for chain in self.chains.values():
            last = max((i for i, stretch in enumerate(chain) if stretch.rank == self.rank), default=0)
            state: torch.Tensor | None = None
            for stretch in chain[: last + 1]:
                if stretch.rank == self.rank and state is not None:
                    own = reads[stretch.at : stretch.at + stretch.length].transpose(0, 1)
                    pieces[stretch.number] = pieces[stretch.number] + (own @ state).transpose(0, 1)
                if stretch in row_of:
                    added, moved = came[row_of[stretch]].split([wide, deep], -1)
                    state = added if state is None else added + moved @ state
        # Ranks answer each other in backward only if what came is part of what they made.
        return torch.cat([out[:0], *pieces]) + 0 * came.sum()

    def _by_heads(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor
    ) -> torch.Tensor:
        split = split_heads(key.shape[1], key.shape[1], len(self.slices))
        exchange = Exchange(self.group, self.rank, [len(tokens) for tokens in self.slices], self.overlap)
        if self._order is None:
            places = np.concatenate(self.slices)
            both = (np.argsort(places, kind="stable"), places)
            there, back = (to_device(torch.from_numpy(index), self.device) for index in both)
            self._order = there, back
        order, back = self._order
        deep, by_channel = key.shape[2], decay.dim() == 3
        gates = torch.cat([beta.unsqueeze(-1), decay if by_channel else decay.unsqueeze(-1)], -1)
        given = (torch.cat([query, key], -1), gates.to(value.dtype), value)
        pair, gates, value = (x[order] for x in GatherTokens.apply(exchange, split, *given))  # type: ignore[no-untyped-call]
        query, key = pair.split([deep, deep], -1)
        decay = gates[..., 1:] if by_channel else gates[..., 1]
        out = ops.delta_rule(query, key, value, decay, gates[..., 0], self.lengths)[0]
        result: torch.Tensor = ScatterTokens.apply(exchange, split, out[back])  # type: ignore[no-untyped-call]
        return result

    def _sending(self, wanted: Iterator[tuple[int, int, int]]) -> tuple[Sending, list[int]]:
        """By (rank that wants a row, rank that has it, its number there), in an order that all ranks agree on. The
        list: of each row that this rank wants, where it will be in what comes."""
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
        """For a convolution: the `room` tokens before each stretch, and where they are in what comes, or after it for
        those before the sample begins."""
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

    def _pair_rows(self) -> tuple[Sending, dict[Stretch, int]]:
        """For the delta rule: the pairs that this rank needs, by their stretch, as rows of what comes."""
        if self._pairs is None:
            needed = [(stretch, to) for chain in self.chains.values() for stretch, to in _later(chain)]
            sending, place = self._sending(
                (to, stretch.rank, stretch.number) for stretch, ranks in needed for to in sorted(ranks)
            )
            here = [stretch for stretch, ranks in needed if self.rank in ranks]
            self._pairs = sending, dict(zip(here, place, strict=True))
        return self._pairs


def _later(chain: Sequence[Stretch]) -> Iterator[tuple[Stretch, set[int]]]:
    """Each stretch of a sample but the last, and the ranks that hold later ones."""
    for number, stretch in enumerate(chain[:-1]):
        yield stretch, {later.rank for later in chain[number + 1 :]}
