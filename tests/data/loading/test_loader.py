"""The loader: the same packs at the same step on any number of ranks and workers, exact resume across all of them."""

import itertools
import json
import random
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow
import pyarrow.parquet
import pytest
import torch
from fixtures import TEXT, make_tokenizer
from processes import Forked, Running
from torch import nn
from transformers import PreTrainedTokenizerFast

from omnizoo.balancing.batch import Batch, collate
from omnizoo.config.errors import UserError
from omnizoo.config.schema import Config
from omnizoo.config.sections.data import DataSection, SourceSettings
from omnizoo.config.sections.evaluation import EvaluationSection
from omnizoo.config.sections.model import ModelSection
from omnizoo.config.sections.train import TrainSection
from omnizoo.data.loading.held_out import held_out_config, read_held_out
from omnizoo.data.loading.lane_stream import LoadedStep
from omnizoo.data.loading.loader import Loader, build_loader, merge_states
from omnizoo.data.loading.reader import build_reader
from omnizoo.data.packing.pack import dummy_pack
from omnizoo.data.rendering.renderer import Renderer
from omnizoo.training.setup import ModelBundle


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """texts.jsonl, chats.parquet, and tiny.jsonl with fewer rows than lanes."""
    path = tmp_path_factory.mktemp("data")
    dice = random.Random(0)
    words = TEXT.split()

    def text(longest: int) -> str:
        return " ".join(dice.choices(words, k=dice.randint(1, longest)))

    write_jsonl(path / "texts.jsonl", [{"text": text(40)} for _ in range(150)])
    write_jsonl(path / "tiny.jsonl", [{"text": text(9)} for _ in range(3)])
    chats = [
        {"messages": [{"role": role, "content": text(9)} for role in ("user", "assistant") * dice.randint(1, 3)]}
        for _ in range(60)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(chats), path / "chats.parquet", row_group_size=20)
    return path


def write_jsonl(path: Path, values: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


Configure = Callable[..., Config]


@pytest.fixture
def configure(folder: Path) -> Configure:
    def build(
        sources: list[SourceSettings] | None = None,
        train: dict[str, Any] | None = None,
        evaluation: dict[str, Any] | None = None,
        **data: Any,
    ) -> Config:
        default = [
            SourceSettings(path=str(folder / "texts.jsonl"), weight=2.0),
            SourceSettings(path=str(folder / "chats.parquet")),
            SourceSettings(path=str(folder / "tiny.jsonl"), weight=0.3),
        ]
        values = {"pack_tokens": 64, "lanes": 8, "look_ahead": 10, "shuffle_rows": 16} | data
        return Config(
            model=ModelSection(config={"model_type": "llama"}),
            data=DataSection(sources=sources or default, **values),
            train=TrainSection(**({"packs_per_step": 24} | (train or {}))),
            evaluation=EvaluationSection(**(evaluation or {})),
        )

    return build


Packs = dict[int, tuple[list[str], list[int], list[int]]]


def packs_of(steps: list[LoadedStep]) -> Packs:
    """Global pack -> its sample ids, token ids and labels (micro-batches of one pack)."""
    batches = [collate([pack]) for step in steps for pack in step.packs]
    return {
        b.packs[0]: (b.sample_ids, b.columns["input_ids"][0].tolist(), b.columns["labels"][0].tolist()) for b in batches
    }


def run_ranks(
    config: Config, tokenizer: PreTrainedTokenizerFast, dp_size: int, steps: int, state: dict[str, Any] | None = None
) -> tuple[list[Packs], dict[str, Any], dict[str, int]]:
    """Packs of each step over all ranks, the merged state after the last, and the summed counters."""
    loaders = [build_loader(config, tokenizer, rank, dp_size) for rank in range(dp_size)]
    if state is not None:
        for loader in loaders:
            loader.load_state_dict(state)
    history: list[Packs] = []
    for _ in range(steps):
        parts = [packs_of([loader.next_step()]) for loader in loaders]
        merged = {index: pack for part in parts for index, pack in part.items()}
        assert len(merged) == sum(len(part) for part in parts) == config.train.packs_per_step
        assert all(index % dp_size == rank for rank, part in enumerate(parts) for index in part)
        history.append(merged)
    counters = [loader.counters() for loader in loaders]
    states = [json.loads(json.dumps(loader.state_dict())) for loader in loaders]
    for loader in loaders:
        loader.close()
    return history, merge_states(states), {key: sum(c[key] for c in counters) for key in counters[0]}


@pytest.mark.parametrize("dp_size", [2, 3, 4, 8])
def test_packs_and_states_are_the_same_for_any_number_of_ranks(
    configure: Configure, tokenizer: PreTrainedTokenizerFast, dp_size: int
) -> None:
    one = run_ranks(configure(), tokenizer, 1, 4)
    many = run_ranks(configure(), tokenizer, dp_size, 4)
    assert many == one
    assert [sorted(step) for step in one[0]] == [list(range(24 * s, 24 * (s + 1))) for s in range(4)]


@pytest.mark.parametrize("dp_size", [1, 2, 3])
def test_packs_and_states_are_the_same_for_any_number_of_workers(
    configure: Configure, tokenizer: PreTrainedTokenizerFast, dp_size: int
) -> None:
    assert run_ranks(configure(workers=2), tokenizer, dp_size, 3) == run_ranks(configure(), tokenizer, dp_size, 3)


@pytest.mark.parametrize(("lanes", "packs_per_step"), [(5, 4), (12, 4), (1, 6)])
def test_lanes_that_do_not_divide_the_batch_keep_packs_and_states(
    configure: Configure, tokenizer: PreTrainedTokenizerFast, lanes: int, packs_per_step: int
) -> None:
    config = configure(lanes=lanes, train={"packs_per_step": packs_per_step})
    assert run_ranks(config, tokenizer, 2, 5) == run_ranks(config, tokenizer, 1, 5)


@pytest.mark.parametrize(
    ("saved_on", "resumed_on"),
    [((1, 0), (1, 0)), ((4, 0), (2, 0)), ((2, 2), (3, 0)), ((3, 0), (1, 2)), ((1, 2), (8, 0))],
)
def test_resumed_run_is_exact_on_other_ranks_and_workers(
    configure: Configure, tokenizer: PreTrainedTokenizerFast, saved_on: tuple[int, int], resumed_on: tuple[int, int]
) -> None:
    stop = random.Random(str((saved_on, resumed_on))).randint(1, 5)
    whole, final_state, counters = run_ranks(configure(), tokenizer, 1, stop + 3)
    first, state, _ = run_ranks(configure(workers=saved_on[1]), tokenizer, saved_on[0], stop)
    assert state["step"] == stop
    second, *end = run_ranks(configure(workers=resumed_on[1]), tokenizer, resumed_on[0], 3, state)
    assert first + second == whole
    assert end == [final_state, counters]


def test_state_is_that_of_the_last_returned_step(configure: Configure, tokenizer: PreTrainedTokenizerFast) -> None:
    loader = build_loader(configure(workers=2, prefetch=3), tokenizer, 0, 1)
    loader.next_step()
    state = loader.state_dict()
    expected = packs_of([loader.next_step(), loader.next_step()])
    loader.load_state_dict(state)  # in the middle of a run, too
    assert packs_of([loader.next_step(), loader.next_step()]) == expected
    loader.close()


def test_each_row_is_loaded_once_per_epoch(
    configure: Configure, tokenizer: PreTrainedTokenizerFast, folder: Path
) -> None:
    config = configure([SourceSettings(path=str(folder / "texts.jsonl"))], lanes=4, overlong="split")
    history, _, _ = run_ranks(config, tokenizer, 2, 12)
    seen = [sample for step in history for ids, _, _ in step.values() for sample in ids]
    assert len(set(seen)) == len(seen)
    rows_of = {epoch: {s.split("/")[2] for s in seen if s.split("/")[1] == str(epoch)} for epoch in range(6)}
    assert sum(len(rows) == 150 for rows in rows_of.values()) >= 2


def check_batch(
    batch: Batch, renderer: Renderer, rows: dict[tuple[int, int], dict[str, Any]], pack_tokens: int
) -> None:
    """Against each row rendered on its own."""
    bounds = batch.cu_seqlens.tolist()
    assert bounds[0] == 0
    assert bounds[-1] == batch.tokens == batch.columns["input_ids"].shape[1]
    assert batch.cu_seqlens.dtype == torch.int32
    assert batch.max_seqlen == max(stop - first for first, stop in itertools.pairwise(bounds))
    for name, (first, stop) in zip(batch.sample_ids, itertools.pairwise(bounds), strict=True):
        source, _, row, part = map(int, name.split("/"))
        rendered = renderer.render(rows[source, row])
        ids = rendered.input_ids[part * pack_tokens : (part + 1) * pack_tokens].tolist()
        targets = rendered.is_target[part * pack_tokens : (part + 1) * pack_tokens].tolist()
        assert batch.columns["input_ids"][0, first:stop].tolist() == ids
        assert batch.columns["position_ids"][0, first:stop].tolist() == list(range(stop - first))
        shifted = [token if target else -100 for token, target in zip(ids[1:], targets[1:], strict=True)]
        assert batch.columns["labels"][0, first:stop].tolist() == [*shifted, -100]


@pytest.mark.parametrize("micro_batch", [1, 2, 5])
def test_samples_of_a_batch_match_separately_rendered_rows(
    configure: Configure, tokenizer: PreTrainedTokenizerFast, folder: Path, micro_batch: int
) -> None:
    texts = [json.loads(line) for line in (folder / "texts.jsonl").read_text().splitlines()]
    chats = pyarrow.parquet.read_table(folder / "chats.parquet").to_pylist()
    tiny = [json.loads(line) for line in (folder / "tiny.jsonl").read_text().splitlines()]
    rows = {(source, i): row for source, values in enumerate((texts, chats, tiny)) for i, row in enumerate(values)}
    loader = build_loader(configure(train={"micro_batch": micro_batch}, overlong="split"), tokenizer, 0, 2)
    packs = loader.next_step().packs
    assert [pack.index for pack in packs] == list(range(0, 24, 2))
    batches = [collate(packs[first : first + micro_batch]) for first in range(0, 12, micro_batch)]
    for batch in batches:
        check_batch(batch, Renderer(tokenizer, append_eos=True), rows, 64)
    assert any(name.split("/")[3] != "0" for batch in batches for name in batch.sample_ids)


def test_building_a_loader_keeps_the_random_state_of_torch(
    configure: Configure, tokenizer: PreTrainedTokenizerFast
) -> None:
    before = torch.get_rng_state()
    loader = build_loader(configure(workers=1), tokenizer, 0, 1)
    loader.next_step()
    loader.close()
    assert torch.equal(before, torch.get_rng_state())


@pytest.fixture
def spoilt(tmp_path: Path) -> Path:
    """16 good rows, and 4 bad ones at lines 3, 8, 13 and 18."""
    good = [json.dumps({"text": f"row number {i}"}) for i in range(16)]
    for line, content in ((3, '{"text": '), (8, '{"other": 1}'), (13, '{"text": ""}'), (18, "7")):
        good.insert(line - 1, content)
    path = tmp_path / "spoilt.jsonl"
    path.write_text("\n".join(good))
    return path


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_row_raises_with_file_and_line(
    configure: Configure, tokenizer: PreTrainedTokenizerFast, spoilt: Path, workers: int
) -> None:
    loader = build_loader(configure([SourceSettings(path=str(spoilt))], lanes=2, workers=workers), tokenizer, 0, 1)
    with pytest.raises(UserError, match=r"spoilt\.jsonl:(3|8|13|18): .*data\.on_bad_row: skip"):
        list(iter(loader.next_step, None))  # until it fails


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("dp_size", [1, 2, 4])
def test_skipped_rows_are_listed_and_counted_once_over_all_ranks(
    configure: Configure, tokenizer: PreTrainedTokenizerFast, spoilt: Path, workers: int, dp_size: int
) -> None:
    data = {"lanes": 2, "on_bad_row": "skip", "look_ahead": 4, "workers": workers}
    config = configure([SourceSettings(path=str(spoilt))], train={"packs_per_step": 4}, **data)
    loaders = [build_loader(config, tokenizer, rank, dp_size) for rank in range(dp_size)]
    listed = [message for _ in range(6) for loader in loaders for message in loader.next_step().bad_rows]
    assert {message.split(": ")[0].rsplit(":")[-1] for message in listed} == {"3", "8", "13", "18"}
    assert sum(loader.counters()["skipped_rows"] for loader in loaders) == len(listed)
    reference = run_ranks(config, tokenizer, 1, 6)[2]
    assert reference["skipped_rows"] == len(listed)
    for loader in loaders:
        loader.close()


def test_missing_source_raises_when_the_loader_is_built(
    configure: Configure, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="does not exist"):
        build_loader(configure([SourceSettings(path=str(tmp_path / "nowhere"))]), tokenizer, 0, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lanes": 4}, r"data\.lanes is 4, but 8 in the checkpoint"),
        ({"pack_tokens": 65}, r"data\.pack_tokens is 65, but 64"),
        ({"look_ahead": 9}, r"data\.look_ahead"),
        ({"overlong": "drop"}, r"data\.overlong is 'drop', but 'split'"),
        ({"shuffle": False}, r"data\.shuffle is False"),
        ({"shuffle_rows": 9}, r"data\.shuffle_rows"),
        ({"append_eos": False}, r"data\.append_eos"),
        ({"train": {"seed": 3}}, r"train\.seed is 3, but 0"),
        ({"train": {"packs_per_step": 12}}, r"train\.packs_per_step is 12, but 24"),
    ],
)
def test_resume_with_changed_data_key_raises_with_the_key(
    configure: Configure, tokenizer: PreTrainedTokenizerFast, changes: dict[str, Any], message: str
) -> None:
    state = build_loader(configure(), tokenizer, 0, 1).state_dict()
    with pytest.raises(UserError, match=message):
        build_loader(configure(**changes), tokenizer, 0, 1).load_state_dict(state)


def test_moved_sources_resume_and_changed_sources_raise(
    configure: Configure,
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def loader(path: Path, **options: Any) -> Loader:
        return build_loader(configure([SourceSettings(path=str(path), **options)]), tokenizer, 0, 1)

    original = loader(folder / "texts.jsonl")
    original.next_step()
    state = original.state_dict()
    expected = packs_of([original.next_step()])
    moved = tmp_path / "moved.jsonl"
    moved.write_bytes((folder / "texts.jsonl").read_bytes())
    resumed = loader(moved)
    resumed.load_state_dict(state)
    assert packs_of([resumed.next_step()]) == expected
    assert "moved from" in caplog.text
    with pytest.raises(UserError, match=r"data\.sources\[0\]\.weight .*2\.0"):
        loader(folder / "texts.jsonl", weight=2.0).load_state_dict(state)
    moved.write_text(moved.read_text() + '{"text": "one more"}\n')
    with pytest.raises(UserError, match=r"data\.sources\[0\]\.rows .* is 151, but 150"):
        loader(moved).load_state_dict(state)
    with pytest.raises(UserError, match=r"the number of data\.sources is 3, but 1"):
        build_loader(configure(), tokenizer, 0, 1).load_state_dict(state)


def test_workers_prefetch_and_bad_row_policy_may_change_on_resume(
    configure: Configure, tokenizer: PreTrainedTokenizerFast
) -> None:
    state = build_loader(configure(), tokenizer, 0, 1).state_dict()
    build_loader(configure(workers=3, prefetch=5, on_bad_row="skip"), tokenizer, 0, 1).load_state_dict(state)


@pytest.mark.parametrize("dp_size", [1, 2, 3])
def test_ranks_divide_the_first_held_out_packs_in_file_order(
    configure: Configure, tokenizer: PreTrainedTokenizerFast, folder: Path, dp_size: int
) -> None:
    held_out = [SourceSettings(path=str(folder / "texts.jsonl"))]
    config = configure(eval_sources=held_out, evaluation={"packs": 5})
    reader = build_reader(held_out_config(config), tokenizer)
    ranks = [read_held_out(reader, rank, dp_size) for rank in range(dp_size)]
    packs = {pack.index: pack for packs in ranks for pack in packs}
    assert sorted(packs) == [0, 1, 2, 3, 4]
    assert sum(len(packs) for packs in ranks) == 5
    assert max(int(s.split("/")[2]) for pack in packs.values() for s in pack.sample_ids) < 40


def test_dummy_pack_is_excluded_from_counts() -> None:
    batch = collate([dummy_pack(-1)])
    assert (batch.tokens, batch.packs, batch.sample_ids) == (0, (), [])
    assert batch.columns["input_ids"].shape == batch.columns["labels"].shape == (1, 2)
    assert batch.columns["pack_of_token"].tolist() == [[-1, -1]]
    assert (batch.columns["labels"] == -100).all()


def test_evaluation_reads_a_small_source_once(
    configure: Configure, tokenizer: PreTrainedTokenizerFast, folder: Path
) -> None:
    config = configure(eval_sources=[SourceSettings(path=str(folder / "tiny.jsonl"))], evaluation={"packs": 50})
    packs = read_held_out(build_reader(held_out_config(config), tokenizer), 0, 1)
    assert sorted(s for pack in packs for s in pack.sample_ids) == ["0/0/0/0", "0/0/1/0", "0/0/2/0"]
    never = ModelBundle(configure(evaluation={"every": 0}), tokenizer, nn.Identity())
    assert never.held_out_reader() is None


def test_held_out_source_without_usable_rows_raises(
    configure: Configure, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    path = write_jsonl(tmp_path / "bad.jsonl", [{"text": ""}])
    config = configure(eval_sources=[SourceSettings(path=str(path))], on_bad_row="skip")
    with pytest.raises(UserError, match=r"^data\.eval_sources: .*no usable row"):
        read_held_out(build_reader(held_out_config(config), tokenizer), 0, 1)


SCRIPT = """
import os
import sys
import time
from transformers import AutoTokenizer
from omnizoo.config.schema import Config
from omnizoo.data.loading.loader import build_loader
loader = build_loader(Config.model_validate_json(sys.argv[1]), AutoTokenizer.from_pretrained(sys.argv[2]), 0, 1)
loader.next_step()
print("ready", flush=True)
while not os.path.exists(sys.argv[3]):
    time.sleep(0.01)
"""


Start = Callable[[Config], Running]


@pytest.fixture
def start(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Iterator[Start]:
    """Run SCRIPT up to its first step. It ends when `tmp_path / "end"` exists.

    Whatever it leaves behind is killed at the end of the test.
    """
    started: list[psutil.Process] = []

    def run(config: Config) -> Running:
        arguments = [config.model_dump_json(), tokenizer.name_or_path, str(tmp_path / "end")]
        running = Forked([sys.executable, "-c", SCRIPT, *arguments], {})
        started.append(running.process)
        assert running.wait_until(lambda: "ready\n" in running.output(), 240)
        started.extend(running.process.children(recursive=True))
        return running

    yield run
    for process in started:
        if process.is_running():
            process.kill()


@pytest.mark.slow
def test_process_with_an_open_loader_ends(configure: Configure, start: Start, tmp_path: Path) -> None:
    running = start(configure(workers=2, prefetch=8))
    (tmp_path / "end").touch()
    assert running.wait(240).code == 0


@pytest.mark.slow
def test_workers_ignore_signals_and_end_with_their_process(configure: Configure, start: Start) -> None:
    # far ahead and with large packs, so that workers have more queued than a pipe takes
    running = start(configure(workers=2, prefetch=50, pack_tokens=4096))
    below = running.process.children(recursive=True)
    workers = [child for child in below if child.ppid() != running.process.pid]
    assert len(workers) == 2
    for child in below:  # the server that they are forked from, too: schedulers send signals to all that there is
        child.send_signal(signal.SIGINT)
        child.send_signal(signal.SIGTERM)
    assert set(psutil.wait_procs(below, timeout=1)[1]) == set(below)  # all alive
    running.process.kill()
    assert psutil.wait_procs(below, timeout=120)[1] == []
