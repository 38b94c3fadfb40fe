"""Who does what within a step, so that no rank waits: longest processing time first, then trades with the busiest rank.

Pure functions of costs. Every rank calls them with the same costs and must come to the same answer whatever its CPU, so
costs become whole numbers, whose sums do not depend on the order of additions.
"""

from collections.abc import Sequence
from heapq import heappop, heappush, heapreplace

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]

LOOKS = 10_000_000  # at pairs to trade: bounds the time of an assignment to some ten milliseconds


def assign_packs(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """The packs of each rank, ascending: equally many, of about the same cost."""
    whole, size = _whole(costs), len(costs) // ranks
    assert len(costs) == size * ranks > 0, f"{len(costs)} packs cannot be spread evenly over {ranks} ranks"
    packs: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]
    for pack in np.argsort(-whole, kind="stable").tolist():
        load, rank = heappop(loads)
        packs[rank].append(pack)
        if len(packs[rank]) < size:
            heappush(loads, (load + int(whole[pack]), rank))
    owner = np.empty(len(whole), np.int64)
    for rank, own in enumerate(packs):
        owner[own] = rank
    _trade(whole, owner, ranks)
    return [own.tolist() for own in np.argsort(owner, kind="stable").reshape(ranks, size)]


def assign_items(costs: Sequence[float], ranks: int) -> list[int]:
    """The rank of each item, so that all ranks have about the same to do."""
    whole = _whole(costs)
    loads = [(0, rank) for rank in range(ranks)]
    owner = np.empty(len(whole), np.int64)
    for item in np.argsort(-whole, kind="stable").tolist():
        load, rank = loads[0]
        owner[item] = rank
        heapreplace(loads, (load + int(whole[item]), rank))
    # An item of no cost on every rank turns a move into a trade.
    owner = np.concatenate([owner, np.arange(ranks)])
    _trade(np.concatenate([whole, np.zeros(ranks, np.int64)]), owner, ranks)
    return [int(rank) for rank in owner[: len(whole)]]


def imbalance(costs: Sequence[float], assignment: Sequence[int], ranks: int) -> float:
    """The most any rank has to do / the mean over ranks; 1 is perfect."""
    loads = np.bincount(np.asarray(assignment, np.int64), np.asarray(costs, np.float64), ranks)
    return float(loads.max() / loads.mean()) if loads.any() else 1.0


def _whole(costs: Sequence[float]) -> Numbers:
    array = np.asarray(costs, np.float64)
    assert np.isfinite(array).all(), "the cost of an item or pack is not finite"
    assert (array >= 0).all(), "the cost of an item or pack is negative"
    scaled: Numbers = np.rint(array / (array.max(initial=0) or 1.0) * 2**32).astype(np.int64)
    return scaled


def _trade(costs: Numbers, owner: Numbers, ranks: int) -> None:
    """While it helps, the busiest rank gives one of its items for a cheaper one: the best such trade. In place."""
    loads = np.zeros(ranks, np.int64)
    np.add.at(loads, owner, costs)
    looks = 0
    while True:
        busiest = int(loads.argmax())
        own = np.flatnonzero(owner == busiest)
        looks += len(own) * len(costs)
        if looks > LOOKS:
            return
        relief = costs[own, None] - costs
        # The busier of the two after the trade; with itself, it would trade for nothing.
        after = np.maximum(loads[busiest] - relief, loads[owner] + relief)
        after[:, own] = loads[busiest]
        given, taken = np.unravel_index(int(after.argmin()), after.shape)
        if after[given, taken] >= loads[busiest]:
            return
        other = owner[taken]
        loads[busiest] -= relief[given, taken]
        loads[other] += relief[given, taken]
        owner[own[given]], owner[taken] = other, busiest
