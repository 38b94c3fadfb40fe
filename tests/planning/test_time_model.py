"""The time model of plans on fixed counts: each part is a count divided by a speed, and the parts add up."""

from dataclasses import astuple, replace

import pytest
import torch

from omnizoo.planning.devices import DEVICES, Device
from omnizoo.planning.op_counter import OpCounter, moved_by
from omnizoo.planning.time_model import LAUNCH, MEMORY, SYNC, Counts, Shares, expect, seconds_of
from omnizoo.planning.traffic import Collective

DEVICE = Device(80, 8, 1000.0, 400, 50, 2000, 100.0)
SHARES = Shares(matmuls=0.5, attention=0.25, links=0.5)
INSIDE_NODE = {"inside_node": True, "host": False}
ACROSS_NODES = {"inside_node": False, "host": False}
ZERO_COUNTS = Counts(matmuls={}, attention=0, moved=0, sent={}, launched=0, syncs=0, tokens=1000)


def test_parts_are_counts_divided_by_device_speeds() -> None:
    counts = replace(ZERO_COUNTS, matmuls={"bfloat16": 1e15, "float32": 1e13}, attention=5e14, moved=int(2e12))
    estimate = expect(counts, DEVICE, SHARES)
    assert estimate is not None
    assert estimate.matmuls == pytest.approx((1 + 0.1) / 0.5)
    assert estimate.attention == pytest.approx(0.5 / 0.25)
    assert estimate.memory == pytest.approx(1 / MEMORY)
    assert estimate.seconds == pytest.approx(sum(astuple(estimate)[:-1]))
    assert estimate.tokens_per_second == pytest.approx(1000 / estimate.seconds)


def test_weight_collectives_and_all_to_alls_add_to_the_step() -> None:
    gather = Collective(
        "all-gather", "shard", ranks=16, in_a_node=8, **ACROSS_NODES
    )  # receives 15 shards over 8 links of 50 GB/s
    route = Collective("all-to-all", "ep", ranks=8, in_a_node=8, **INSIDE_NODE)
    estimate = expect(replace(ZERO_COUNTS, sent={gather: 1e9, route: 8e9}, matmuls={"bfloat16": 1e15}), DEVICE, SHARES)
    assert estimate is not None
    assert estimate.weights == pytest.approx(15e9 / 400e9 / 0.5)
    assert estimate.exchanges == pytest.approx(7 / 8 * 8e9 / 400e9 / 0.5)
    assert estimate.seconds == pytest.approx(estimate.matmuls + estimate.weights + estimate.exchanges)


def test_ring_sends_overlap_with_attention_only() -> None:
    send = Collective("send", "ring", ranks=4, in_a_node=1, **ACROSS_NODES)
    counts = replace(ZERO_COUNTS, sent={send: 50e9}, matmuls={"bfloat16": 1e16}, attention=1e14)
    estimate = expect(counts, DEVICE, SHARES)
    assert estimate is not None
    assert estimate.exchanges == pytest.approx(1 / 0.5 - 0.1 / 0.25)


def test_cpu_collectives_take_no_device_time() -> None:
    metadata = Collective("all-gather", "world", inside_node=False, host=True, ranks=16, in_a_node=8)
    estimate = expect(replace(ZERO_COUNTS, sent={metadata: 1e12}, moved=1), DEVICE, SHARES)
    assert estimate is not None
    assert estimate.weights == 0


def test_device_waits_for_a_slower_host() -> None:
    slow = expect(replace(ZERO_COUNTS, launched=1000, syncs=3), DEVICE, SHARES)
    assert slow is not None
    assert slow.host == pytest.approx(1000 * LAUNCH + 3 * SYNC)
    fast = expect(replace(ZERO_COUNTS, launched=1000, syncs=3, moved=int(2e12)), DEVICE, SHARES)
    assert fast is not None
    assert fast.host == pytest.approx(3 * SYNC)


@pytest.mark.parametrize(
    ("op", "ranks", "near", "seconds"),
    [
        ("all-gather", 8, 8, 7 * 1 / 400),
        ("reduce-scatter", 8, 8, 7 / 8 / 400),
        ("all-reduce", 8, 8, 2 * 7 / 8 / 400),
        ("all-reduce", 16, 1, 2 * 15 / 16 / 50),  # one rank per node uses only its own link
        ("all-to-all", 16, 8, 7 / 16 / 400 + 8 / 16 / 50),
        ("send", 2, 1, 1 / 50),
        ("all-gather", 1, 1, 0.0),
    ],
)
def test_collective_takes_as_long_as_its_slowest_link(op: str, ranks: int, near: int, seconds: float) -> None:
    collective = Collective(op, "any", ranks == near, False, ranks, near)
    assert seconds_of(collective, 1e9, DEVICE) == pytest.approx(seconds)


def test_device_without_speeds_has_no_prediction() -> None:
    assert expect(ZERO_COUNTS, Device(80), SHARES) is None
    assert all(expect(ZERO_COUNTS, device, SHARES) is not None for device in DEVICES.values())


def test_operator_bytes_are_reads_plus_writes() -> None:
    aten = torch.ops.aten
    work = OpCounter(torch.device("cpu"))
    a, b = torch.zeros(6, 4), torch.zeros(6, 4)
    size = a.nbytes
    for func, args, moved in (
        (aten.add.Tensor, (a, b), 3 * size),
        (aten.add_.Tensor, (a, b), 3 * size),
        (aten.copy_.default, (a, b), 2 * size),
        (aten.add.Tensor, (a, torch.zeros(1, 4).expand(6, 4)), 2 * size + 16),
        (aten.view.default, (a, [4, 6]), 0),
        (aten.empty_like.default, (a,), 0),
        (aten.zeros_like.default, (a,), size),
        (aten.index_select.default, (a, 0, torch.tensor([1, 2])), 2 * 2 * 16 + 16),
        (aten.mm.default, (a, b.T), 0),
    ):
        before = work.moved.total()
        work.see(func, args, "m", "forward", func(*args))
        assert work.moved.total() - before == moved, func
    assert work.launched.total() == 7
    assert moved_by("scatter_add_", [a], [a, torch.zeros(2, dtype=torch.int64), torch.zeros(2)]) == 3 * (16 + 8)
