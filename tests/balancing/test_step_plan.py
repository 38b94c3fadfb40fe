"""The plan of a step, without ranks: nothing lost, the same sums on any layout, and what is told is what was known."""

from dataclasses import replace

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omnizoo.balancing.pack_metadata import PREFERENCES, PackTable, decode_messages, encode_message
from omnizoo.balancing.step_plan import TEXT, plan_step
from omnizoo.data.packing.pack import Pack
from omnizoo.data.sample import Preferences
from omnizoo.data.token_fields import IGNORE_INDEX, make_columns, num_tokens
from omnizoo.modalities.item import MediaItem, MediaSize, Port
from omnizoo.parallel.layout import Layout

PORTS = [Port("image", "encoder"), Port("sound", "encoder"), Port("image", "decoder")]
CALLS = [PORTS[:2], PORTS[2:]]  # the first two share a module


def random_pack(index: int, random: np.random.Generator) -> Pack:
    lengths = [int(length) for length in random.integers(2, 40, random.integers(1, 4))]
    items, start = [], 0
    for length in lengths:
        if random.random() < 0.7:
            port = PORTS[random.integers(len(PORTS))]
            size = MediaSize(int(random.integers(1, length)), float(random.integers(1, 1000)))
            is_target, has_targets = (random.random(2) < 0.5).tolist()
            spans = ((start + 1, size.num_placeholders),)
            items.append(MediaItem(port, size, spans, port.role == "decoder" and is_target, has_targets=has_targets))
        start += length
    labels = np.where(random.random(start) < 0.5, 1, IGNORE_INDEX)
    weights = np.full(start, random.integers(1, 4))
    columns = make_columns(input_ids=np.zeros(start), labels=labels, loss_weights=weights)
    return Pack(index, columns, lengths, [f"0/0/{index}/{i}" for i in range(len(lengths))], tuple(items))


def weight(pack: Pack) -> float:
    return pack.num_targets * float(pack.columns["loss_weights"][0])


def cost(pack: Pack) -> float:
    return float(num_tokens(pack.columns) ** 2)


@settings(deadline=None)  # a machine may be busy
@given(st.integers(0, 2**32), st.integers(1, 12), st.integers(1, 3), st.integers(1, 3), st.integers(1, 2))
def test_each_pack_is_assigned_once_and_totals_ignore_layout(
    seed: int, count: int, dp: int, ring: int, micro_batch: int
) -> None:
    random = np.random.default_rng(seed)
    packs = [random_pack(index, random) for index in range(count)]
    alone = plan_step(PackTable.from_packs(packs, PORTS, cost), Layout(), 1, CALLS, cost)
    layout = Layout(dp_shard=dp, ring=ring)
    parts = [PackTable.from_packs([packs[i]], PORTS, cost) for i in random.permutation(count)]
    plan = plan_step(PackTable.concatenate(parts), layout, micro_batch, CALLS, cost)

    assert plan.totals == alone.totals
    assert plan.totals.tokens == sum(num_tokens(pack.columns) for pack in packs)
    learnt = [
        item.size.num_placeholders for pack in packs for item in pack.items if item.is_target and item.has_targets
    ]
    assert plan.totals.targets.get("image", 0) == sum(learnt)
    assert plan.totals.targets[TEXT] == sum(pack.num_targets for pack in packs)
    assert plan.totals.weight == sum(weight(pack) for pack in packs)
    assert set(plan.imbalance) == {"tokens", "image/encoder", "sound/encoder", "image/decoder"}
    assert all(figure >= 1 - 1e-9 for figure in plan.imbalance.values())

    dealt = [index for each in plan.rounds for own in each.packs for index in own]
    assert sorted(index for index in dealt if index >= 0) == list(range(count))
    assert {len(own) for each in plan.rounds for own in each.packs} == {micro_batch}
    for each in plan.rounds:
        owned = [at for rank in range(layout.world) for at, _ in each.owned(rank)]
        assert sorted(owned) == list(range(len(each.items)))
        routes = [each.routes(rank) for rank in range(layout.world)]
        for port in PORTS:
            items = [item for own in each.packs for index in own if index >= 0 for item in packs[index].items]
            own = [item for item in items if item.port == port]
            ways = [of[port] for of in routes if port in of]
            placed = sum(int((way.token >= 0).sum()) for way in ways)
            predicted = sum(int((way.previous_token >= 0).sum()) for way in ways)
            assert placed == sum(item.size.num_placeholders for item in own)
            assert predicted == sum(item.size.num_placeholders for item in own if item.is_target)


@settings(deadline=None)
@given(st.integers(0, 2**32))
def test_pack_table_round_trips_through_messages(seed: int) -> None:
    random = np.random.default_rng(seed)
    pack = random_pack(3, random)
    roles = random.choice(["chosen", "rejected", *list(PREFERENCES)[1:]], len(pack.lengths)).tolist()
    sources = random.integers(0, 3, len(pack.lengths)).tolist()
    items = tuple(replace(item, source=2) for item in pack.items)
    pack = replace(pack, preferences=Preferences(roles, [""] * len(roles)), sources=sources, items=items)
    message = encode_message(PackTable.from_packs([pack], PORTS, cost), {"error": None})
    nothing = encode_message(PackTable.from_packs([], PORTS, cost), "nothing to say")
    heard, notes = decode_messages([np.frombuffer(each, np.uint8) for each in (nothing, message)])
    assert notes == ["nothing to say", {"error": None}]
    is_target = np.split(pack.columns["labels"] != IGNORE_INDEX, np.cumsum(pack.lengths)[:-1])
    counts = []
    for source in sorted(set(sources)):
        segments = [i for i, other in enumerate(sources) if other == source]
        targets = sum(int(is_target[i].sum()) for i in segments)
        weights = targets * float(pack.columns["loss_weights"][0])
        preferences = [sum(roles[i] == role for i in segments) for role in PREFERENCES.values()]
        answers = sum(bool(is_target[i].any()) for i in segments)
        counts.append(
            (source, len(segments), sum(pack.lengths[i] for i in segments), targets, weights, *preferences, answers)
        )
    assert heard.counts.tolist() == counts
    assert heard.packs.tolist() == [(3, False, len(pack.lengths), len(pack.items), cost(pack))]
    assert heard.lengths.tolist() == pack.lengths
    assert heard.items.tolist() == [
        (PORTS.index(i.port), 2, i.size.num_placeholders, i.targets, i.is_target, 0, len(i.spans), i.size.cost)
        for i in pack.items
    ]
    assert [tuple(heard.spans_of(at, 0)) for at in range(len(pack.items))] == [i.spans for i in pack.items]
    assert heard.tokens.tolist() == [num_tokens(pack.columns)]


def test_moved_item_shifts_spans_and_drops_raw_value() -> None:
    item = MediaItem(PORTS[0], MediaSize(3, 1.0), ((1, 2), (5, 1)), False)
    inputs = {"values": torch.zeros(1)}
    moved = item.moved(10, raw=None, inputs=inputs)
    assert moved.spans == ((11, 2), (15, 1))
    assert moved.inputs is inputs
    assert f"{item.port}" == str(item.port) == "image/encoder"


def test_parts_of_item_have_spans_in_every_copy() -> None:
    item = MediaItem(PORTS[0], MediaSize(5, 1.0), ((3, 2), (7, 3), (20, 5)), False)  # twice: in two runs, and in one
    parts = item.cut([(MediaSize(3, 0.5), {}), (MediaSize(2, 0.5), {})])
    assert [part.spans for part in parts] == [((3, 2), (7, 1), (20, 3)), ((8, 2), (23, 2))]
