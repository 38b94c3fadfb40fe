"""State along a sequence whose tokens are spread over ranks: convolutions and recurrent rules, as on one.

A rank holds stretches of samples. A convolution needs the few tokens before each stretch, which their owners send. For
rules there are two ways, and the one that sends less is taken:

- by states: a rule is affine in the state before a stretch, so each rank works on its stretches at once, as a pair
  (M, U) with `after = M before + U`; pairs go to the ranks that hold later stretches of the same sample, and what a
  state adds to the output is added there. What is sent does not grow with the number of tokens.
- by heads: tokens of all heads are exchanged for all tokens of some heads, as Ulysses does it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from omnizoo.ops import recurrence as ops
from omnizoo.ops.device import to_device
from omnizoo.ops.recurrence import Steps
from omnizoo.ops.short_convolution import convolve
from omnizoo.parallel.exchange import exchange_rows
from omnizoo.parallel.ring import repeat_kv
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
        return convolve(x, weight, bias, self.own_lengths, before)

    def carry(self, steps: Steps, by: str | None = None) -> torch.Tensor:
        """What the tokens of this rank read, `[T, H, V]`. `by`: `states` or `heads`; None: what is less to send."""
        if not self.is_cut:
            return ops.carry(steps, self.own_lengths)[0]
        if by is None:
            costs = self.bytes_sent(steps)
            by = min(costs, key=lambda way: max(costs[way]))
        return self._by_heads(steps) if by == "heads" else self._by_states(steps)

    def bytes_sent(self, steps: Steps) -> dict[str, list[int]]:
        """What each rank sends to others in a forward pass, by each way that there is; `steps` of any number of tokens.

        By states: `H K (V + K)` numbers in fp32 (delta rule) or `H K (V + 1)`, for each stretch and each rank that
        holds later ones of its sample. By heads: each token's query, key, value and gates to the ranks of its heads,
        and its output back.
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

    def _by_states(self, steps: Steps) -> torch.Tensor:
        wide = steps.value.shape[2]
        alone = ops.apart(steps, self.own_lengths)
        sending, row_of = self._pair_rows()
        came = exchange_rows(alone.effect[sending.rows], sending.sent, sending.received, self.group)
        pieces, effects = list(alone.out.split(self.own_lengths)), came.unbind()
        for chain in self.chains.values():
            last = max((i for i, stretch in enumerate(chain) if stretch.rank == self.rank), default=0)
            state: torch.Tensor | None = None
            for stretch in chain[: last + 1]:
                if stretch.rank == self.rank and state is not None:
                    pieces[stretch.number] = pieces[stretch.number] + alone.added(stretch.number, state)
                if stretch in row_of:
                    state = ops.advance(effects[row_of[stretch]], state, wide)
        # Ranks answer each other in backward only if what came is part of what they made.
        return torch.cat([alone.out[:0], *pieces]) + 0 * came.sum().to(alone.out.dtype)

    def _by_heads(self, steps: Steps) -> torch.Tensor:
        split = split_heads(steps.value.shape[1], steps.key.shape[1], len(self.slices))
        exchange = Exchange(self.group, self.rank, [len(tokens) for tokens in self.slices], self.overlap)
        if self._order is None:
            places = np.concatenate(self.slices)
            both = (np.argsort(places, kind="stable"), places)
            there, back = (to_device(torch.from_numpy(index), self.device) for index in both)
            self._order = there, back
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
        out = ops.carry(own, self.lengths)[0]
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
        """For a rule: the pairs that this rank needs, by their stretch, as rows of what comes."""
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
