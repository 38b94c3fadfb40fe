"""Packing: nothing lost, nothing doubled, never above the limit, no sample left waiting, and packs that are full."""

import itertools
from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from omnizoo.data.packing import Pack, Packer, Sample, SampleId, best_fill, split
from omnizoo.data.render import Rendered


def samples_of(lengths: Sequence[int]) -> list[Sample]:
    return [
        Sample(SampleId(0, 0, row, 0), np.full(length, row, np.int32), np.ones(length, np.bool_))
        for row, length in enumerate(lengths)
    ]


def pack_all(lengths: Sequence[int], pack_tokens: int, look_ahead: int) -> list[Pack]:
    packer, packs = Packer(pack_tokens, look_ahead), []
    for sample in samples_of(lengths):
        packer.add(sample)
        if packer.is_ready:
            packs.append(packer.pop())
    while packer.buffer:
        packs.append(packer.pop())
    return packs


cases = st.integers(2, 200).flatmap(
    lambda limit: st.tuples(st.just(limit), st.lists(st.integers(1, limit), max_size=60), st.integers(1, 20))
)


@given(cases)
@settings(max_examples=200, deadline=None)
def test_every_sample_is_in_one_pack_and_no_pack_is_too_large(case: tuple[int, list[int], int]) -> None:
    limit, lengths, look_ahead = case
    packs = pack_all(lengths, limit, look_ahead)
    assert sorted(sample.id.row for pack in packs for sample in pack.samples) == list(range(len(lengths)))
    assert all(0 < pack.tokens <= limit for pack in packs)
    assert sum(pack.tokens for pack in packs) == sum(lengths)
    again = pack_all(lengths, limit, look_ahead)
    assert [[s.id for s in pack.samples] for pack in packs] == [[s.id for s in pack.samples] for pack in again]


@given(cases)
@settings(max_examples=200, deadline=None)
def test_every_pack_holds_the_oldest_sample_so_none_waits_for_long(case: tuple[int, list[int], int]) -> None:
    limit, lengths, look_ahead = case
    packer, waited = Packer(limit, look_ahead), dict.fromkeys(range(len(lengths)), 0)
    for sample in samples_of(lengths):
        packer.add(sample)
        if packer.is_ready:
            oldest = packer.buffer[0].id
            assert packer.pop().samples[0].id == oldest
            for left in packer.buffer:
                waited[left.id.row] += 1
    assert all(packs < look_ahead for packs in waited.values())


@given(st.lists(st.integers(1, 30), max_size=9), st.integers(0, 60))
@settings(max_examples=200, deadline=None)
def test_best_fill_is_as_full_as_trying_every_subset(lengths: list[int], room: int) -> None:
    subsets = itertools.chain.from_iterable(itertools.combinations(lengths, n) for n in range(len(lengths) + 1))
    best = max(total for subset in subsets if (total := sum(subset)) <= room)
    chosen = best_fill(lengths, room)
    assert len(set(chosen)) == len(chosen)
    assert sum(lengths[i] for i in chosen) == best


def test_fill_on_lognormal_lengths_is_above_98_5_percent() -> None:
    sigma = 1.0
    draws = np.random.default_rng(0).lognormal(np.log(1000) - sigma**2 / 2, sigma, 20_000)  # mean 1000
    packs = pack_all(np.clip(draws.astype(int), 2, 8192).tolist(), 8192, 256)[:-40]  # the last ones empty the window
    assert np.mean([pack.tokens / 8192 for pack in packs]) >= 0.985


@given(st.integers(1, 50), st.integers(2, 12))
def test_an_over_long_row_is_cut_into_parts_that_add_up(length: int, limit: int) -> None:
    rendered = Rendered(np.arange(length, dtype=np.int32), np.arange(length) % 3 == 0)
    parts = list(split(1, 2, 3, rendered, limit))
    assert [part.id for part in parts] == [SampleId(1, 2, 3, part) for part in range(len(parts))]
    assert all(0 < len(part.ids) <= limit for part in parts)
    assert np.array_equal(np.concatenate([part.ids for part in parts]), rendered.ids)
    assert np.array_equal(np.concatenate([part.targets for part in parts]), rendered.targets)
    assert len(parts) == -(-length // limit)
    assert str(parts[0].id) == "1/2/3/0"
