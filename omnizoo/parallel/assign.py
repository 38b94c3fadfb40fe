"""Who does what within a step, so that no rank waits: longest processing time first, then trades with the busiest rank.

Pure functions of costs. Every rank calls them with the same costs and must come to the same answer whatever its CPU, so
costs become whole numbers, whose sums do not depend on the order of additions.
"""

from collections.abc import Sequence
from heapq import heapify, heappop, heappush, heapreplace

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

PACK_LOOKS, ITEM_LOOKS = 3_000_000, 10_000_000  # at pairs to trade: bound the time to some ten milliseconds
LARGE, NEAR = 64, 16  # ranks: of a world in which items stay near, and how many are near each other


def assign_packs(costs: Sequence[float] | Floats, ranks: int) -> list[list[int]]:
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
    _trade(whole, owner, ranks, PACK_LOOKS)
    return [own.tolist() for own in np.argsort(owner, kind="stable").reshape(ranks, size)]


def assign_items(costs: Sequence[float] | Floats, ranks: int) -> list[int]:
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
    _trade(np.concatenate([whole, np.zeros(ranks, np.int64)]), owner, ranks, ITEM_LOOKS)
    return [int(rank) for rank in owner[: len(whole)]]


def assign_items_near(costs: Sequence[float] | Floats, home: Numbers, ranks: int, together: int) -> Numbers:
    """The rank of each item. In a large world one of the ranks around those that hold its tokens, so that what is made
    of it does not travel far: `home` is the first of these, of `together` neighbours. Only what blocks of ranks have
    above the mean goes to others."""
    size = max(NEAR, 4 * together)  # few packs would leave little to share out
    if ranks <= LARGE or ranks % size or size % together or ranks == size:
        return np.array(assign_items(costs, ranks), np.int64)
    whole, block, blocks = _whole(costs), home // size, ranks // size
    _even_out(whole, block, blocks)
    # Longest processing time first, in all blocks at once.
    order = np.argsort(-whole, kind="stable")
    order = order[np.argsort(block[order].astype(np.int16), kind="stable")]
    count = np.bincount(block, minlength=blocks)
    first = np.cumsum(count) - count
    loads = np.zeros((blocks, size), np.int64)
    owner = np.empty(len(whole), np.int64)
    for turn in range(int(count.max(initial=0))):
        busy = np.flatnonzero(count > turn)
        items = order[first[busy] + turn]
        least = loads[busy].argmin(1)
        loads[busy, least] += whole[items]
        owner[items] = busy * size + least
    return owner


def _even_out(costs: Numbers, block: Numbers, blocks: int) -> None:
    """Items leave blocks that have more than the mean, the costliest first to where there is least. In place."""
    loads = np.zeros(blocks, np.int64)
    np.add.at(loads, block, costs)
    above = np.maximum(loads - loads.sum() // blocks, 0)
    order = np.argsort(block, kind="stable")
    so_far = np.cumsum(costs[order])
    before = np.concatenate([[0], so_far])[np.searchsorted(block[order], np.arange(blocks))]
    leaving = order[so_far - before[block[order]] <= above[block[order]]]
    np.subtract.at(loads, block[leaving], costs[leaving])
    least = [(int(load), number) for number, load in enumerate(loads)]
    heapify(least)
    for item in leaving[np.argsort(-costs[leaving], kind="stable")].tolist():
        load, number = least[0]
        block[item] = number
        heapreplace(least, (load + int(costs[item]), number))


def imbalance(costs: Sequence[float], assignment: Sequence[int], ranks: int) -> float:
    """The most any rank has to do / the mean over ranks; 1 is perfect."""
    loads = np.bincount(np.asarray(assignment, np.int64), np.asarray(costs, np.float64), ranks)
    return float(loads.max() / loads.mean()) if loads.any() else 1.0


def _whole(costs: Sequence[float] | Floats) -> Numbers:
    array = np.asarray(costs, np.float64)
    assert np.isfinite(array).all(), "the cost of an item or pack is not finite"
    assert (array >= 0).all(), "the cost of an item or pack is negative"
    scaled: Numbers = np.rint(array / (array.max(initial=0) or 1.0) * 2**32).astype(np.int64)
    return scaled


def _trade(costs: Numbers, owner: Numbers, ranks: int, most: int) -> None:
    """While it helps, the busiest rank gives one of its items for a cheaper one: the best such trade. In place."""
    loads = np.zeros(ranks, np.int64)
    np.add.at(loads, owner, costs)
    looks = 0
    while True:
        busiest = int(loads.argmax())
        own = np.flatnonzero(owner == busiest)
        looks += len(own) * len(costs)
        if looks > most:
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
