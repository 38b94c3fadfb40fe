"""Plan a step: decide which data-parallel rank trains on each pack, and which rank processes each media item.

A plan depends only on pack metadata (lengths and costs, no token data). Every rank computes the same plan, so the ranks
need no further communication. A plan can also be computed outside a distributed run.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from omnizoo.balancing.assign import assign_items_near, assign_packs
from omnizoo.balancing.pack_metadata import (
    PREFERENCES,
    Cost,
    Numbers,
    PackTable,
    Records,
    concatenate_ranges,
    offsets,
)
from omnizoo.data.packing.pack import dummy_pack
from omnizoo.modalities.item import Port
from omnizoo.parallel.feature_exchange import FeatureRoute, PackGroup, plan_routes
from omnizoo.parallel.layout import Layout

TEXT = "text"  # key of text targets in `StepTotals.targets`
RESIDUAL = "residual"  # suffix of the second loss that a follower or decoder may have


@dataclass(frozen=True)
class StepTotals:
    """Totals over the packs of all ranks, without dummy packs."""

    tokens: int
    packs: int
    targets: dict[str, int]  # number of targets of text and of each generated modality
    weight: float  # sum of the weights of text targets; equals their number if no row sets a weight
    flops: float  # FLOPs of packs and media items
    answers: int = 0  # number of segments with a text target
    samples: int = 0
    # Counts for preference losses:
    pairs: int = 0  # number of preference pairs
    desirable: int = 0  # number of responses labeled desirable (KTO)
    undesirable: int = 0  # number of responses labeled undesirable (KTO)
    mismatched: int = 0  # number of mismatched responses (KTO baseline)

    @property
    def has_targets(self) -> bool:
        """Whether any loss has targets in this step.

        Responses of preference rows count even if they have no text targets, because they may consist of media.
        """
        return any(self.targets.values()) or self.pairs + self.desirable + self.undesirable > 0


@dataclass(frozen=True)
class StepPlan:
    """The plan of one step: one plan for each micro-batch, and totals."""

    rounds: list["MicroBatchPlan"]
    totals: StepTotals
    imbalance: dict[str, float]  # cost on the busiest rank / mean cost, for packs (key `tokens`) and for each port
    totals_by_source: dict[int, StepTotals] = field(default_factory=dict)  # keyed by index in data.sources


@dataclass(frozen=True)
class RoutedItem:
    """The properties of a media item that `plan_routes` needs. The class implements `RoutedSpan`."""

    port: Port
    spans: Sequence[tuple[int, int]]
    is_target: bool
    has_targets: bool
    num_placeholders: int


def plan_step(
    table: PackTable, layout: Layout, micro_batch: int, calls: Sequence[Sequence[Port]], cost: Cost
) -> StepPlan:
    """Return the plan for the packs of all ranks.

    Args:
        table: Metadata of the packs of all ranks, in any order.
        layout: Sizes of the mesh axes.
        micro_batch: Number of packs in a micro-batch of one data-parallel rank.
        calls: All ports of the model, grouped by module call. Ports without items in these packs are included.
        cost: Returns the FLOPs of a pack.
    """
    ports = [port for call in calls for port in call]
    num_packs = len(table.packs)
    if not num_packs:
        return StepPlan([], StepTotals(tokens=0, packs=0, targets={}, weight=0, flops=0.0), {})
    totals = count_totals(table, ports)
    totals_by_source = count_by_source(table, ports)

    # Add dummy packs so that all ranks get the same number. Held-out data, for example, may have any number of packs.
    num_dummies = -num_packs % (layout.dp * micro_batch)
    dummies = [dummy_pack(-1 - i) for i in range(num_dummies)]
    by_index = np.argsort(table.packs["index"], kind="stable")
    rows = np.concatenate([by_index, num_packs + np.arange(num_dummies)])
    table = PackTable.concatenate([table, PackTable.from_packs(dummies, ports, cost)])

    # Every rank processes its most expensive packs first. Ranks wait for each other in every micro-batch, and this
    # order gives the packs of a micro-batch similar costs on all ranks.
    costs = table.packs["cost"][rows]
    packs_by_rank = []
    for packs in assign_packs(costs, layout.dp):
        packs_by_rank.append(sorted(packs, key=lambda i: (-costs[i], i)))
    assigned = np.array(packs_by_rank)  # [dp, packs], indices into `rows`
    rounds = []
    for first in range(0, assigned.shape[1], micro_batch):
        micro_batch_rows = rows[assigned[:, first : first + micro_batch]]
        rounds.append(MicroBatchPlan(table, micro_batch_rows, layout, calls))

    slowest = float(costs[assigned].max(0).sum())
    imbalance = {"tokens": slowest * layout.dp / float(costs.sum())} | media_imbalance(rounds, layout.world)
    return StepPlan(rounds, totals, imbalance, totals_by_source)


def count_totals(table: PackTable, ports: Sequence[Port]) -> StepTotals:
    """Return the totals over all packs of a table, without dummy packs.

    Args:
        table: Metadata of the packs of all ranks.
        ports: All ports of the model.
    """
    is_real = table.packs["is_dummy"] == 0
    packs = table.packs[is_real]
    return _totals(table.counts, table.items, ports, num_packs=len(packs), pack_flops=_sum(packs["cost"]))


def count_by_source(table: PackTable, ports: Sequence[Port]) -> dict[int, StepTotals]:
    """Return the totals of the samples from each source, keyed by index in `data.sources`.

    `packs` is the number of packs with samples from the source. `flops` contains only the FLOPs of media items.

    Args:
        table: Metadata of the packs of all ranks.
        ports: All ports of the model.
    """
    totals = {}
    for source in np.unique(table.counts["source"]).tolist():
        counts_of_source = table.counts[table.counts["source"] == source]
        items_of_source = table.items[table.items["source"] == source]
        totals[source] = _totals(
            counts_of_source, items_of_source, ports, num_packs=len(counts_of_source), pack_flops=0.0
        )
    return totals


def _totals(counts: Records, items: Records, ports: Sequence[Port], num_packs: int, pack_flops: float) -> StepTotals:
    """Return the totals over all records: counts of packs (dtype `COUNT`) and media items (dtype `ITEM`)."""
    targets = {TEXT: int(counts["num_targets"].sum())}
    for i, port in enumerate(ports):
        if port.role == "encoder":
            continue
        items_of_port = items[items["port"] == i]
        if len(items_of_port):
            targets[port.modality] = targets.get(port.modality, 0) + int(items_of_port["num_targets"].sum())
        if items_of_port["num_residual_targets"].any():
            targets[f"{port.modality}/{RESIDUAL}"] = int(items_of_port["num_residual_targets"].sum())
    return StepTotals(
        tokens=int(counts["num_tokens"].sum()),
        packs=num_packs,
        samples=int(counts["num_samples"].sum()),
        targets=targets,
        weight=_sum(counts["target_weight"]),
        flops=pack_flops + _sum(items["cost"]),
        answers=int(counts["num_responses"].sum()),
        **{name: int(counts[name].sum()) for name in PREFERENCES},
    )


def _sum(values: npt.NDArray[np.float64]) -> float:
    """Return the sum of values, added in sorted order. The result is bitwise independent of the order of the packs."""
    return float(np.sort(values).sum())


class MicroBatchPlan:
    """The plan of one micro-batch on all ranks.

    `packs[d]` contains the indices of the packs that data-parallel rank d processes. The media items of all these packs
    are numbered in this order. `owners[i]` is the rank that processes item i. In comments on shapes, N is the number of
    items.
    """

    def __init__(self, table: PackTable, rows: Numbers, layout: Layout, calls: Sequence[Sequence[Port]]) -> None:
        """Assign media items to ranks.

        Args:
            table: Metadata of the packs of all ranks.
            rows: `[dp, packs]`, the rows of `table.packs` that each data-parallel rank processes.
            layout: Sizes of the mesh axes.
            calls: All ports of the model, grouped by module call.
        """
        self.table = table
        self.rows = rows
        self.layout = layout
        self.calls = calls
        self.ports = [port for call in calls for port in call]
        self.packs: list[list[int]] = table.packs["index"][rows].tolist()

        num_items = table.packs["num_items"][rows]  # [dp, packs]
        first_items = offsets(table.packs["num_items"])[rows]
        tokens = table.tokens[rows]
        tokens_before = tokens.cumsum(1) - tokens
        self.items = concatenate_ranges(first_items.flatten(), num_items.flatten())  # [N], rows of `table.items`
        self.offsets = np.repeat(tokens_before.flatten(), num_items.flatten())  # [N], tokens before the item's pack
        self.dp_of = np.repeat(np.arange(len(rows)), num_items.sum(1))  # [N], data-parallel rank of the item's pack
        self.port = table.items["port"][self.items]  # [N], index into `ports`
        self.cost = table.items["cost"][self.items]  # [N], FLOPs
        call_of_port = np.repeat(np.arange(len(calls)), [len(call) for call in calls])
        self.call = call_of_port[self.port]  # [N], index into `calls`

        self.owners = np.zeros(len(self.items), np.int64)
        for i in range(len(calls)):  # balance each call separately, because ranks wait for each other in every call
            items_of_call = np.flatnonzero(self.call == i)
            home = self.dp_of[items_of_call] * layout.sp
            owners = assign_items_near(self.cost[items_of_call], home, layout.world, layout.sp)
            self.owners[items_of_call] = owners

    def owned(self, rank: int) -> list[tuple[int, Port]]:
        """Return the items that `rank` processes, each as (number in this micro-batch, port)."""
        return [(int(item), self.ports[self.port[item]]) for item in np.flatnonzero(self.owners == rank)]

    def destination(self, item: int) -> tuple[int, int]:
        """Return the data-parallel rank of an item's pack, and the index of the item among those of that rank."""
        dp_rank = int(self.dp_of[item])
        return dp_rank, item - int(np.searchsorted(self.dp_of, dp_rank))

    def source_of(self, item: int) -> int:
        """Return the index in `data.sources` of an item, given its number in this micro-batch."""
        return int(self.table.items["source"][self.items[item]])

    def routes(self, rank: int) -> dict[Port, FeatureRoute]:
        """Return, by port, the features that `rank` sends to other ranks, and those that it receives."""
        has_spans = self.table.items["num_spans"][self.items] > 0
        present = [port for i, port in enumerate(self.ports) if (has_spans & (self.port == i)).any()]
        dp_rank = rank // self.layout.sp
        relevant = np.flatnonzero((self.dp_of == dp_rank) | (self.owners == rank))

        groups = [PackGroup([], [], [])] * self.layout.dp
        for dp in np.unique(self.dp_of[relevant]).tolist():
            items = relevant[self.dp_of[relevant] == dp]
            groups[dp] = PackGroup(
                lengths=self.table.lengths_of(self.rows[dp]),
                items=[self._routed_item(item) for item in items.tolist()],
                owners=self.owners[items].tolist(),
            )
        return plan_routes(self.layout, rank, groups, present)

    def _routed_item(self, item: int) -> RoutedItem:
        """Return the properties of an item, given its number in this micro-batch."""
        row = int(self.items[item])
        record = self.table.items[row]
        port = self.ports[self.port[item]]
        is_in_sequence = port.role != "follower"  # the targets of a follower are not in the token sequence
        return RoutedItem(
            port=port,
            spans=self.table.spans_of(row, int(self.offsets[item])),
            is_target=bool(record["is_target"]) and is_in_sequence,
            has_targets=bool(record["num_targets"]) and is_in_sequence,
            num_placeholders=int(record["num_placeholders"]),
        )


def media_imbalance(rounds: Sequence[MicroBatchPlan], world: int) -> dict[str, float]:
    """Return how unevenly the media items of each port are distributed over the ranks.

    The value is the cost on the busiest rank, divided by the mean cost over ranks, with both summed over micro-batches.
    It is 1 for a port without items. Ports that share a module call have the same value.

    Args:
        rounds: The plans of all micro-batches.
        world: World size.
    """
    imbalance: dict[str, float] = {}
    for i, call in enumerate(rounds[0].calls):
        busiest = total = 0.0
        for micro_batch_plan in rounds:
            is_in_call = micro_batch_plan.call == i
            loads = np.bincount(micro_batch_plan.owners, micro_batch_plan.cost * is_in_call, world)
            busiest += float(loads.max())
            total += float(loads.sum())
        call_imbalance = busiest / (total / world) if total else 1.0
        for port in call:
            imbalance[str(port)] = call_imbalance
    return imbalance
