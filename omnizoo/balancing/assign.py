"""Assign packs and media items to ranks by cost, so that all ranks finish a step at about the same time.

The most expensive packs or items are assigned first, each to the rank with the lowest cost so far (longest processing
time first). Then, swaps between ranks reduce the cost on the busiest rank.

Every rank calls these functions with the same costs and must get the same result, regardless of its CPU. Costs are
therefore converted to integers. Sums of integers do not depend on the order of additions.
"""

from collections.abc import Sequence
from heapq import heapify, heappop, heappush, heapreplace

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

# Maximum numbers of pairs that the search for swaps compares. The search takes about ten milliseconds.
MAX_PACK_COMPARISONS = 3_000_000
MAX_ITEM_COMPARISONS = 10_000_000

LARGE_WORLD = 64  # above this world size, media items are assigned to ranks near their tokens if possible
MIN_BLOCK = 16  # minimum number of neighboring ranks that form a block


def assign_packs(costs: Sequence[float] | Floats, ranks: int) -> list[list[int]]:
    """Assign packs to ranks, so that all ranks have the same number of packs and about the same cost.

    Args:
        costs: The cost of each pack. The number of packs must be a multiple of `ranks`.
        ranks: Number of ranks.

    Returns:
        The packs of each rank, in ascending order.
    """
    int_costs = _to_integers(costs)
    size = len(costs) // ranks
    assert len(costs) == size * ranks > 0, f"{len(costs)} packs cannot be divided evenly over {ranks} ranks"
    packs: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]
    for pack in np.argsort(-int_costs, kind="stable").tolist():
        load, rank = heappop(loads)
        packs[rank].append(pack)
        if len(packs[rank]) < size:
            heappush(loads, (load + int(int_costs[pack]), rank))
    owner = np.empty(len(int_costs), np.int64)
    for rank, packs_of_rank in enumerate(packs):
        owner[packs_of_rank] = rank
    _swap_items(int_costs, owner, ranks, MAX_PACK_COMPARISONS)
    packs_by_rank: list[list[int]] = np.argsort(owner, kind="stable").reshape(ranks, size).tolist()
    return packs_by_rank


def assign_items(costs: Sequence[float] | Floats, ranks: int) -> Numbers:
    """Assign media items to ranks, so that all ranks have about the same cost.

    Args:
        costs: The cost of each item.
        ranks: Number of ranks.

    Returns:
        `[items]`, the rank of each item.
    """
    int_costs = _to_integers(costs)
    loads = [(0, rank) for rank in range(ranks)]
    owner = np.empty(len(int_costs), np.int64)
    for item in np.argsort(-int_costs, kind="stable").tolist():
        load, rank = loads[0]
        owner[item] = rank
        heapreplace(loads, (load + int(int_costs[item]), rank))
    # Add an item with cost 0 to every rank. A swap with such an item moves another item to that rank.
    owner = np.concatenate([owner, np.arange(ranks)])
    padded_costs = np.concatenate([int_costs, np.zeros(ranks, np.int64)])
    _swap_items(padded_costs, owner, ranks, MAX_ITEM_COMPARISONS)
    return owner[: len(int_costs)]


def assign_items_near(costs: Sequence[float] | Floats, home: Numbers, ranks: int, sp: int) -> Numbers:
    """Assign media items to ranks. If there are many ranks, most items stay near their tokens.

    The ranks are divided into blocks of neighbors. Only if the cost of a block exceeds the mean, items are moved to
    other blocks. Most features are therefore sent over short distances.

    Args:
        costs: `[items]`, the cost of each item.
        home: `[items]`, the first of the ranks that have the tokens of each item.
        ranks: World size.
        sp: Number of neighboring ranks that share the tokens of an item.

    Returns:
        `[items]`, the rank of each item.
    """
    size = max(MIN_BLOCK, 4 * sp)  # a block with few packs has too few items to balance
    if ranks <= LARGE_WORLD or ranks % size or size % sp or ranks == size:
        return assign_items(costs, ranks)

    int_costs = _to_integers(costs)
    block = home // size
    blocks = ranks // size
    _even_out(int_costs, block, blocks)

    # Assign the most expensive items first, in all blocks at the same time.
    order = np.argsort(-int_costs, kind="stable")
    order = order[np.argsort(block[order].astype(np.int16), kind="stable")]
    count = np.bincount(block, minlength=blocks)
    first = np.cumsum(count) - count
    loads = np.zeros((blocks, size), np.int64)
    owner = np.empty(len(int_costs), np.int64)
    for i in range(int(count.max(initial=0))):
        active_blocks = np.flatnonzero(count > i)
        items = order[first[active_blocks] + i]
        least_busy = loads[active_blocks].argmin(1)
        loads[active_blocks, least_busy] += int_costs[items]
        owner[items] = active_blocks * size + least_busy
    return owner


def _even_out(costs: Numbers, block: Numbers, blocks: int) -> None:
    """Move items from blocks whose cost exceeds the mean to the blocks with the lowest cost.

    Args:
        costs: `[items]`, the cost of each item.
        block: `[items]`, the block of each item. It is changed in place.
        blocks: Number of blocks.
    """
    loads = np.zeros(blocks, np.int64)
    np.add.at(loads, block, costs)
    excess = np.maximum(loads - loads.sum() // blocks, 0)
    order = np.argsort(block, kind="stable")
    sorted_blocks = block[order]
    running_cost = np.cumsum(costs[order])
    cost_before_block = np.concatenate([[0], running_cost])[np.searchsorted(sorted_blocks, np.arange(blocks))]
    is_moved = running_cost - cost_before_block[sorted_blocks] <= excess[sorted_blocks]
    moved_items = order[is_moved]
    np.subtract.at(loads, block[moved_items], costs[moved_items])

    heap = [(int(load), number) for number, load in enumerate(loads)]
    heapify(heap)
    by_cost = np.argsort(-costs[moved_items], kind="stable")
    for item in moved_items[by_cost].tolist():
        load, number = heap[0]
        block[item] = number
        heapreplace(heap, (load + int(costs[item]), number))


def _to_integers(costs: Sequence[float] | Floats) -> Numbers:
    """Scale costs to integers from 0 to 2**32."""
    array = np.asarray(costs, np.float64)
    assert np.isfinite(array).all(), "the cost of an item or pack is not finite"
    assert (array >= 0).all(), "the cost of an item or pack is negative"
    maximum = array.max(initial=0) or 1.0
    scaled: Numbers = np.rint(array / maximum * 2**32).astype(np.int64)
    return scaled


def _swap_items(costs: Numbers, owner: Numbers, ranks: int, max_comparisons: int) -> None:
    """Swap items of the busiest rank for cheaper ones of other ranks, as long as this lowers the highest cost.

    Args:
        costs: `[items]`, the cost of each item.
        owner: `[items]`, the rank of each item. It is changed in place.
        ranks: Number of ranks.
        max_comparisons: Number of compared pairs after which the search ends.
    """
    loads = np.zeros(ranks, np.int64)
    np.add.at(loads, owner, costs)
    comparisons = 0
    while True:
        busiest = int(loads.argmax())
        candidates = np.flatnonzero(owner == busiest)
        comparisons += len(candidates) * len(costs)
        if comparisons > max_comparisons:
            return

        # [candidates, items], how much the cost of the busiest rank falls if it swaps a candidate for an item.
        relief = costs[candidates, None] - costs
        # The higher cost of both ranks after the swap. Exclude swaps within the busiest rank.
        cost_after = np.maximum(loads[busiest] - relief, loads[owner] + relief)
        cost_after[:, candidates] = loads[busiest]
        candidate, partner = np.unravel_index(int(cost_after.argmin()), cost_after.shape)
        if cost_after[candidate, partner] >= loads[busiest]:
            return

        partner_rank = owner[partner]
        loads[busiest] -= relief[candidate, partner]
        loads[partner_rank] += relief[candidate, partner]
        owner[candidates[candidate]] = partner_rank
        owner[partner] = busiest
