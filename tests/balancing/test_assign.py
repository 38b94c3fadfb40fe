"""Packs and items spread over ranks by cost: nothing lost, equal counts where promised, and nearly even loads."""

import time
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnizoo.balancing.assign import assign_items, assign_items_near, assign_packs
from omnizoo.recipes.shared.qwen_video import PATCHES_PER_PART

COSTS = st.one_of(st.integers(0, 20).map(float), st.floats(0, 1e15))


def imbalance(costs: list[float], owner: list[int], ranks: int) -> float:
    """Return the load of the busiest rank / the mean over ranks; 1 is perfect."""
    of_ranks = np.bincount(owner, costs, ranks)
    return float(of_ranks.max() / of_ranks.mean())


def loads(costs: list[float], owner: list[int], ranks: int) -> list[float]:
    return [sum(c for c, r in zip(costs, owner, strict=True) if r == rank) for rank in range(ranks)]


def owners(packs: list[list[int]]) -> list[int]:
    return [rank for _, rank in sorted((pack, rank) for rank, own in enumerate(packs) for pack in own)]


@given(st.lists(COSTS, max_size=7), st.integers(1, 3))
def test_items_take_at_most_four_thirds_of_optimal_time(costs: list[float], ranks: int) -> None:
    owner = assign_items(costs, ranks).tolist()
    best = min(max(loads(costs, list(o), ranks)) for o in product(range(ranks), repeat=len(costs)))
    assert len(owner) == len(costs)
    assert max(loads(costs, owner, ranks)) <= 4 / 3 * best * (1 + 1e-8)


@given(st.integers(1, 6), st.integers(1, 6), st.data())
def test_ranks_get_equal_pack_counts_and_no_swap_improves(ranks: int, size: int, data) -> None:
    costs = data.draw(st.lists(COSTS, min_size=ranks * size, max_size=ranks * size))
    packs = assign_packs(costs, ranks)
    assert sorted(pack for own in packs for pack in own) == list(range(len(costs)))
    assert [len(own) for own in packs] == [size] * ranks
    assert all(own == sorted(own) for own in packs)

    load = loads(costs, owners(packs), ranks)
    busiest = max(range(ranks), key=load.__getitem__)
    for other in set(range(ranks)) - {busiest}:
        for gives, takes in product(packs[busiest], packs[other]):
            relief = costs[gives] - costs[takes]
            assert max(load[busiest] - relief, load[other] + relief) >= load[busiest] * (1 - 1e-8)


def test_packs_are_near_the_best_equal_split() -> None:
    random, ratios = np.random.default_rng(0), []
    for _ in range(50):
        costs = random.lognormal(0, 1, 10).tolist()
        best = min(max(sum(own), sum(costs) - sum(own)) for own in combinations(costs, 5))
        ratios.append(max(loads(costs, owners(assign_packs(costs, 2)), 2)) / best)
    assert max(ratios) < 1.15
    assert np.mean(ratios) < 1.02


@given(st.integers(0, 2**32), st.sampled_from([1, 2, 8, 32]), st.integers(0, 400), st.booleans())
@settings(deadline=None)
def test_items_stay_in_block_in_large_world_unless_unbalanced(
    seed: int, together: int, count: int, is_even: bool
) -> None:
    random, ranks = np.random.default_rng(seed), 128
    size = max(16, 4 * together)
    costs = random.integers(1, 1000, count).astype(float)
    home = (np.arange(count) if is_even else random.integers(0, 20, count)) * together % ranks
    if is_even:
        costs[:] = 7
    owner = assign_items_near(costs, home, ranks, together)
    assert owner.tolist() == assign_items_near(costs, home, ranks, together).tolist()
    assert len(owner) == count
    assert ((owner >= 0) & (owner < ranks)).all()
    if size < ranks and is_even and count * together % ranks == 0:
        assert (owner // size == home // size).all()
    # Longest first, among blocks and then in each: at most the mean, and an item more for each of the two.
    loads = np.bincount(owner, costs, ranks)
    assert loads.max() <= costs.sum() / ranks + 2 * costs.max(initial=0)


def test_no_items_give_empty_assignment() -> None:
    assert assign_items([], 4).tolist() == []


@pytest.mark.parametrize(("items", "most"), [(10_000, 1.002), (3_000, 1.02)])
def test_balancing_a_thousand_ranks_is_fast(items: int, most: float) -> None:
    costs = np.random.default_rng(0).random(items).tolist()
    start = time.process_time()
    owner = assign_items(costs, 1000).tolist()
    assert time.process_time() - start < 0.5  # ten times what it takes
    assert imbalance(costs, owner, 1000) < most


def rows_of_a_mix(random: np.random.Generator) -> tuple[int, list[tuple[str, float]]]:
    """Tokens and (port, cost) of a row's items: a third text only, images of many sizes, speech, a few videos, which
    come in parts."""

    def tower(patches: float) -> float:  # a vision transformer of 400 M weights
        return 8e8 * patches + 1e5 * patches**2

    text, kind = int(np.clip(random.lognormal(5.8, 0.8), 30, 4000)), random.random()
    if kind < 1 / 3:
        return text, []
    if kind < 0.7:
        patches = np.clip(random.lognormal(6.4, 0.5, (1 + random.poisson(0.6), 2)), 112, 1600).prod(1) // 14**2
        return text + int(patches.sum()) // 4, [("image", tower(n)) for n in patches]
    if kind < 0.95:
        seconds = float(np.clip(random.lognormal(2, 0.8), 1, 30))
        return text + int(seconds * 12.5), [("audio", 3e10 * seconds + 4e8 * seconds**2)]
    frames, together = int(random.integers(8, 33)), PATCHES_PER_PART // 400
    parts = [min(together, frames - first) for first in range(0, frames, together)]
    return text + frames * 100, [("video", part * tower(400)) for part in parts]


def micro_batch(random: np.random.Generator, packs: int, pack_tokens: int = 8192) -> dict[str, list[float]]:
    """The costs of all items in so many packs, by tower: images and videos go through one, in one call."""
    costs: dict[str, list[float]] = {"vision": [], "audio": []}
    for _ in range(packs):
        tokens = 0
        while (row := rows_of_a_mix(random))[0] + tokens <= pack_tokens:
            tokens += row[0]
            for port, cost in row[1]:
                costs["audio" if port == "audio" else "vision"].append(cost)
    return costs


def waiting(costs: dict[str, list[float]], ranks: int) -> tuple[float, float]:
    """Time of all encoders / mean work: ranks wait for each other in every one. And the least that could be."""
    work = sum(map(sum, costs.values())) / ranks
    means = {port: sum(own) / ranks for port, own in costs.items()}
    took = sum(imbalance(own, assign_items(own, ranks).tolist(), ranks) * means[port] for port, own in costs.items())
    return took / work, sum(max(means[port], max(own, default=0)) for port, own in costs.items()) / work


@pytest.mark.parametrize("packs", [1, 4])
def test_eight_ranks_balance_a_mixed_dataset(packs: int) -> None:
    """Within 6 % of perfect, but where a single image outlasts the mean of its tower, as in some steps of 1 pack per
    rank. It cannot be shared out, since all of it sees all of it: then within 2 % of the best that is possible."""
    random = np.random.default_rng(0)
    found = np.array([waiting(micro_batch(random, 8 * packs), 8) for _ in range(40)])
    took, least = found.mean(0)
    assert took < 1.02 * least
    assert found[found[:, 1] == 1, 0].max() < 1.06
    assert took < (1.06 if packs == 4 else 1.09)
