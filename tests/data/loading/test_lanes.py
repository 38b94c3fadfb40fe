"""Lanes: every row once per epoch, exact mixing, exact resume from any pack, and clear words for unusable data."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from number_rows import NumberRenderer, Numbers, data, numbers, reader_of

from omnizoo.config.errors import UserError
from omnizoo.data.loading.lanes import Lane
from omnizoo.data.loading.row_order import EpochOrder
from omnizoo.data.sample import Sample


def lane_of(sources: list[Numbers], lane: int = 0, length: int | None = None, seed: int = 5, **options: Any) -> Lane:
    weights = options.pop("weights", [1.0] * len(sources))
    settings = {"pack_tokens": 16, "lanes": 4, "look_ahead": 6, "shuffle_rows": 10} | options
    return Lane(reader_of(data(weights, **settings), sources, NumberRenderer(length), seed), lane)


def packs(lane: Lane, count: int) -> list[list[Sample]]:
    return [pack for _ in range(count) if (pack := lane.next_pack()) is not None]


def identities(packs: list[list[Sample]]) -> list[list[str]]:
    return [[f"{sample.id}:{sample.input_ids.tolist()}" for sample in pack] for pack in packs]


@given(
    st.lists(st.integers(1, 400), min_size=1, max_size=6),
    st.integers(1, 9),
    st.integers(0, 3),
    st.one_of(st.none(), st.integers(1, 300)),
)
@settings(max_examples=100, deadline=None)
def test_lanes_together_read_each_row_once_per_epoch(
    extents: list[int], lanes: int, epoch: int, shuffle_rows: int | None
) -> None:
    source = numbers(*extents)
    if len(source) < lanes:  # dealt out by whole epochs instead
        lanes = 1
    orders = [EpochOrder(source, 0, lane, lanes, epoch, 7, shuffle_rows) for lane in range(lanes)]
    assert all(len(order) > 0 for order in orders)
    assert sorted(order[i] for order in orders for i in range(len(order))) == list(range(len(source)))
    for order in orders:  # any place, without those before it
        fresh = EpochOrder(source, 0, orders.index(order), lanes, epoch, 7, shuffle_rows)
        assert fresh[len(order) - 1] == order[len(order) - 1]


def test_lanes_have_about_equal_numbers_of_rows() -> None:
    orders = [EpochOrder(numbers(100_000), 0, lane, 8, 0, 7, 4096) for lane in range(8)]
    sizes = [len(order) for order in orders]
    assert max(sizes) - min(sizes) <= 256


def test_row_order_depends_on_epoch_and_seed() -> None:
    def order(epoch: int, seed: int) -> list[int]:
        epoch_order = EpochOrder(numbers(1000), 0, 0, 1, epoch, seed, 100)
        return [epoch_order[i] for i in range(1000)]

    assert order(0, 1) == order(0, 1)
    assert order(0, 1) != order(1, 1)
    assert order(0, 1) != order(0, 2)
    # shuffled well: neighbours in the file are not neighbours in the order
    assert np.mean(np.abs(np.diff(order(0, 1))) == 1) < 0.05


def test_without_shuffling_one_lane_reads_in_file_order() -> None:
    order = EpochOrder(numbers(300, 500), 0, 0, 1, 2, 7, None)
    assert [order[i] for i in range(800)] == list(range(800))


def test_window_of_rows_needs_few_row_groups() -> None:
    # so that a decoded row group serves all lanes of a process before the next one is needed
    source = numbers(*[1000] * 50)
    for lane in range(4):
        order = EpochOrder(source, 0, lane, 4, 0, 7, 1000)
        groups_per_window = [len({order[i] // 1000 for i in range(w, w + 1000)}) for w in range(0, 12_000, 1000)]
        assert max(groups_per_window) <= 6


def test_lanes_read_each_row_once_per_epoch_over_a_long_run() -> None:
    source = numbers(37)
    seen: Counter[tuple[int, int]] = Counter()
    for lane_number in range(4):
        lane = lane_of([source], lane_number)
        for pack in packs(lane, 60):
            seen.update((sample.id.epoch, sample.id.row) for sample in pack)
    assert set(seen.values()) == {1}
    complete = [epoch for epoch in range(8) if sum(key[0] == epoch for key in seen) == 37]
    assert len(complete) >= 4


def test_small_source_gives_complete_epochs_to_lanes_in_turn() -> None:
    seen: Counter[tuple[int, int]] = Counter()
    for lane_number in range(4):
        lane = lane_of([numbers(3)], lane_number, look_ahead=1, pack_tokens=7)
        epochs = [sample.id.epoch for pack in packs(lane, 6) for sample in pack]
        assert set(epochs) <= set(range(lane_number, 100, 4))
        lane = lane_of([numbers(3)], lane_number, look_ahead=1, pack_tokens=7)
        seen.update(sample.id[1:3] for pack in packs(lane, 6) for sample in pack)
    assert set(seen.values()) == {1}
    assert all((epoch, row) in seen for epoch in range(4) for row in range(3))


@given(st.lists(st.floats(0.05, 10), min_size=1, max_size=5), st.integers(0, 50))
@settings(max_examples=50, deadline=None)
def test_sources_are_mixed_in_exact_proportion_at_any_time(weights: list[float], seed: int) -> None:
    lane = lane_of([numbers(10 + 3 * i) for i in range(len(weights))], seed=seed, weights=weights)
    for _ in range(200):
        lane._read_row()
        rows_read = np.array([cursor.rows_read for cursor in lane.cursors])
        assert np.abs(rows_read - rows_read.sum() * np.array(weights) / sum(weights)).max() < 2


def test_lanes_start_with_different_sources() -> None:
    firsts = {lane_of([numbers(50), numbers(50)], lane)._choose_source() for lane in range(16)}
    assert firsts == {0, 1}


@given(st.integers(0, 60), st.integers(0, 3), st.booleans(), st.integers(2, 20), st.sampled_from([6, None]))
@settings(max_examples=60, deadline=None)
def test_restored_lane_continues_exactly(
    done: int, lane: int, shuffle: bool, pack_tokens: int, look_ahead: int | None
) -> None:
    def fresh() -> Lane:
        sources = [numbers(20, 9), numbers(3), numbers(50, bad=frozenset(range(0, 50, 3)))]
        options: dict[str, Any] = {"shuffle": shuffle, "pack_tokens": pack_tokens, "on_bad_row": "skip"}
        return lane_of(sources, lane, weights=[3.0, 1.0, 2.0], look_ahead=look_ahead, **options)

    original = fresh()
    resumed = fresh()
    packs(original, done)
    state = json.loads(json.dumps(original.state()))
    packs(resumed, 2)  # what a lane did before does not matter
    resumed.restore(state)
    assert resumed.state() == original.state()
    assert identities(packs(resumed, 25)) == identities(packs(original, 25))
    assert resumed.state() == original.state()
    assert resumed.counters == original.counters


def test_overlong_rows_are_split_or_dropped_and_counted() -> None:
    lengths = np.arange(40) % 7 + 1  # rows of 6 and 7 tokens are over-long for packs of 5
    overlong = int((lengths > 5).sum())
    split_lane = lane_of([numbers(40)], lanes=1, pack_tokens=5, look_ahead=1000)
    drop_lane = lane_of([numbers(40)], lanes=1, pack_tokens=5, look_ahead=1000, overlong="drop")
    for lane in (split_lane, drop_lane):
        for _ in range(40):
            lane._read_row()
    assert (split_lane.counters.split_overlong, split_lane.counters.dropped_overlong) == (overlong, 0)
    assert (drop_lane.counters.split_overlong, drop_lane.counters.dropped_overlong) == (0, overlong)
    assert sum(len(sample.input_ids) for sample in split_lane.packer.buffer) == lengths.sum()
    assert sum(len(sample.input_ids) for sample in drop_lane.packer.buffer) == lengths[lengths <= 5].sum()


def test_bad_row_raises_with_location_and_reason() -> None:
    lane = lane_of([numbers(10, bad=frozenset({6}))], lanes=1)
    with pytest.raises(UserError, match=r"numbers:7: bad on purpose\. Set `data.on_bad_row: skip`"):
        packs(lane, 10)


def test_skipped_rows_are_counted_and_listed() -> None:
    lane = lane_of([numbers(10, bad=frozenset({2, 6}))], lanes=1, look_ahead=9, on_bad_row="skip")
    lane.next_pack()  # 9 usable rows: one epoch has 8
    taken = lane.take_bad_rows()
    assert set(taken) == {"numbers:3: bad on purpose", "numbers:7: bad on purpose"}
    assert len(taken) == lane.counters.skipped_rows
    assert lane.take_bad_rows() == []


@pytest.mark.parametrize(("size", "lanes"), [(10, 1), (10, 4), (3, 4), (2000, 4)])
def test_source_without_usable_rows_raises(size: int, lanes: int) -> None:
    lane = lane_of([numbers(size, bad=frozenset(range(size)))], lanes=lanes, on_bad_row="skip")
    with pytest.raises(
        UserError, match=r"source0: none of the last \d+ rows was usable; the last one \(numbers:\d+\): bad on"
    ):
        lane.next_pack()
    lane = lane_of([numbers(size)], lanes=lanes, length=100, overlong="drop")
    with pytest.raises(UserError, match=r"more than data\.pack_tokens"):
        lane.next_pack()


def test_single_usable_row_fills_packs() -> None:
    for number in range(4):
        lane = lane_of([numbers(8, bad=frozenset(range(1, 8)))], number, on_bad_row="skip", look_ahead=4)
        assert {sample.id.row for pack in packs(lane, 3) for sample in pack} == {0}


def test_restoring_after_changed_data_raises() -> None:
    lane = lane_of([numbers(40)], pack_tokens=5)
    packs(lane, 5)
    state = lane.state()
    rows = {values[2] for values in state["window"]}
    with pytest.raises(UserError, match="has changed since the checkpoint"):
        lane_of([numbers(40, bad=frozenset(rows))], pack_tokens=5).restore(state)
    state["window"][0] = (0, 0, state["window"][0][2], 9)
    with pytest.raises(UserError, match="has changed since the checkpoint: it is shorter"):
        lane_of([numbers(40)], pack_tokens=5).restore(state)


def test_lane_of_one_epoch_reads_each_row_once_and_ends() -> None:
    settings = data([1.0, 5.0], pack_tokens=16, lanes=1, look_ahead=6, shuffle=False)
    lane = Lane(reader_of(settings, [numbers(20), numbers(11)], NumberRenderer(), 0), 0, epochs=1)
    seen = Counter(sample.id[:3] for pack in iter(lane.next_pack, None) if pack for sample in pack)
    assert seen == Counter({**{(0, 0, row): 1 for row in range(20)}, **{(1, 0, row): 1 for row in range(11)}})
    assert lane.next_pack() is None


def test_lane_state_is_small(tmp_path: Path) -> None:
    lane = lane_of([numbers(10_000)], look_ahead=256, shuffle_rows=4096)
    packs(lane, 50)
    assert len(json.dumps(lane.state())) < 256 * 24 + 300
