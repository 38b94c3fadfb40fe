"""Assign packs and media items to ranks by cost, so that all ranks finish a step at about the same time.

The algorithm is longest processing time first, followed by swaps that relieve the busiest rank.

Every rank calls these functions with the same costs and must get the same result, whatever its CPU. Costs are therefore
converted to integers, whose sums do not depend on the order of additions.
"""

from collections.abc import Sequence
from heapq import heapify, heappop, heappush, heapreplace

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

PACK_LOOKS, ITEM_LOOKS = 3_000_000, 10_000_000  # maximum numbers of compared pairs; about ten milliseconds
LARGE, NEAR = 64, 16  # world size above which items stay within blocks of ranks; minimum block size


def assign_packs(costs: Sequence[float] | Floats, ranks: int) -> list[list[int]]:
    """Return the packs of each rank, in ascending order: the same number on every rank, and about the same cost."""
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


def assign_items(costs: Sequence[float] | Floats, ranks: int) -> Numbers:
    """Return the rank of each item, such that all ranks have about the same cost. Shape `[items]`."""
    whole = _whole(costs)
    loads = [(0, rank) for rank in range(ranks)]
    owner = np.empty(len(whole), np.int64)
    for item in np.argsort(-whole, kind="stable").tolist():
        load, rank = loads[0]
        owner[item] = rank
        heapreplace(loads, (load + int(whole[item]), rank))
    # A zero-cost item on every rank allows a swap to move a single item.
    owner = np.concatenate([owner, np.arange(ranks)])
    _trade(np.concatenate([whole, np.zeros(ranks, np.int64)]), owner, ranks, ITEM_LOOKS)
    return owner[: len(whole)]


def assign_items_near(costs: Sequence[float] | Floats, home: Numbers, ranks: int, together: int) -> Numbers:
    """Return the rank of each item. With many ranks, prefer ranks near those that hold the tokens of the item.

    The ranks form blocks of neighbors. Only the cost that a block has above the mean is assigned to other blocks, so
    that most features are sent over short distances.

    Args:
        costs: `[items]`, cost of each item.
        home: `[items]`, first of the ranks that hold the tokens of each item.
        ranks: World size.
        together: Number of neighboring ranks that hold the tokens of an item (the size of the sp axis).
    """
    size = max(NEAR, 4 * together)  # a block with few packs has too few items to balance
    if ranks <= LARGE or ranks % size or size % together or ranks == size:
        return assign_items(costs, ranks)
    whole, block, blocks = _whole(costs), home // size, ranks // size
    _even_out(whole, block, blocks)
    # Longest processing time first, vectorized over all blocks.
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
    """Move items from blocks above the mean cost to the blocks with the lowest cost. Modifies `block` in place.

    The costliest of the moved items is placed first.
    """
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


def _whole(costs: Sequence[float] | Floats) -> Numbers:
    array = np.asarray(costs, np.float64)
    assert np.isfinite(array).all(), "the cost of an item or pack is not finite"
    assert (array >= 0).all(), "the cost of an item or pack is negative"
    scaled: Numbers = np.rint(array / (array.max(initial=0) or 1.0) * 2**32).astype(np.int64)
    return scaled


def _trade(costs: Numbers, owner: Numbers, ranks: int, most: int) -> None:
    """Swap items of the busiest rank for cheaper ones while this lowers its cost. Modifies `owner` in place.

    Each swap is the best one available. The search ends after comparing `most` pairs.
    """
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
        # Cost of the busier of the two ranks after the swap. Swaps within the busiest rank are excluded.
        after = np.maximum(loads[busiest] - relief, loads[owner] + relief)
        after[:, own] = loads[busiest]
        given, taken = np.unravel_index(int(after.argmin()), after.shape)
        if after[given, taken] >= loads[busiest]:
            return
        other = owner[taken]
        loads[busiest] -= relief[given, taken]
        loads[other] += relief[given, taken]
        owner[own[given]], owner[taken] = other, busiest
