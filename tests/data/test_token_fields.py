"""The table of per-token columns: what happens to each column between a row and the loss."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import write_config, write_rows

from omnizoo.balancing.balancer import Balancer
from omnizoo.balancing.batch import collate
from omnizoo.balancing.prefetch import next_step
from omnizoo.config.errors import UserError
from omnizoo.config.load import load_config
from omnizoo.data.loading.loader import build_loader
from omnizoo.data.loading.prepare import content_keys
from omnizoo.data.packing.kto_baseline import split_kto_baseline
from omnizoo.data.packing.pack import Pack, dummy_pack
from omnizoo.data.rendering.renderer import Renderer
from omnizoo.data.sample import Preferences, RenderedRow
from omnizoo.data.token_fields import (
    IGNORE_INDEX,
    TOKEN_FIELDS,
    Columns,
    TokenField,
    concatenate,
    cut_piece,
    field_of,
    make_columns,
    num_tokens,
    select,
    shift_to_next_token,
    to_tensors,
)
from omnizoo.models.build import build_model
from omnizoo.models.read_config import load_tokenizer
from omnizoo.parallel.mesh import build_mesh
from omnizoo.parallel.process import process_group
from omnizoo.parallelize.parallelize import parallelize_model
from omnizoo.rl.rollouts import Rollout, RolloutReader
from omnizoo.training.objective import build_objective
from omnizoo.training.optimizers.build import build_optimizer
from omnizoo.training.step import train_step

OPTIONAL = ("position_ids", "loss_weights", "advantage")


def columns_of(length: int, names: set[str], seed: int) -> Columns:
    random = np.random.default_rng(seed)
    optional: dict[str, Any] = {
        "position_ids": random.integers(0, 99, (3, length)).astype(np.int32),
        "loss_weights": random.random(length),
        "advantage": random.random(length),
    }
    ids = random.integers(0, 99, length)
    labels = np.where(random.random(length) < 0.5, ids, IGNORE_INDEX)
    return make_columns(input_ids=ids, labels=labels, **{name: optional[name] for name in sorted(names)})


columns = st.builds(columns_of, st.integers(1, 9), st.sets(st.sampled_from(OPTIONAL)), st.integers(0, 1000))
parts = st.lists(columns, min_size=1, max_size=5)


def assert_equal(found: Columns, expected: Columns) -> None:
    assert found.keys() == expected.keys()
    for name, column in expected.items():
        assert found[name].dtype == column.dtype, name
        np.testing.assert_array_equal(found[name], column, err_msg=name)


@given(parts)
@settings(max_examples=200, deadline=None)
def test_concatenation_fills_missing_columns(parts: list[Columns]) -> None:
    joined = concatenate(parts)
    assert joined.keys() == {name for part in parts for name in part}
    start = 0
    for part in parts:
        found = select(joined, slice(start, start + num_tokens(part)))
        assert_equal({name: found[name] for name in part}, part)
        for name in found.keys() - part.keys():
            fill = np.arange(num_tokens(part)) if name == "position_ids" else field_of(name).fill
            assert (found[name] == fill).all()
        start += num_tokens(part)
    assert num_tokens(joined) == start


@given(parts, st.randoms(use_true_random=False))
@settings(max_examples=200, deadline=None)
def test_mask_and_its_indices_select_the_same_tokens(parts: list[Columns], random: Any) -> None:
    joined = concatenate(parts)
    mask = np.array([random.random() < 0.5 for _ in range(num_tokens(joined))])
    assert_equal(select(joined, mask), select(joined, np.flatnonzero(mask)))
    assert num_tokens(select(joined, mask)) == mask.sum()


@given(parts)
@settings(max_examples=200, deadline=None)
def test_next_token_columns_are_shifted_within_segments(parts: list[Columns]) -> None:
    lengths = [num_tokens(part) for part in parts]
    joined = concatenate(parts)
    shifted = shift_to_next_token(joined, lengths)
    ends = np.cumsum(lengths)
    for name, column in joined.items():
        field = field_of(name)
        expected = column.copy()
        if field.is_next_token:
            for start, end in zip(ends - lengths, ends, strict=True):
                expected[..., start:end] = [*column[start + 1 : end], field.fill]
        assert shifted[name].dtype == column.dtype
        np.testing.assert_array_equal(shifted[name], expected)


@given(parts)
@settings(max_examples=100, deadline=None)
def test_shifting_a_pack_shifts_each_segment(parts: list[Columns]) -> None:
    lengths = [num_tokens(part) for part in parts]
    joined = concatenate(parts)
    shifted = shift_to_next_token(joined, lengths)
    start = 0
    for length in lengths:
        segment = slice(start, start + length)
        assert_equal(select(shifted, segment), shift_to_next_token(select(joined, segment), [length]))
        start += length


@given(columns, st.integers(0, 8), st.integers(1, 9))
def test_only_positions_restart_in_later_pieces(whole: Columns, start: int, size: int) -> None:
    start = min(start, num_tokens(whole) - 1)
    piece = cut_piece(whole, start, start + size)
    for name, column in select(whole, slice(start, start + size)).items():
        expected = column - column[..., :1] if name == "position_ids" and start else column
        np.testing.assert_array_equal(piece[name], expected)


@given(parts)
@settings(max_examples=50, deadline=None)
def test_tensors_have_a_batch_axis_and_int64_integers(parts: list[Columns]) -> None:
    joined = concatenate(parts)
    for name, tensor in to_tensors(joined).items():
        assert tensor.shape == (*joined[name].shape[:-1], 1, num_tokens(joined))
        assert tensor.is_floating_point() or tensor.dtype == torch.int64
        assert np.array_equal(tensor.squeeze(-2).numpy(), joined[name])


@given(st.lists(columns, min_size=2, max_size=5), st.integers(0, 4))
@settings(max_examples=100, deadline=None)
def test_batch_concatenates_packs_and_excludes_dummies_from_counts(parts: list[Columns], dummy: int) -> None:
    packs = [Pack(i, part, [num_tokens(part)], [f"0/0/{i}/0"]) for i, part in enumerate(parts)]
    dummy %= len(packs)
    packs[dummy] = dummy_pack(dummy)
    batch = collate(packs)
    lengths = [num_tokens(pack.columns) for pack in packs]
    assert batch.lengths == lengths
    assert batch.tokens == sum(lengths) - 2
    assert batch.packs == tuple(i for i in range(len(packs)) if i != dummy)
    numbers = [*range(dummy), -1, *range(dummy, len(packs) - 1)]
    assert batch.columns["pack_of_token"].tolist() == [np.repeat(numbers, lengths).tolist()]
    assert batch.columns["sample_of_token"].tolist() == [np.repeat(np.arange(len(packs)), lengths).tolist()]
    assert batch.columns["input_ids"].tolist() == [np.concatenate([p.columns["input_ids"] for p in packs]).tolist()]
    if all("position_ids" not in pack.columns for pack in packs):
        assert batch.columns["position_ids"].tolist() == [[i for length in lengths for i in range(length)]]


def test_kto_baseline_gets_mismatched_segments_with_all_columns() -> None:
    roles = ["desirable", "mismatched", "", "mismatched"]
    parts = [columns_of(length, set(OPTIONAL), length) for length in (3, 2, 4, 1)]
    preferences = Preferences(roles, [f"key {i}" if role else "" for i, role in enumerate(roles)])
    pack = Pack(7, concatenate(parts), [3, 2, 4, 1], ["a", "b", "c", "d"], preferences=preferences)
    (training,), (baseline,) = split_kto_baseline([pack])
    assert_equal(training.columns, concatenate(parts[::2]))
    assert_equal(baseline.columns, concatenate(parts[1::2]))
    assert (training.sample_ids, baseline.sample_ids) == (["a", "c"], ["b", "d"])
    assert training.preferences == Preferences(["desirable", ""], ["key 0", ""])
    assert baseline.preferences == Preferences(["mismatched"] * 2, ["key 1", "key 3"])


def test_content_keys_hash_32_bit_ids_labels_and_positions() -> None:
    """Caches of reference log-probabilities on disk are found by these keys."""
    ids = np.arange(5)
    labels = np.array([1, 2, IGNORE_INDEX, 4, IGNORE_INDEX])
    positions = np.arange(15, dtype=np.int64).reshape(3, 5)
    pack = Pack(0, make_columns(input_ids=ids, labels=labels, position_ids=positions), [3, 2], ["a/chosen", "b"])
    hashed = ids[:3].astype(np.int32).tobytes() + labels[:3].astype(np.int32).tobytes() + positions[:, :3].tobytes()
    assert content_keys(pack, ["chosen", ""]) == [xxhash.xxh3_128(hashed).hexdigest(), ""]


def test_rollout_with_built_in_column_name_raises(tmp_path: Path) -> None:
    config = load_config(write_config(tmp_path), [])
    reader = RolloutReader(Renderer(load_tokenizer(config.model), True), 64, None)
    with pytest.raises(UserError, match=r"^rollouts: .*labels"):
        reader.to_train([Rollout([1, 2], [3, 4], extra={"labels": [1.0, 2.0]})], [])


def test_new_column_reaches_a_custom_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The column repeats the weights of rows that have some, so that sums by it are known."""
    monkeypatch.setitem(TOKEN_FIELDS, "rarity", TokenField("rarity", np.float32, 1.0, True, True))
    render = Renderer.render_samples

    def with_rarity(self: Renderer, *args: Any, **options: Any) -> list[RenderedRow]:
        (row,) = render(self, *args, **options)
        if "loss_weights" not in row.columns:
            return [row]
        rarity = row.columns["loss_weights"]
        return [RenderedRow(row.columns | {"rarity": rarity}, row.items, is_prose=row.is_prose)]

    monkeypatch.setattr(Renderer, "render_samples", with_rarity)
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "support"))
    rows = [{"text": f"any number of ranks {i}"} | ({"weight": 1 + i % 3} if i % 2 else {}) for i in range(60)]
    source = write_rows(tmp_path / "rows.jsonl", rows)
    path = write_config(
        tmp_path,
        data={"sources": [{"path": str(source)}], "workers": 0},
        train={"losses": [{"kind": "own_losses:ByRarity", "name": "rarity"}], "packs_per_step": 2, "lr": 1e-2},
    )
    config = load_config(path, [])
    with process_group() as process:
        mesh = build_mesh(config, process)
        model = build_model(config.model, config.train.precision)
        parallelize_model(model, mesh, config)
        objective = build_objective(model, mesh, config)
        optimizer = build_optimizer(model, config)
        loader = build_loader(config, load_tokenizer(config.model), 0, 1)
        data = next_step(loader, Balancer(model, mesh, config))
        results = [train_step(objective, optimizer, data, step) for step in range(1, 6)]
    assert len(data.micro_batches[0].columns["rarity"].unique()) > 1
    for result in results:
        assert result.terms["rarity"] == result.terms["rarity/by_weight"] != result.terms["rarity/plain"]
    assert results[-1].loss < results[0].loss
