"""The time that a plan expects, on counts made by hand: each part is what its figures divide to, and they add up."""

from dataclasses import astuple, replace

import pytest
import torch

from omnizoo.planning.devices import DEVICES, Device
from omnizoo.planning.op_counter import OpCounter, moved_by
from omnizoo.planning.time_model import LAUNCH, MEMORY, SYNC, Counts, Shares, expect, seconds_of
from omnizoo.planning.traffic import Collective

DEVICE = Device(80, 8, 1000.0, 400, 50, 2000, 100.0)
SHARES = Shares(matmuls=0.5, attention=0.25, links=0.5)
NODE, FAR = {"inside_node": True, "host": False}, {"inside_node": False, "host": False}
NOTHING = Counts(matmuls={}, attention=0, moved=0, sent={}, launched=0, syncs=0, tokens=1000)


def test_parts_are_counts_divided_by_device_speeds() -> None:
    counts = replace(NOTHING, matmuls={"bfloat16": 1e15, "float32": 1e13}, attention=5e14, moved=int(2e12))
    found = expect(counts, DEVICE, SHARES)
    assert found is not None
    assert found.matmuls == pytest.approx((1 + 0.1) / 0.5)
    assert found.attention == pytest.approx(0.5 / 0.25)
    assert found.memory == pytest.approx(1 / MEMORY)
    assert found.seconds == pytest.approx(sum(astuple(found)[:-1]))
    assert found.tokens_per_second == pytest.approx(1000 / found.seconds)


def test_weight_collectives_and_all_to_alls_add_to_the_step() -> None:
    gather = Collective("all-gather", "shard", ranks=16, in_a_node=8, **FAR)  # 15 parts arrive, by 8 links of 50
    route = Collective("all-to-all", "ep", ranks=8, in_a_node=8, **NODE)
    found = expect(replace(NOTHING, sent={gather: 1e9, route: 8e9}, matmuls={"bfloat16": 1e15}), DEVICE, SHARES)
    assert found is not None
    assert found.weights == pytest.approx(15e9 / 400e9 / 0.5)
    assert found.exchanges == pytest.approx(7 / 8 * 8e9 / 400e9 / 0.5)
    assert found.seconds == pytest.approx(found.matmuls + found.weights + found.exchanges)


def test_ring_sends_overlap_with_attention_only() -> None:
    send = Collective("send", "ring", ranks=4, in_a_node=1, **FAR)
    counts = replace(NOTHING, sent={send: 50e9}, matmuls={"bfloat16": 1e16}, attention=1e14)
    found = expect(counts, DEVICE, SHARES)
    assert found is not None
    assert found.exchanges == pytest.approx(1 / 0.5 - 0.1 / 0.25)


def test_cpu_collectives_take_no_device_time() -> None:
    told = Collective("all-gather", "world", inside_node=False, host=True, ranks=16, in_a_node=8)
    found = expect(replace(NOTHING, sent={told: 1e12}, moved=1), DEVICE, SHARES)
    assert found is not None
    assert found.weights == 0


def test_device_waits_for_a_slower_host() -> None:
    slow = expect(replace(NOTHING, launched=1000, syncs=3), DEVICE, SHARES)
    assert slow is not None
    assert slow.host == pytest.approx(1000 * LAUNCH + 3 * SYNC)
    fast = expect(replace(NOTHING, launched=1000, syncs=3, moved=int(2e12)), DEVICE, SHARES)
    assert fast is not None
    assert fast.host == pytest.approx(3 * SYNC)


@pytest.mark.parametrize(
    ("op", "ranks", "near", "seconds"),
    [
        ("all-gather", 8, 8, 7 * 1 / 400),
        ("reduce-scatter", 8, 8, 7 / 8 / 400),
        ("all-reduce", 8, 8, 2 * 7 / 8 / 400),
        ("all-reduce", 16, 1, 2 * 15 / 16 / 50),  # one rank of each node: its own link only
        ("all-to-all", 16, 8, 7 / 16 / 400 + 8 / 16 / 50),
        ("send", 2, 1, 1 / 50),
        ("all-gather", 1, 1, 0.0),
    ],
)
def test_collective_takes_as_long_as_its_slowest_link(op: str, ranks: int, near: int, seconds: float) -> None:
    collective = Collective(op, "any", ranks == near, False, ranks, near)
    assert seconds_of(collective, 1e9, DEVICE) == pytest.approx(seconds)


def test_device_without_speeds_has_no_prediction() -> None:
    assert expect(NOTHING, Device(80), SHARES) is None
    assert all(expect(NOTHING, device, SHARES) is not None for device in DEVICES.values())


def test_operator_bytes_are_reads_plus_writes() -> None:
    aten, work = torch.ops.aten, OpCounter(torch.device("cpu"))
    a, b = torch.zeros(6, 4), torch.zeros(6, 4)
    own = a.nbytes
    for func, args, moved in (
        (aten.add.Tensor, (a, b), 3 * own),
        (aten.add_.Tensor, (a, b), 3 * own),
        (aten.copy_.default, (a, b), 2 * own),
        (aten.add.Tensor, (a, torch.zeros(1, 4).expand(6, 4)), 2 * own + 16),
        (aten.view.default, (a, [4, 6]), 0),
        (aten.empty_like.default, (a,), 0),
        (aten.zeros_like.default, (a,), own),
        (aten.index_select.default, (a, 0, torch.tensor([1, 2])), 2 * 2 * 16 + 16),
        (aten.mm.default, (a, b.T), 0),
    ):
        before = work.moved.total()
        work.see(func, args, "m", "forward", func(*args))
        assert work.moved.total() - before == moved, func
    assert work.launched.total() == 7
    assert moved_by("scatter_add_", [a], [a, torch.zeros(2, dtype=torch.int64), torch.zeros(2)]) == 3 * (16 + 8)
