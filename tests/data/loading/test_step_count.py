"""train.epochs: every row is read exactly so often, in as many steps as were counted before, on any number of ranks."""

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from fixtures import TEXT, make_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from number_rows import NumberRenderer, data, numbers, reader_of
from processes import run_omnizoo
from tiny import read_steps, write_config
from transformers import PreTrainedTokenizerFast

from omnizoo.config.errors import UserError
from omnizoo.config.load import load_config
from omnizoo.config.schema import Config
from omnizoo.config.sections.train import TrainSection
from omnizoo.data.loading.lanes import Lane
from omnizoo.data.loading.loader import Loader, build_loader, merge_states
from omnizoo.data.loading.reader import build_reader
from omnizoo.data.loading.step_count import measure, steps_of
from omnizoo.training.loop import train
from omnizoo.training.optimizers.schedule import learning_rate


@given(st.lists(st.integers(1, 60), min_size=1, max_size=3), st.integers(1, 6), st.sampled_from([1, 2, 3, 5]))
@settings(max_examples=60, deadline=None)
def test_ended_lanes_have_read_each_row_once_per_epoch(sizes: list[int], lanes: int, epochs: int) -> None:
    sources = [numbers(size) for size in sizes]
    options = data([1.0] * len(sizes), pack_tokens=16, lanes=lanes, look_ahead=5, shuffle_rows=7)
    seen: Counter[tuple[int, int]] = Counter()
    for number in range(lanes):
        lane = Lane(reader_of(options, sources, NumberRenderer(), 3), number, epochs=epochs, by_rows=True)
        seen.update(sample.id[::2][:2] for pack in iter(lane.next_pack, None) if pack for sample in pack)
        assert lane.next_pack() is None
    assert seen == Counter({(i, row): epochs for i, size in enumerate(sizes) for row in range(size)})


@pytest.mark.parametrize("epochs", [0.5, 1.25, 2.75])
def test_fraction_of_an_epoch_reads_that_fraction_of_rows(epochs: float) -> None:
    options = data([1.0], pack_tokens=16, lanes=4, look_ahead=5)
    reader = reader_of(options, [numbers(400)], NumberRenderer(), 3)
    lanes = [Lane(reader, n, epochs=epochs, by_rows=True) for n in range(4)]
    packs = [pack for lane in lanes for pack in iter(lane.next_pack, None) if pack]
    seen = Counter(sample.id.row for pack in packs for sample in pack)
    assert abs(sum(seen.values()) - 400 * epochs) <= 4, "to a row per lane"
    assert max(seen.values()) - min(seen.get(row, 0) for row in range(400)) == 1


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Texts, some longer than a pack, and fewer chats than lanes."""
    dice = random.Random(1)
    words = TEXT.split()

    def say(most: int) -> str:
        return " ".join(dice.choices(words, k=dice.randint(1, most)))

    rows: dict[str, list[dict[str, Any]]] = {
        "texts": [{"text": say(60)} for _ in range(70)],
        "few": [{"query": say(5), "response": say(5)} for _ in range(3)],
    }
    for name, own in rows.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in own))
    return load_config(
        {
            "model": {"config": {"model_type": "llama"}},
            "data": {
                "sources": [{"path": str(tmp_path / f"{name}.jsonl")} for name in rows],
                "pack_tokens": 64,
                "lanes": 4,
                "look_ahead": 6,
            },
            "train": {"epochs": 3, "packs_per_step": 6},
        }
    )


def run(loaders: list[Loader], steps: int) -> list[list[str]]:
    """Names of the samples of each step, over all ranks."""
    done = []
    for _ in range(steps):
        packs = [pack for loader in loaders for pack in loader.next_step().packs]
        assert len(packs) == 6
        done.append([name for pack in sorted(packs, key=lambda pack: pack.index) for name in pack.sample_ids])
    return done


@pytest.mark.parametrize("world", [1, 2, 3])
def test_run_has_the_counted_steps_on_any_number_of_ranks(
    config: Config, tokenizer: PreTrainedTokenizerFast, world: int
) -> None:
    reader = build_reader(config, tokenizer)
    parts = [measure(reader, rank, world) for rank in range(world)]
    steps = steps_of(reader, list(zip(*parts, strict=True)))
    done = run([build_loader(config, tokenizer, rank, world) for rank in range(world)], steps + 1)
    assert done[-2] != []
    assert done[-1] == [], "nothing is left after the last step"
    seen = Counter(tuple(name.split("/")[::2]) for step in done for name in step if name.endswith("/0"))
    assert seen == Counter({(str(i), str(row)): 3 for i, count in enumerate((70, 3)) for row in range(count)})
    alone = run([build_loader(config, tokenizer, 0, 1)], steps)
    assert done[:-1] == alone


def test_run_by_epochs_resumes_on_other_ranks(config: Config, tokenizer: PreTrainedTokenizerFast) -> None:
    reader = build_reader(config, tokenizer)
    steps = steps_of(reader, [[part] for part in measure(reader, 0, 1)])
    whole = run([build_loader(config, tokenizer, 0, 1)], steps)
    for stop in (2, steps - 1):
        before = [build_loader(config, tokenizer, rank, 2) for rank in range(2)]
        first = run(before, stop)
        state = json.loads(json.dumps(merge_states([loader.state_dict() for loader in before])))
        after = [build_loader(config, tokenizer, rank, 3) for rank in range(3)]
        for loader in after:
            loader.load_state_dict(state)
        assert first + run(after, steps - stop) == whole
    changed = config.model_copy(update={"train": config.train.model_copy(update={"epochs": 4.0})})
    with pytest.raises(UserError, match=r"train\.epochs is 4\.0, but 3\.0 in the checkpoint"):
        build_loader(changed, tokenizer, 0, 1).load_state_dict(state)


def test_bad_rows_are_counted_as_empty_or_raise(config: Config, tokenizer: PreTrainedTokenizerFast) -> None:
    path = Path(str(config.data.sources[1].path))
    path.write_text(path.read_text() + '{"query": 3, "response": "so"}\n')
    with pytest.raises(UserError, match=r"few.jsonl:4: `query` is int"):
        measure(build_reader(config, tokenizer), 0, 1)
    skipping = config.model_copy(update={"data": config.data.model_copy(update={"on_bad_row": "skip"})})
    reader = build_reader(skipping, tokenizer)
    _, few = measure(reader, 0, 1)
    assert [len(few.of_row(row)) for row in range(4)] == [1, 1, 1, 0]
    assert steps_of(reader, [[part] for part in measure(reader, 0, 1)]) > 0


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A config of two epochs of 80 rows."""
    path = write_config(tmp_path)
    for name, count in (("texts", 60), ("chats", 20)):
        file = tmp_path / f"{name}.jsonl"
        file.write_text("".join(file.read_text().splitlines(keepends=True)[:count]))
    values = load_config(path).model_dump()
    sources = [{"path": source["path"]} for source in values["data"]["sources"]]
    values["data"] |= {"sources": sources, "lanes": 2, "workers": 0}
    values["train"] = {"epochs": 2, "tokens_per_step": 384, "warmup_ratio": 0.25, "lr": 3e-3}
    path.write_text(yaml.safe_dump(values))
    return path


def test_run_by_epochs_trains_all_rows_and_is_finished(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(small).exit_code == 0
    steps = read_steps(small.parent / "run")
    assert steps[-1]["epoch"] == 2
    assert steps[-1]["step"] == len(steps)
    whole = TrainSection(steps=len(steps), warmup_ratio=0.25, lr=3e-3)
    assert [step["lr"] for step in steps] == [learning_rate(whole, n + 1) for n in range(len(steps))]
    said = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for fact in (f"{len(steps)} steps: 2 epochs", "60 rows, read as text", "20 rows, read as messages", "100.0%"):
        assert fact in said
    assert "4 packs of up to 96 tokens, 384 in total" in said
    assert train(str(small.parent / "run" / "config.yaml")).exit_code == 0
    assert "nothing to do" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.long
def test_two_ranks_count_and_train_like_one_process(small: Path) -> None:
    for ranks in (1, 2):
        result = run_omnizoo(["train", small, "--nproc", ranks, "--log.dir", small.parent / f"run{ranks}"])
        assert result.code == 0, result.stderr
    one, two = (read_steps(small.parent / f"run{ranks}") for ranks in (1, 2))
    assert [step["tokens"] for step in one] == [step["tokens"] for step in two]
    assert [step["loss"] for step in one] == pytest.approx([step["loss"] for step in two], rel=1e-5)


def test_warmup_ratio_is_rounded_up_to_steps() -> None:
    train = TrainSection(steps=25, warmup_ratio=0.1)
    assert train.warmup == 3
    same = TrainSection(steps=25, warmup_steps=3)
    assert [learning_rate(train, step) for step in range(1, 26)] == [learning_rate(same, s) for s in range(1, 26)]
