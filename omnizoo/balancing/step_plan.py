"""The plan of a step: packs are assigned to data-parallel ranks, and media items to all ranks, by cost.

A plan depends on nothing but the pack metadata (lengths and costs, no token data). Every rank computes the same plan
without communication, and a plan can be computed without any ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from omnizoo.balancing.assign import assign_items_near, assign_packs
from omnizoo.balancing.pack_metadata import PREFERENCES, Cost, Numbers, PackTable, ranges, starts
from omnizoo.data.packing.pack import dummy_pack
from omnizoo.modalities.item import Port
from omnizoo.parallel.feature_exchange import FeatureRoute, PackGroup, plan_routes
from omnizoo.parallel.layout import Layout

TEXT = "text"
RESIDUAL = "residual"  # the second loss of a follower or a decoder


@dataclass(frozen=True)
class StepTotals:
    """Totals over the packs of all ranks, without dummy packs."""

    tokens: int
    packs: int
    targets: dict[str, int]  # number of targets, for text and each generated modality
    weight: float  # sum of the weights of text targets; equals their number if no row sets a weight
    flops: float  # FLOPs of packs and media items
    answers: int = 0  # number of segments with a text target
    # Counts of preferences:
    pairs: int = 0
    desirable: int = 0  # number of responses labeled desirable (KTO)
    undesirable: int = 0
    mismatched: int = 0  # number of mismatched responses (KTO baseline)

    @property
    def has_targets(self) -> bool:
        """Whether any loss has targets in this step.

        Responses of preferences count even without text targets: they may consist of media alone.
        """
        return any(self.targets.values()) or self.pairs + self.desirable + self.undesirable > 0


@dataclass(frozen=True)
class StepPlan:
    """The plan of one step: one plan per micro-batch, and totals."""

    rounds: list["MicroBatchPlan"]
    totals: StepTotals
    imbalance: dict[str, float]  # busiest rank / mean over ranks, for packs (`tokens`) and for each port


@dataclass(frozen=True)
class RoutedItem:
    """A media item as `plan_routes` needs it; implements `RoutedSpan`."""

    port: Port
    spans: Sequence[tuple[int, int]]
    is_target: bool
    has_targets: bool
    num_placeholders: int


def plan_step(
    told: PackTable, layout: Layout, micro_batch: int, calls: Sequence[Sequence[Port]], cost: Cost
) -> StepPlan:
    """Return the plan for the packs of all ranks.

    Args:
        told: Metadata of the packs of all ranks, in any order.
        layout: Sizes of the mesh axes.
        micro_batch: Number of packs per micro-batch and data-parallel rank.
        calls: Ports of the model, grouped by module call, whether or not these packs have items for them.
        cost: Returns the FLOPs of a pack.
    """
    ports = [port for call in calls for port in call]
    count = len(told.packs)
    if not count:
        return StepPlan([], StepTotals(0, 0, {}, 0, 0.0), {})
    totals = count_totals(told, ports)
    # The number of held-out packs may not be divisible by the number of ranks: add dummy packs.
    fillers = [dummy_pack(-1 - i) for i in range(-count % (layout.dp * micro_batch))]
    by_index = np.argsort(told.packs["index"], kind="stable")
    rows = np.concatenate([by_index, count + np.arange(len(fillers))])
    told = PackTable.join([told, PackTable.of(fillers, ports, cost)])
    costs = told.packs["cost"][rows]
    # Every rank processes its packs in order of cost, because ranks wait for each other in every micro-batch.
    share = np.array([sorted(own, key=lambda i: (-costs[i], i)) for own in assign_packs(costs, layout.dp)])
    rounds = [
        MicroBatchPlan(told, rows[share[:, first : first + micro_batch]], layout, calls)
        for first in range(0, share.shape[1], micro_batch)
    ]
    slowest = float(costs[share].max(0).sum())
    imbalance = {"tokens": slowest * layout.dp / float(costs.sum())} | media_imbalance(rounds, layout.world)
    return StepPlan(rounds, totals, imbalance)


def count_totals(told: PackTable, ports: Sequence[Port]) -> StepTotals:
    is_real = told.packs["is_filler"] == 0
    real, items = told.packs[is_real], told.items[np.repeat(is_real, told.packs["items"])]
    targets = {TEXT: int(real["labels"].sum())}
    for number, port in enumerate(ports):
        own = items[items["port"] == number]
        if port.role != "encoder" and len(own):
            targets[port.modality] = targets.get(port.modality, 0) + int(own["targets"].sum())
        if port.role != "encoder" and own["residual"].any():
            targets[f"{port.modality}/{RESIDUAL}"] = int(own["residual"].sum())
    return StepTotals(
        tokens=int(told.tokens[is_real].sum()),
        packs=len(real),
        targets=targets,
        weight=_sum(real["weight"]),
        flops=_sum(real["cost"]) + _sum(items["cost"]),
        answers=int(real["answers"].sum()),
        **{name: int(real[name].sum()) for name in PREFERENCES},
    )


def _sum(values: npt.NDArray[np.float64]) -> float:
    """Sum in sorted order, so that the result is bitwise independent of the order of packs."""
    return float(np.sort(values).sum())


class MicroBatchPlan:
    """The plan of one micro-batch on all ranks.

    `packs[d]` has the indices of the packs of data-parallel rank d. The media items of all packs are numbered in this
    order, and `owners` has the rank that processes each of them. N is the number of items.
    """

    def __init__(self, told: PackTable, rows: Numbers, layout: Layout, calls: Sequence[Sequence[Port]]) -> None:
        """Assign media items to ranks.

        Args:
            told: Metadata of the packs of all ranks.
            rows: `[dp, packs]`, rows of `told.packs` that each data-parallel rank processes.
            layout: Sizes of the mesh axes.
            calls: Ports of the model, grouped by module call.
        """
        self.told, self.rows, self.layout, self.calls = told, rows, layout, calls
        self.ports = [port for call in calls for port in call]
        self.packs: list[list[int]] = told.packs["index"][rows].tolist()
        held, tokens = told.packs["items"][rows], told.tokens[rows]
        self.items = ranges(starts(told.packs["items"])[rows].flatten(), held.flatten())  # [N], rows of `told.items`
        self.moved = np.repeat((tokens.cumsum(1) - tokens).flatten(), held.flatten())  # [N], tokens before the pack
        self.dp_of = np.repeat(np.arange(len(rows)), held.sum(1))  # [N], data-parallel rank of the item's pack
        self.port = told.items["port"][self.items]  # [N], index into `ports`
        self.cost = told.items["cost"][self.items]  # [N], FLOPs
        self.owners = np.zeros(len(self.items), np.int64)
        self.call = np.repeat(np.arange(len(calls)), [len(call) for call in calls])[self.port]  # [N], index of call
        for number in range(len(calls)):  # ranks wait for each other in every call, so calls are balanced separately
            own = np.flatnonzero(self.call == number)
            home = self.dp_of[own] * layout.sp
            self.owners[own] = assign_items_near(self.cost[own], home, layout.world, layout.sp)

    def owned(self, rank: int) -> list[tuple[int, Port]]:
        """Return the items that a rank processes: the number of each in this micro-batch, and its port."""
        return [(int(at), self.ports[self.port[at]]) for at in np.flatnonzero(self.owners == rank)]

    def routes(self, rank: int) -> dict[Port, FeatureRoute]:
        """Return, for each port, which features `rank` sends to other ranks, and which it receives for its tokens."""
        has_places = self.told.items["spans"][self.items] > 0
        present = [port for number, port in enumerate(self.ports) if (has_places & (self.port == number)).any()]
        own = rank // self.layout.sp
        concerned = np.flatnonzero((self.dp_of == own) | (self.owners == rank))
        shares = [PackGroup([], [], [])] * self.layout.dp
        for d in np.unique(self.dp_of[concerned]).tolist():
            at = concerned[self.dp_of[concerned] == d]
            items = [self._placed(i) for i in at.tolist()]
            shares[d] = PackGroup(self.told.lengths_of(self.rows[d]), items, self.owners[at].tolist())
        return plan_routes(self.layout, rank, shares, present)

    def _placed(self, at: int) -> RoutedItem:
        item = int(self.items[at])
        spans = self.told.spans_of(item, int(self.moved[at]))
        told = self.told.items[item]
        port = self.ports[self.port[at]]
        is_inside = port.role != "follower"  # targets of followers are not in the token sequence
        is_target, has_targets = bool(told["is_target"]) and is_inside, bool(told["targets"]) and is_inside
        return RoutedItem(port, spans, is_target, has_targets, int(told["places"]))


def media_imbalance(rounds: Sequence[MicroBatchPlan], world: int) -> dict[str, float]:
    """Return, for each port, the cost on the busiest rank / mean over ranks, of the module call that it is part of.

    Costs are summed over micro-batches. The value is 1 if the call has no items.
    """
    figures: dict[str, float] = {}
    for number, call in enumerate(rounds[0].calls):
        busiest = total = 0.0
        for each in rounds:
            loads = np.bincount(each.owners, each.cost * (each.call == number), world)
            busiest, total = busiest + float(loads.max()), total + float(loads.sum())
        figures |= {str(port): busiest / (total / world) if total else 1.0 for port in call}
    return figures
