"""Rows made on some ranks, needed on others: every row arrives once on each rank that needs it, at its token and at the
one that predicts it, and its gradient comes back; planned purely for any layout, then sent between real processes and
compared with a plain scatter in one."""

import itertools
from dataclasses import dataclass
from itertools import accumulate
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import run_on_ranks

from omnizoo.models.media.features import MediaFeatures
from omnizoo.parallel.collective_counter import CollectiveCounter
from omnizoo.parallel.exchange import exchange_payloads, gather_bytes
from omnizoo.parallel.feature_exchange import FeatureRoute, PackGroup, exchange_features, gather_rows, plan_routes
from omnizoo.parallel.layout import Layout, layouts_of
from omnizoo.parallel.process import Process, process_group
from omnizoo.parallel.sequence.slicing import slice_tokens
from omnizoo.training.local_batch import features_by_token

WIDTHS = {"a": 5, "b": 3, "c": 1}


@dataclass(frozen=True)
class RoutedItem:
    port: str
    spans: list[tuple[int, int]]
    owner: int
    is_target: bool = False
    has_targets: bool = True

    @property
    def num_placeholders(self) -> int:
        return sum(count for _, count in self.spans)


def share_of(lengths: list[int], items: list[RoutedItem]) -> PackGroup:
    return PackGroup(lengths, items, [item.owner for item in items])


def random_shares(layout: Layout, random: np.random.Generator, density: float) -> list[PackGroup]:
    """Samples with items anywhere but at their first token; an item may have several spans."""
    shares = []
    for _ in range(layout.dp):
        lengths = [int(n) for n in random.integers(1, 30, random.integers(1, 5))]
        items = []
        for start, length in zip(accumulate([0, *lengths]), lengths, strict=False):
            position, spans = 1, []
            while position < length and random.random() < density:
                rows = int(random.integers(1, length - position + 1))
                spans.append((start + position, rows))
                position += rows + int(random.integers(0, 3))
                if random.random() < 0.6:
                    port, owner = str(random.choice(list(WIDTHS))), int(random.integers(layout.world))
                    items.append(RoutedItem(port, spans, owner, *(random.random(2) < 0.5).tolist()))
                    spans = []
        shares.append(share_of(lengths, items))
    return shares


@dataclass(frozen=True)
class Rows:
    """One port's rows over all ranks, in the order of shares and items: what a single process would have."""

    dp: np.ndarray
    token: np.ndarray
    owner: np.ndarray
    is_target: np.ndarray
    has_targets: np.ndarray


def rows_of(shares: list[PackGroup], port: str) -> Rows:
    found = [
        (dp, first + i, item.owner, item.is_target, item.has_targets)
        for dp, share in enumerate(shares)
        for item in share.items
        if item.port == port
        for first, rows in item.spans
        for i in range(rows)
    ]
    return Rows(*np.array(found, np.int64).reshape(-1, 5).T)


@settings(deadline=None)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(0, 2**32))
def test_gathered_rows_reach_item_owners_in_order(dp: int, ring: int, ulysses: int, seed: int) -> None:
    """The way back of `exchange_features`; several items may read the same tokens."""
    layout, random = Layout(dp_shard=dp, ring=ring, ulysses=ulysses), np.random.default_rng(seed)
    shares = random_shares(layout, random, 0.7)
    read = [
        RoutedItem("a", item.spans, int(random.integers(layout.world)))
        for share in shares
        for item in share.items
        for _ in range(2)
    ]
    left = iter(read)
    shares = [share_of(share.lengths, [next(left) for _ in range(2 * len(share.items))]) for share in shares]
    routes = [plan_routes(layout, rank, shares).get("a") for rank in range(layout.world)]
    states = []  # of each token its number: that of its micro-batch, and of the token in there
    for rank in range(layout.world):
        dp_rank, sp_rank = divmod(rank, layout.sp)
        held = slice_tokens(shares[dp_rank].lengths, ring, ulysses)[sp_rank]
        states.append(torch.from_numpy(dp_rank * 1000 + np.asarray(held, np.float64))[:, None])
    sent: dict[int, list[torch.Tensor]] = {}

    def leave(rank: int) -> Any:
        def exchange(tables: Any, out: Any, back: Any, *_: Any) -> tuple[torch.Tensor]:
            sent[rank] = list(tables[0].split(out[0]))
            return (tables[0].new_zeros(sum(back[0]), 1),)

        return exchange

    def arrive(rank: int) -> Any:
        return lambda *_: (torch.cat([sent[source][rank] for source in range(layout.world)]),)

    for way in (leave, arrive):
        got = []
        for rank, route in enumerate(routes):
            with patch("omnizoo.parallel.feature_exchange.exchange_tables", way(rank)):
                got.append(gather_rows(states[rank], route)[:, 0].tolist())
    for rank, found in enumerate(got):
        own = [(d, item) for d, share in enumerate(shares) for item in share.items if item.owner == rank]
        assert found == [d * 1000 + first + i for d, item in own for first, count in item.spans for i in range(count)]


@settings(deadline=None)  # a machine may be busy
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(0, 2**32), st.floats(0, 1))
def test_each_feature_reaches_holders_of_its_tokens_once(
    dp: int, ring: int, ulysses: int, seed: int, density: float
) -> None:
    layout = Layout(dp_shard=dp, ring=ring, ulysses=ulysses)
    shares = random_shares(layout, np.random.default_rng(seed), density)
    routes = [plan_routes(layout, rank, shares) for rank in range(layout.world)]
    assert all(list(planned) == sorted({i.port for s in shares for i in s.items}) for planned in routes)
    for port in routes[0]:
        rows, ways = rows_of(shares, port), [planned[port] for planned in routes]
        sent = np.array([way.sent for way in ways])
        assert sent.tolist() == np.array([way.received for way in ways]).T.tolist()
        # What an all-to-all does, on the numbers of the rows.
        leaving = [
            np.split(np.flatnonzero(rows.owner == rank)[way.order.numpy()], np.cumsum(way.sent)[:-1])
            for rank, way in enumerate(ways)
        ]
        placed, predicted = [], []
        for rank, way in enumerate(ways):
            arrived = np.concatenate([leaving[source][rank] for source in range(layout.world)])
            assert len(set(arrived.tolist())) == len(arrived)
            dp_rank, sp_rank = divmod(rank, layout.sp)
            held = slice_tokens(shares[dp_rank].lengths, ring, ulysses)[sp_rank]
            assert (rows.dp[arrived] == dp_rank).all()
            place, before = way.token.numpy(), way.previous_token.numpy()
            assert ((place >= 0) | (before >= 0)).all()
            assert rows.token[arrived[place >= 0]].tolist() == held[place[place >= 0]].tolist()
            assert (rows.token[arrived[before >= 0]] - 1).tolist() == held[before[before >= 0]].tolist()
            placed += arrived[place >= 0].tolist()
            predicted += arrived[before >= 0].tolist()
            assert way.has_targets.tolist() == rows.has_targets[arrived].tolist()
        assert sorted(placed) == list(range(len(rows.token)))
        assert sorted(predicted) == np.flatnonzero(rows.is_target).tolist()


def test_target_at_sample_start_raises() -> None:
    assert plan_routes(Layout(), 0, [share_of([3, 4], [RoutedItem("a", [(3, 2)], 0)])])["a"].token.tolist() == [3, 4]
    with pytest.raises(AssertionError, match="no token before it"):
        plan_routes(Layout(), 0, [share_of([3, 4], [RoutedItem("a", [(3, 2)], 0, is_target=True)])])


def received_by(features: dict[str, torch.Tensor], routes: dict[str, FeatureRoute]) -> dict[str, MediaFeatures]:
    received = exchange_features(features, routes)
    return {port: features_by_token(rows, routes.get(port)) for port, rows in received.items()}


def test_one_process_exchanges_features_without_group() -> None:
    shares = [share_of([6], [RoutedItem("a", [(1, 1), (4, 2)], 0), RoutedItem("b", [(2, 1)], 0, is_target=True)])]
    features = {"a": torch.randn(3, 5, requires_grad=True), "b": torch.randn(1, 2), "c": torch.randn(4, 1)}
    got = received_by(features, plan_routes(Layout(), 0, shares))
    assert {port: arrived.placed.index.tolist() for port, arrived in got.items()} == {"a": [1, 4, 5], "b": [2], "c": []}
    assert {port: arrived.predicted.index.tolist() for port, arrived in got.items()} == {"a": [], "b": [1], "c": []}
    assert all(torch.equal(got[port].placed.values, features[port]) for port in "ab")
    assert torch.equal(got["b"].predicted.values, features["b"])
    assert got["b"].trained is None
    other = RoutedItem("b", [(4, 1)], 0, is_target=True, has_targets=False)
    both = {"b": torch.randn(2, 2)}
    found = received_by(both, plan_routes(Layout(), 0, [share_of([6], [*shares[0].items[1:], other])]))["b"]
    assert (found.predicted.index.tolist(), found.trained.tolist()) == ([1, 3], [0])
    assert got["c"].placed.values.shape == got["c"].predicted.values.shape == (0, 1)


def check_exchange(layout: Layout, rank: int, seed: int, density: float, dtype: torch.dtype) -> None:
    """This rank's part of a random micro-batch against the scatter of all rows, and all gradients, in one process."""
    shares = random_shares(layout, np.random.default_rng(seed), density)
    random = torch.Generator().manual_seed(seed)
    dp_rank, sp_rank = divmod(rank, layout.sp)
    lengths = shares[dp_rank].lengths
    held = torch.from_numpy(slice_tokens(lengths, layout.ring, layout.ulysses)[sp_rank])

    features, whole, rows = {}, {}, {port: rows_of(shares, port) for port in WIDTHS}
    for port, width in WIDTHS.items():  # the same numbers on every rank
        whole[port] = torch.randn(len(rows[port].token), width, generator=random, dtype=torch.float64).to(dtype)
        own = whole[port][torch.from_numpy(rows[port].owner == rank)]
        # A rank without items encodes a blank one, whose rows nobody asks for.
        features[port] = (own if len(own) else torch.ones(2, width, dtype=dtype)).clone().requires_grad_()
    # Codes travel along: integers, by the way of the first port.
    features |= {"codes": (features["a"].detach() * 1000).long()}
    routes = plan_routes(layout, rank, shares)
    nobody = not routes
    routes |= {"codes": routes["a"]} if "a" in routes else {}

    with CollectiveCounter() as counter:
        got = received_by(features, routes)
        assert dict(counter.calls) == ({} if nobody or layout.world == 1 else {"all-to-all": 1})
        loss = torch.zeros((), dtype=dtype)
        expected_grad = {port: torch.zeros_like(features[port]) for port in WIDTHS}
        for name, shift in itertools.product((*WIDTHS, "codes"), (0, -1)):
            port = "a" if name == "codes" else name
            arrived = got[name].predicted if shift else got[name].placed
            to = torch.from_numpy(rows[port].token + shift)
            is_meant = (rows[port].is_target == 1) | (shift == 0)
            here = torch.from_numpy((rows[port].dp == dp_rank) & is_meant)
            all_rows = (whole[port] * 1000).long() if name == "codes" else whole[port]
            reference = all_rows.new_zeros(sum(lengths), WIDTHS[port]).index_copy(0, to[here], all_rows[here])[held]
            found = all_rows.new_zeros(len(held), WIDTHS[port]).index_copy(0, arrived.index, arrived.values)
            assert torch.equal(found, reference), (str(layout), rank, name)
            if name == "codes":
                continue
            weights = [
                torch.randn(sum(share.lengths), WIDTHS[port], generator=random, dtype=torch.float64).to(dtype)
                for share in shares
            ]
            loss = loss + (found * weights[dp_rank][held]).sum()
            mine = np.flatnonzero(rows[port].owner == rank)
            if len(mine):
                expected_grad[port] += torch.stack(
                    [weights[rows[port].dp[i]][rows[port].token[i] + shift] * bool(is_meant[i]) for i in mine]
                )
        loss.backward()
        assert dict(counter.calls) == ({} if nobody or layout.world == 1 else {"all-to-all": 2})
    for port in WIDTHS:
        assert torch.equal(features[port].grad, expected_grad[port]), (str(layout), rank, port)


def check_frozen(rank: int, world: int) -> None:
    """Where no row of a port wants a gradient, none is sent back."""
    shares = [share_of([9], [RoutedItem(port, [(1, 2), (5, 2)], 0) for port in "ab"]) for _ in range(world)]
    layout = Layout(dp_shard=world)
    count = 4 * world if rank == 0 else 1
    features = {"a": torch.randn(count, 4), "b": torch.randn(count, 3, requires_grad=True)}
    got = received_by(features, plan_routes(layout, rank, shares))
    assert not got["a"].placed.values.requires_grad
    with CollectiveCounter() as counter:
        got["b"].placed.values.sum().backward()
    assert counter.bytes["all-to-all"] == (got["b"].placed.values.nbytes if world > 1 else 0)
    assert torch.equal(features["b"].grad, torch.full_like(features["b"], float(rank == 0)))


ARRAYS = {
    "pixels": torch.arange(12, dtype=torch.uint8).view(3, 4).t(),  # not contiguous
    "half": torch.linspace(0, 1, 3).bfloat16(),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "none": torch.empty(0, 7, dtype=torch.int32),
    "flags": torch.tensor([True, False, True]),
    "complex": torch.tensor([1 + 2j]),
}


def payload(source: int, to: int, i: int) -> tuple[dict, dict]:
    numbers = np.arange(source * 100 + to * 10 + i, dtype=np.int32)
    return {"from": source, "to": [to, {"ü": None}], "cost": 0.1 + i}, {"numbers": numbers, **(ARRAYS if i else {})}


def check_payloads(rank: int, world: int) -> None:
    got = exchange_payloads([[payload(rank, to, i) for i in range((rank * to) % 4)] for to in range(world)])
    assert [len(payloads) for payloads in got] == [(source * rank) % 4 for source in range(world)]
    for source, payloads in enumerate(got):
        for i, (header, arrays) in enumerate(payloads):
            wanted_header, wanted = payload(source, rank, i)
            assert header == wanted_header
            assert list(arrays) == list(wanted)
            for name, array in arrays.items():
                torch.testing.assert_close(array, torch.as_tensor(wanted[name]), rtol=0, atol=0)
    assert exchange_payloads([[] for _ in range(world)]) == [[] for _ in range(world)]
    messages = gather_bytes(bytes([rank]) * rank * 50)
    assert [message.tobytes() for message in messages] == [bytes([r]) * r * 50 for r in range(world)]


def on_ranks(process: Process) -> None:
    rank, world = process.rank, process.world_size
    check_payloads(rank, world)
    check_frozen(rank, world)
    for layout in layouts_of(world):
        if layout.ep > 1 or layout.dp_replicate > 1:  # neither changes who holds which token
            continue
        for seed, density in enumerate((0.0, 0.2, 0.5, 0.8, 1.0)):
            for dtype in (torch.float64, torch.float32, torch.bfloat16):
                check_exchange(layout, rank, seed, density, dtype)


def test_one_rank_receives_its_rows_and_payloads() -> None:
    with process_group() as process:
        on_ranks(process)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_rows_and_payloads_between_ranks_match_one_process(world: int) -> None:
    result = run_on_ranks(on_ranks, world)
    assert result.code == 0, result.stderr
