"""Packing: nothing lost, nothing doubled, never above the limit, no sample left waiting, and packs that are full."""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnizoo.data.packing.overlong import split
from omnizoo.data.packing.packer import Packer, best_fill
from omnizoo.data.sample import RenderedRow, Sample, SampleId
from omnizoo.data.token_fields import IGNORE_INDEX, make_columns


def samples_of(lengths: Sequence[int]) -> list[Sample]:
    return [
        Sample(make_columns(input_ids=np.full(length, row)), id=SampleId(0, 0, row, 0))
        for row, length in enumerate(lengths)
    ]


def pack_all(lengths: Sequence[int], pack_tokens: int, look_ahead: int | None) -> list[list[Sample]]:
    packer = Packer(pack_tokens, look_ahead)
    packs = []
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
def test_each_sample_is_in_one_pack_and_packs_fit_the_limit(case: tuple[int, list[int], int]) -> None:
    limit, lengths, look_ahead = case
    packs = pack_all(lengths, limit, look_ahead)
    assert sorted(sample.id.row for pack in packs for sample in pack) == list(range(len(lengths)))
    assert all(0 < sum(map(len, pack)) <= limit for pack in packs)
    assert sum(len(sample) for pack in packs for sample in pack) == sum(lengths)
    again = pack_all(lengths, limit, look_ahead)
    assert [[s.id for s in pack] for pack in packs] == [[s.id for s in pack] for pack in again]


@given(cases)
@settings(max_examples=200, deadline=None)
def test_each_pack_contains_the_oldest_sample(case: tuple[int, list[int], int]) -> None:
    limit, lengths, look_ahead = case
    packer = Packer(limit, look_ahead)
    waited = dict.fromkeys(range(len(lengths)), 0)
    for sample in samples_of(lengths):
        packer.add(sample)
        if packer.is_ready:
            oldest = packer.buffer[0].id
            assert packer.pop()[0].id == oldest
            for left in packer.buffer:
                waited[left.id.row] += 1
    assert all(packs < look_ahead for packs in waited.values())


@given(st.lists(st.integers(1, 30), max_size=9), st.integers(0, 60))
@settings(max_examples=200, deadline=None)
def test_best_fill_matches_exhaustive_search(lengths: list[int], room: int) -> None:
    subsets = itertools.chain.from_iterable(itertools.combinations(lengths, n) for n in range(len(lengths) + 1))
    best = max(total for subset in subsets if (total := sum(subset)) <= room)
    chosen = best_fill(lengths, room)
    assert len(set(chosen)) == len(chosen)
    assert sum(lengths[i] for i in chosen) == best


def lognormal(count: int, most: int, mean: float = 1000, sigma: float = 1.0) -> list[int]:
    drawn = np.random.default_rng(0).lognormal(np.log(mean) - sigma**2 / 2, sigma, count)
    return np.clip(drawn.astype(int), 2, most).tolist()


@pytest.mark.parametrize("look_ahead", [256, None])
def test_fill_on_lognormal_lengths_is_above_98_5_percent(look_ahead: int | None) -> None:
    packs = pack_all(lognormal(20_000, 8192), 8192, look_ahead)[:-40]  # the last ones empty the window
    fill = [sum(map(len, pack)) / 8192 for pack in packs]
    assert np.mean(fill) >= 0.985
    assert np.mean(fill[:8]) >= 0.985  # while the window grows


def test_long_packs_of_short_samples_are_full() -> None:
    packs = pack_all(lognormal(20_000, 1000, mean=100), 1 << 18, None)
    assert len(packs) > 4
    assert all(sum(map(len, pack)) == 1 << 18 for pack in packs[:-2])
    assert min(len(pack) for pack in packs[:-2]) > 2000


def test_window_grows_with_the_number_of_packs() -> None:
    packer = Packer(1024)
    sizes = []
    for sample in samples_of(lognormal(3000, 1024, mean=300)):
        packer.add(sample)
        if packer.is_ready:
            sizes.append(len(packer.buffer))
            packer.pop()
    assert sizes[:9] == [32, 64, 96, 128, 160, 192, 224, 256, 256]
    assert set(sizes[8:]) == {256}


@given(st.integers(1, 50), st.integers(2, 12))
def test_parts_of_a_split_row_concatenate_to_the_row(length: int, limit: int) -> None:
    ids = np.arange(length)
    rendered = RenderedRow(make_columns(input_ids=ids, labels=np.where(ids % 3 == 0, ids, IGNORE_INDEX)))
    parts = list(split(1, 2, 3, rendered, limit))
    assert [part.id for part in parts] == [SampleId(1, 2, 3, part) for part in range(len(parts))]
    assert all(0 < len(part.input_ids) <= limit for part in parts)
    assert np.array_equal(np.concatenate([part.input_ids for part in parts]), rendered.input_ids)
    assert np.array_equal(np.concatenate([part.is_target for part in parts]), rendered.is_target)
    assert len(parts) == -(-length // limit)
    assert str(parts[0].id) == "1/2/3/0"
