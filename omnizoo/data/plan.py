"""Who works on what in a step: packs are shared among data-parallel ranks and media items among all ranks, by cost.

A plan is a pure function of what is known of the packs (lengths and costs, no data): no ranks talk, none are needed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from omnizoo.data.flat_pack import filler
from omnizoo.data.told import PREFERENCES, Cost, Numbers, Told, known_of, ranges
from omnizoo.modalities.base import Port
from omnizoo.parallel.assign import assign_items_near, assign_packs
from omnizoo.parallel.layout import Layout
from omnizoo.parallel.route import Route, Share, plan_routes

TEXT = "text"
RESIDUAL = "residual"  # the second loss of a follower or a decoder


@dataclass(frozen=True)
class Totals:
    """What the packs of all ranks hold together."""

    tokens: int
    packs: int
    targets: dict[str, int]  # of the text, and of each modality that is produced
    weight: float  # sum of the weights of the text's targets; as many as they are where no row has any
    flops: float  # of packs and media items
    answers: int = 0  # samples with a target of the text
    # Of preferences:
    pairs: int = 0
    desirable: int = 0  # answers that are judged one by one
    undesirable: int = 0
    mismatched: int = 0  # answers to other prompts

    @property
    def is_learnt(self) -> bool:
        """Whether a loss can be on any of it. Answers may be media alone, which no loss but theirs is on."""
        return any(self.targets.values()) or self.pairs + self.desirable + self.undesirable > 0


@dataclass(frozen=True)
class Plan:
    """Of one step."""

    rounds: list["Round"]
    totals: Totals
    imbalance: dict[str, float]  # busiest rank / mean over ranks: of packs (`tokens`), and of each port


@dataclass(frozen=True)
class PlacedItem:
    """An item on its way, as `parallel.route` sees it."""

    port: Port
    spans: Sequence[tuple[int, int]]
    is_target: bool
    is_learnt: bool
    places: int


def plan_step(told: Told, layout: Layout, micro_batch: int, calls: Sequence[Sequence[Port]], cost: Cost) -> Plan:
    """The plan for the packs of all ranks, told in any order. `calls` are the model's ports, by call of a module,
    whether or not these packs have items for them."""
    ports = [port for call in calls for port in call]
    count = len(told.packs)
    if not count:
        return Plan([], Totals(0, 0, {}, 0, 0.0), {})
    totals = count_totals(told, ports)
    # Held-out packs need not divide evenly.
    fillers = [known_of(filler(-1 - i)) for i in range(-count % (layout.dp * micro_batch))]
    by_index = np.argsort(told.packs["index"], kind="stable")
    rows = np.concatenate([by_index, count + np.arange(len(fillers))])
    told = Told.join([told, Told.of(fillers, ports, cost)])
    costs = told.packs["cost"][rows]
    # By cost on every rank, since ranks wait for each other in each micro-batch, not once a step.
    share = np.array([sorted(own, key=lambda i: (-costs[i], i)) for own in assign_packs(costs, layout.dp)])
    rounds = [
        Round(told, rows[share[:, first : first + micro_batch]], layout, calls)
        for first in range(0, share.shape[1], micro_batch)
    ]
    slowest = float(costs[share].max(0).sum())
    imbalance = {"tokens": slowest * layout.dp / float(costs.sum())} | media_imbalance(rounds, layout.world)
    return Plan(rounds, totals, imbalance)


def count_totals(told: Told, ports: Sequence[Port]) -> Totals:
    is_real = told.packs["is_filler"] == 0
    real, items = told.packs[is_real], told.items[np.repeat(is_real, told.packs["items"])]
    targets = {TEXT: int(real["labels"].sum())}
    for number, port in enumerate(ports):
        own = items[items["port"] == number]
        if port.role != "encoder" and len(own):
            targets[port.modality] = targets.get(port.modality, 0) + int(own["targets"].sum())
        if port.role != "encoder" and own["residual"].any():
            targets[f"{port.modality}/{RESIDUAL}"] = int(own["residual"].sum())
    return Totals(
        tokens=int(told.tokens[is_real].sum()),
        packs=len(real),
        targets=targets,
        weight=_sum(real["weight"]),
        flops=_sum(real["cost"]) + _sum(items["cost"]),
        answers=int(real["answers"].sum()),
        **{name: int(real[name].sum()) for name in PREFERENCES},
    )


def _sum(values: npt.NDArray[np.float64]) -> float:
    """Sorted first: the same to the last digit, in whatever order ranks told them."""
    return float(np.sort(values).sum())


class Round:
    """One micro-batch of all ranks: `packs[d]` are the indices of those of data-parallel rank d; items of all of them,
    in this order, and who works on each."""

    def __init__(self, told: Told, rows: Numbers, layout: Layout, calls: Sequence[Sequence[Port]]) -> None:
        """`rows [dp, packs]` are those of `told.packs`."""
        self.told, self.rows, self.layout, self.calls = told, rows, layout, calls
        self.ports = [port for call in calls for port in call]
        self.packs: list[list[int]] = told.packs["index"][rows].tolist()
        held, tokens = told.packs["items"][rows], told.tokens[rows]
        self.items = ranges(told.first_item[rows].flatten(), held.flatten())  # [N] rows of `told.items`
        self.moved = np.repeat((tokens.cumsum(1) - tokens).flatten(), held.flatten())  # [N] tokens before its pack
        self.dp_of = np.repeat(np.arange(len(rows)), held.sum(1))  # [N]
        self.port = told.items["port"][self.items]  # [N]
        self.cost = told.items["cost"][self.items]  # [N]
        self.owners = np.zeros(len(self.items), np.int64)
        self.call = np.repeat(np.arange(len(calls)), [len(call) for call in calls])[self.port]  # [N]
        for number in range(len(calls)):  # ranks wait for each other in every call: each is balanced by itself
            own = np.flatnonzero(self.call == number)
            home = self.dp_of[own] * layout.sp
            self.owners[own] = assign_items_near(self.cost[own], home, layout.world, layout.sp)

    def owned(self, rank: int) -> list[tuple[int, Port]]:
        """The items that a rank works on: their numbers in this micro-batch, and what they go through."""
        return [(int(at), self.ports[self.port[at]]) for at in np.flatnonzero(self.owners == rank)]

    def routes(self, rank: int) -> dict[Port, Route]:
        """How what the owners make of items gets to the tokens of all ranks, as `rank` sees it."""
        has_places = self.told.items["spans"][self.items] > 0
        present = [port for number, port in enumerate(self.ports) if (has_places & (self.port == number)).any()]
        own = rank // self.layout.sp
        concerned = np.flatnonzero((self.dp_of == own) | (self.owners == rank))
        shares = [Share([], [], [])] * self.layout.dp
        for d in np.unique(self.dp_of[concerned]).tolist():
            at = concerned[self.dp_of[concerned] == d]
            items = [self._placed(i) for i in at.tolist()]
            shares[d] = Share(self.told.lengths_of(self.rows[d]), items, self.owners[at].tolist())
        return plan_routes(self.layout, rank, shares, present)

    def _placed(self, at: int) -> PlacedItem:
        item = int(self.items[at])
        spans = self.told.spans_of(item, int(self.moved[at]))
        told = self.told.items[item]
        port = self.ports[self.port[at]]
        is_inside = port.role != "follower"  # a follower's targets are not among the tokens
        is_target, is_learnt = bool(told["is_target"]) and is_inside, bool(told["targets"]) and is_inside
        return PlacedItem(port, spans, is_target, is_learnt, int(told["places"]))


def media_imbalance(rounds: Sequence[Round], world: int) -> dict[str, float]:
    """Of each port: the work of the busiest rank in the call it is part of, summed over micro-batches, against the
    mean. 1 if there is none."""
    figures: dict[str, float] = {}
    for number, call in enumerate(rounds[0].calls):
        busiest = total = 0.0
        for each in rounds:
            loads = np.bincount(each.owners, each.cost * (each.call == number), world)
            busiest, total = busiest + float(loads.max()), total + float(loads.sum())
        figures |= {str(port): busiest / (total / world) if total else 1.0 for port in call}
    return figures
