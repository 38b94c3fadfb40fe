"""Steps of a number of samples and batch warmup: exact sizes, and the same packs on any number of ranks."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from fixtures import TEXT, make_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from tiny import write_rows
from transformers import PreTrainedTokenizerFast

from omnizoo.config.errors import UserError
from omnizoo.config.load import load_config
from omnizoo.config.schema import Config
from omnizoo.config.sections.step_sizes import StepSizes
from omnizoo.data.loading.loader import build_loader, merge_states
from omnizoo.data.loading.reader import build_reader
from omnizoo.data.loading.step_count import measure, steps_of

ROWS = 150
Packs = dict[int, tuple[list[str], list[int]]]


@given(st.integers(1, 500), st.integers(0, 40), st.floats(0.01, 0.99), st.integers(0, 60))
def test_step_sizes_grow_and_sum_up(size: int, warmup_steps: int, start: float, step: int) -> None:
    sizes = StepSizes(size, warmup_steps, start)
    each = [sizes.of_step(number) for number in range(step + 1)]
    assert sizes.before(step) == sum(each[:-1])
    assert each == sorted(each)
    assert each[0] == (max(1, round(start * size)) if warmup_steps else size)
    assert sizes.of_step(warmup_steps) == size
    assert sizes.steps_for(sizes.before(step) + 1) == step + 1
    assert sizes.steps_for(sizes.before(step + 1)) == step + 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    rng = random.Random(0)
    words = TEXT.split()
    texts = [" ".join(rng.choices(words, k=rng.randint(1, 25))) for _ in range(ROWS)]
    write_rows(folder / "texts.jsonl", [{"text": text} for text in texts])
    make_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    return make_tokenizer(folder)


def make_config(folder: Path, **train: Any) -> Config:
    return load_config(
        {
            "model": {"config": {"model_type": "llama"}, "tokenizer": str(folder)},
            "data": {"sources": [{"path": str(folder / "texts.jsonl")}], "pack_tokens": 64, "overlong": "drop"},
            "train": train,
        }
    )


def load_steps(
    config: Config, tokenizer: PreTrainedTokenizerFast, world: int, steps: int, state: dict[str, Any] | None = None
) -> tuple[list[Packs], dict[str, Any]]:
    """Return the packs of each step over all ranks, and the merged state after the last step."""
    loaders = [build_loader(config, tokenizer, rank, world) for rank in range(world)]
    for loader in loaders:
        if state is not None:
            loader.load_state_dict(state)
    history = []
    for _ in range(steps):
        packs = [pack for loader in loaders for pack in loader.next_step().packs]
        step = {pack.index: (pack.sample_ids, pack.columns["input_ids"].tolist()) for pack in packs}
        assert len(step) == len(packs)
        history.append(step)
    states = [json.loads(json.dumps(loader.state_dict())) for loader in loaders]
    for loader in loaders:
        loader.close()
    return history, merge_states(states)


def samples_of(packs: Packs) -> list[str]:
    return [sample for samples, _ in packs.values() for sample in samples]


WARMUP = {"steps": 4, "start": 0.3}


@pytest.mark.parametrize("train", [{"samples_per_step": 21}, {"packs_per_step": 10}])
@pytest.mark.parametrize("world", [2, 3, 16])
def test_packs_of_steps_of_any_size_do_not_depend_on_ranks(
    folder: Path, tokenizer: PreTrainedTokenizerFast, train: dict[str, int], world: int
) -> None:
    config = make_config(folder, **train, batch_warmup=WARMUP)
    expected, _ = load_steps(config, tokenizer, 1, 6)
    first_steps, state = load_steps(config, tokenizer, world, 3)
    later_steps, _ = load_steps(config, tokenizer, 2, 3, state)
    assert first_steps + later_steps == expected

    by_samples = "samples_per_step" in train
    sizes = [len(samples_of(packs)) if by_samples else len(packs) for packs in expected]
    assert sizes == ([6, 10, 14, 17, 21, 21] if by_samples else [3, 5, 6, 8, 10, 10])
    indices = [index for packs in expected for index in packs]
    assert len(set(indices)) == len(indices)
    sample_ids = [sample for packs in expected for sample in samples_of(packs)]
    assert len(set(sample_ids)) == len(sample_ids)


def test_samples_of_a_step_are_packed_together(folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    config = make_config(folder, samples_per_step=128)
    ((packs,), _) = load_steps(config, tokenizer, 1, 1)
    tokens = sum(len(ids) for _, ids in packs.values())
    assert len(packs) < 1.35 * tokens / 64


def test_epochs_read_each_sample_once(folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    config = make_config(folder, samples_per_step=16, epochs=1, batch_warmup=WARMUP)
    reader = build_reader(config, tokenizer)
    (lengths,) = measure(reader, 0, 1)
    num_steps = steps_of(reader, [[lengths]])
    steps, _ = load_steps(config, tokenizer, 2, num_steps)
    sample_ids = [sample for packs in steps for sample in samples_of(packs)]
    assert len(sample_ids) == len(set(sample_ids)) == len(lengths.lengths)
    assert samples_of(steps[-1])


@pytest.mark.parametrize(
    ("train", "key"),
    [
        ({"samples_per_step": 8, "packs_per_step": 8}, "train.samples_per_step"),
        ({"samples_per_step": 8, "tokens_per_step": 2048}, "train.(samples|tokens)_per_step"),
        ({"batch_warmup": {"steps": 4, "start": 1.5}}, "train.batch_warmup.start"),
        ({"batch_warmup": {"start": 0.5}}, "train.batch_warmup.steps"),
    ],
)
def test_invalid_step_sizes_raise(folder: Path, train: dict[str, Any], key: str) -> None:
    with pytest.raises(UserError, match=key):
        make_config(folder, **train)


def test_look_ahead_with_samples_per_step_raises(folder: Path) -> None:
    config = make_config(folder).model_dump(mode="json", exclude_unset=True)
    config["data"] |= {"look_ahead": 5}
    config["train"] = {"samples_per_step": 8}
    with pytest.raises(UserError, match=r"data\.look_ahead"):
        load_config(config)


def test_changed_step_size_invalidates_the_checkpoint(folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    _, state = load_steps(make_config(folder, samples_per_step=8), tokenizer, 1, 1)
    for train, key in (
        ({"packs_per_step": 8}, "train.packs_per_step"),
        ({"samples_per_step": 16}, "train.samples_per_step"),
        ({"samples_per_step": 8, "batch_warmup": WARMUP}, "train.batch_warmup"),
    ):
        loader = build_loader(make_config(folder, **train), tokenizer, 0, 1)
        with pytest.raises(UserError, match=key):
            loader.load_state_dict(state)
