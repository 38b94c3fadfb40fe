"""Who works on what in a step: packs are shared among data-parallel ranks and media items among all ranks, by cost.

A plan is a pure function of what is known of the packs (lengths and costs, no data): no ranks talk, none are needed.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from omnizoo.data.loader import IGNORE, FlatPack, filler
from omnizoo.modalities.base import Item, Port
from omnizoo.parallel.assign import assign_items, assign_packs
from omnizoo.parallel.layout import Layout
from omnizoo.parallel.route import Route, Share, plan_routes

TEXT = "text"


@dataclass(frozen=True)
class Known:
    """What all ranks know of a pack."""

    index: int
    lengths: list[int]
    labels: int  # text targets
    weight: float  # sum of their weights; as many as they are where no row has any
    is_filler: bool
    items: list[Item]  # their spans are within the pack

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    def places(self, is_predicted: bool) -> dict[str, int]:
        """By modality that is produced: places of its items; `is_predicted`: only of those that are to be learnt."""
        places: dict[str, int] = {}
        for item in self.items:
            if item.port.role == "decoder" and (item.is_target or not is_predicted):
                places[item.port.modality] = places.get(item.port.modality, 0) + item.size.places
        return places


Cost = Callable[[Known], float]  # of a pack -> FLOPs


def known_of(pack: FlatPack) -> Known:
    is_target = pack.labels != IGNORE
    labels = int(is_target.sum())
    weight = labels if pack.weights is None else float(pack.weights[is_target].sum(dtype=np.float64))
    return Known(pack.index, pack.lengths, labels, weight, not pack.sample_ids, list(pack.items))


@dataclass(frozen=True)
class Totals:
    """What the packs of all ranks hold together."""

    tokens: int
    packs: int
    targets: dict[str, int]  # of the text, and of each modality that is produced
    weight: float  # sum of the weights of the text's targets; as many as they are where no row has any
    flops: float  # of packs and media items


@dataclass(frozen=True)
class Plan:
    """Of one step."""

    rounds: list["Round"]
    totals: Totals
    imbalance: dict[str, float]  # busiest rank / mean over ranks: of packs (`tokens`), and of each port


def plan_step(packs: Sequence[Known], layout: Layout, micro_batch: int, ports: Sequence[Port], cost: Cost) -> Plan:
    """The plan for the packs of all ranks, in any order. `ports` are the model's, whether or not these packs have items
    for them."""
    if not packs:
        return Plan([], Totals(0, 0, {}, 0, 0.0), {})
    known = sorted(packs, key=lambda pack: pack.index)
    real = [pack for pack in known if not pack.is_filler]
    targets = {TEXT: sum(pack.labels for pack in real)}
    for item in (item for pack in real for item in pack.items if item.port.role == "decoder"):
        targets[item.port.modality] = targets.get(item.port.modality, 0) + item.targets
    totals = Totals(
        tokens=sum(pack.tokens for pack in real),
        packs=len(real),
        targets=targets,
        weight=sum(pack.weight for pack in real),
        flops=sum(cost(pack) + sum(item.size.cost for item in pack.items) for pack in real),
    )
    # Held-out packs need not divide evenly.
    known += [known_of(filler(-1 - i)) for i in range(-len(known) % (layout.dp * micro_batch))]
    costs = [cost(pack) for pack in known]
    # By cost on every rank, since ranks wait for each other in each micro-batch, not once a step.
    share = [sorted(own, key=lambda i: (-costs[i], i)) for own in assign_packs(costs, layout.dp)]
    rounds = [
        Round([[known[i] for i in own[first : first + micro_batch]] for own in share], layout, ports)
        for first in range(0, len(share[0]), micro_batch)
    ]
    slowest = sum(max(costs[i] for i in at_once) for at_once in zip(*share, strict=True))
    imbalance = {"tokens": slowest * layout.dp / sum(costs)} | media_imbalance(rounds, layout.world, ports)
    return Plan(rounds, totals, imbalance)


class Round:
    """One micro-batch of all ranks: `packs[d]` are those of data-parallel rank d; items of all of them, in this order,
    and who works on each."""

    def __init__(self, packs: list[list[Known]], layout: Layout, ports: Sequence[Port]) -> None:
        self.packs, self.layout = packs, layout
        self.items: list[Item] = []  # their spans are within the micro-batch
        self.dp_of: list[int] = []  # of each item
        for d, own in enumerate(packs):
            start = 0
            for pack in own:
                self.items += (item.moved(start) for item in pack.items)
                start += pack.tokens
            self.dp_of += [d] * (len(self.items) - len(self.dp_of))
        self.owners = [0] * len(self.items)
        for port in ports:  # ranks wait for each other inside every encoder, so each is balanced by itself
            of_port = [at for at, item in enumerate(self.items) if item.port == port]
            assigned = assign_items([self.items[at].size.cost for at in of_port], layout.world)
            for at, rank in zip(of_port, assigned, strict=True):
                self.owners[at] = rank

    def owned(self, rank: int) -> Iterator[tuple[int, Item]]:
        """The items that a rank works on, and their numbers in this micro-batch."""
        return ((at, item) for at, item in enumerate(self.items) if self.owners[at] == rank)

    def routes(self, rank: int) -> dict[Port, Route]:
        """How what the owners make of items gets to the tokens of all ranks, as `rank` sees it."""
        shares = []
        for d, own in enumerate(self.packs):
            of_dp = [at for at, dp in enumerate(self.dp_of) if dp == d]
            lengths = [length for pack in own for length in pack.lengths]
            shares.append(Share(lengths, [self.items[at] for at in of_dp], [self.owners[at] for at in of_dp]))
        return plan_routes(self.layout, rank, shares)


def media_imbalance(rounds: Sequence[Round], world: int, ports: Sequence[Port]) -> dict[str, float]:
    """Of each port: the work of the busiest rank, summed over micro-batches, against the mean. 1 if there is none."""
    figures = {}
    for port in ports:
        busiest = total = 0.0
        for each in rounds:
            loads = [0.0] * world
            for item, owner in zip(each.items, each.owners, strict=True):
                loads[owner] += item.size.cost * (item.port == port)
            busiest, total = busiest + max(loads), total + sum(loads)
        figures[str(port)] = busiest / (total / world) if total else 1.0
    return figures
