"""Rows and models passed as Python objects: runs equal those from files, and errors are one line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import own_rows
import pytest
import torch
from fixtures import make_tokenizer
from huggingface_hub import load_torch_model
from own_module import TinyModel
from processes import run_on_ranks, stay_in_this_world
from python_runs import ROWS, plugin_model, settings
from tiny import model_config, read_steps, write_rows
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import omnizoo
from omnizoo.checkpoint.export import export
from omnizoo.cli.main import main
from omnizoo.config.errors import UserError
from omnizoo.config.load import load_config
from omnizoo.config.sections.base import PythonObject
from omnizoo.config.sections.data import SourceSettings
from omnizoo.data.loading.fingerprint import content_of
from omnizoo.data.sources import python_rows
from omnizoo.data.sources.open import open_source
from omnizoo.models.interfaces.attention import packed_inputs
from omnizoo.parallel.layout import Layout
from omnizoo.parallel.process import Process
from omnizoo.verification.prepare import load_trial, save_trial
from omnizoo.verification.trial import run_trial


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder)
    return folder


def hf_model(seed: int = 0) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**model_config("qwen3")))


def moe_model(seed: int = 0) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**model_config("gpt_oss")))


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in read_steps(run)]


def opened(rows: Any, **keys: Any) -> Any:
    return open_source(SourceSettings(given=PythonObject(rows, "data= (some)"), **keys))


KINDS: dict[str, Callable[[], Any]] = {
    "a tuple": lambda: tuple(ROWS),
    "a generator": own_rows.stream,
    "a datasets.Dataset": lambda: datasets.Dataset.from_list(ROWS),
    "a datasets.Dataset with a transform": lambda: datasets.Dataset.from_dict({"n": range(60)}).with_transform(
        lambda batch: {"text": [ROWS[n]["text"] for n in batch["n"]]}
    ),
    "a datasets.IterableDataset": lambda: datasets.Dataset.from_list(ROWS).to_iterable_dataset(),
    "a torch dataset": own_rows.ByNumber,
    "a torch dataset to go through": own_rows.OneByOne,
    "a row source": own_rows.Source,
    "an array": lambda: np.array(ROWS, dtype=object),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_rows_equals_a_list(kind: str) -> None:
    source = opened(KINDS[kind]())
    assert [source.read(row) for row in range(len(source))] == ROWS
    assert (source.extents[0], source.extents[-1]) == (0, 60)
    assert "data= (some)" in source.where(7)
    assert "row 7" in source.where(7)
    again = content_of(opened(KINDS[kind]()))
    assert content_of(source) == again


def test_rows_are_identified_by_content() -> None:
    def digest(**changes: Any) -> str:
        return content_of(opened([{"text": "a", "depth": np.zeros(3000), "meta": {"x": [1, 2]}} | changes]))["content"]

    changed_in_the_middle = np.zeros(3000)
    changed_in_the_middle[1500] = 1  # `repr` elides this element
    different = [
        {},
        {"text": "b"},
        {"depth": changed_in_the_middle},
        {"meta": {"x": [1, 3]}},
        {"depth": torch.zeros(3000)},
        {"more": 0},
    ]
    digests = [digest(**changes) for changes in different]
    assert len(set(digests)) == len(different)
    assert digests == [digest(**changes) for changes in different]


def test_media_of_rows_are_relative_to_working_directory_or_media_dir(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "inner").mkdir()
    for file in ("a.png", "inner/a.png"):
        (tmp_path / file).write_text(file)
    monkeypatch.chdir(tmp_path)
    assert opened(ROWS).find(0, "inner/a.png").read_text() == "inner/a.png"
    assert opened(ROWS, media_dir="inner").find(0, "a.png").read_text() == "inner/a.png"
    with pytest.raises(Exception, match="media_outside"):
        opened(ROWS, media_dir="inner").find(0, "../a.png")


class NoLength(own_rows.Source):
    def __len__(self) -> int:
        return len(self.missing)


BAD_ROWS: dict[str, tuple[Any, str]] = {
    "an empty list": ([], "data= (list): the source has no rows"),
    "a path": ("rows.jsonl", "data= (str): a str "),
    "a mapping": ({"text": ["a"]}, "data= (dict): a dict "),
    "splits": (
        datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}),
        "data= (DatasetDict): a DatasetDict ",
    ),
    "a class": (own_rows.ByNumber, "data= (type): the class ByNumber "),
    "a number": (3, "data= (int): a int "),
    "no length": (NoLength(), "data= (NoLength): counting the rows failed: AttributeError"),
    "no dicts": (["one", "two"], "data= (list) row 0: the row is str"),
    "numbered fields": ([{1: "a"}], "data= (list) row 0: the field name 1 "),
    "an unread field": ([{"text": "a", "label": 3}], "data= (list) row 0: `label` is not used"),
    "iterated and failing": ((1 / 0 for _ in ROWS), "reading the rows failed: ZeroDivisionError"),
    "endless": (own_rows.endless(), "more than 1,000 rows"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_invalid_rows_print_one_line(
    name: str, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(python_rows, "MAX_ROWS_IN_MEMORY", 1000)
    rows, message = BAD_ROWS[name]
    config = settings(tokenizer, tmp_path, data={"lanes": 1, "shuffle": False})
    with pytest.raises(UserError) as caught:
        omnizoo.train(config, model=plugin_model(), data=rows)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_reused_generator_and_missing_objects_raise(tokenizer: Path, tmp_path: Path) -> None:
    rows = own_rows.stream()
    config = settings(tokenizer, tmp_path, train={"steps": 2, "packs_per_step": 1}, evaluation={"every": 1})
    with pytest.raises(UserError, match=r"eval_data= \(generator\): .*no rows"):
        omnizoo.train(config, model=plugin_model(), data=rows, eval_data=rows)
    assert omnizoo.train(settings(tokenizer, tmp_path / "run"), model=plugin_model(), data=ROWS).exit_code == 0
    saved = tmp_path / "run" / "config.yaml"
    with pytest.raises(UserError, match="TinyModel"):
        omnizoo.train(saved, data=ROWS)
    with pytest.raises(UserError, match=r"data= \(list\) was a Python object"):
        omnizoo.train(saved, model=plugin_model())
    assert omnizoo.train(saved, model=plugin_model(), data=ROWS).exit_code == 0  # nothing to do


BAD_MODELS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a class": ({"model": TinyModel}, {}, "model=: the value is the class TinyModel"),
    "a mapping": ({"model": {}}, {}, "model=: the value is a dict"),
    "no head": ({"model": hf_model().model}, {}, "model=: Qwen3Model has no head"),
    "another signature": (
        {"model": own_rows.Model()},
        {},
        "model=: Model: forward(tokens)",
    ),
    "no logits": (
        {"model": own_rows.NoLogits()},
        {},
        "model=: NoLogits: forward",
    ),
    "on meta": ({"model": TinyModel(512, 32, 4, 2).to("meta")}, {}, "model=: tokens.weight"),
    "a path as well": ({}, {"model": {"path": "x"}}, "config: model.path"),
    "a module as well": ({}, {"model": {"module": "a:b", "config": {}}}, "config: model.module"),
    "sources as well": (
        {},
        {"data": {"sources": [{"path": "x"}]}},
        "config: data.sources",
    ),
    "no tokenizer": (
        {},
        {"model": {"tokenizer": None}},
        "model.tokenizer: not set",
    ),
    "some tokenizer": ({"tokenizer": str}, {"model": {"tokenizer": None}}, "tokenizer=: the value has type type"),
}


@pytest.mark.parametrize("name", BAD_MODELS)
def test_invalid_models_raise_one_line(name: str, tokenizer: Path, tmp_path: Path) -> None:
    objects, sections, message = BAD_MODELS[name]
    with pytest.raises(UserError) as caught:
        omnizoo.train(settings(tokenizer, tmp_path, **sections), **{"model": plugin_model(), "data": ROWS} | objects)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_config_must_be_a_mapping_path_or_config(tokenizer: Path, tmp_path: Path) -> None:
    mapping = settings(tokenizer, tmp_path, model={"config": model_config("qwen3")}, data={"sources": [{"path": "x"}]})
    before = json.dumps(mapping)
    config = load_config(mapping, ["--train.lr", "1e-2"])
    assert config.train.lr == 1e-2
    assert json.dumps(mapping) == before
    assert load_config(config) == config
    with pytest.raises(UserError, match=r"^config\b.*\blist\b"):
        load_config([])
    with pytest.raises(UserError, match=r"^config: train\.stepz .*train\.steps\b"):
        load_config(mapping | {"train": {"stepz": 3}})


def test_run_on_python_rows_equals_run_on_file(tokenizer: Path, tmp_path: Path) -> None:
    file = write_rows(tmp_path / "rows.jsonl", ROWS)
    every = {"every": 2}
    config = settings(tokenizer, tmp_path / "file", model={"config": model_config("qwen3")}, evaluation=every)
    on_file = {"sources": [{"path": str(file)}], "eval_sources": [{"path": str(file)}]}
    assert omnizoo.train(config | {"data": config["data"] | on_file}).exit_code == 0

    def run(rows: Any, steps: int, workers: int) -> int:
        sections = settings(
            tokenizer, tmp_path / "rows", model=config["model"], evaluation=every, train={"steps": steps}
        )
        sections["data"] |= {"workers": workers}
        return omnizoo.train(sections, data=rows, eval_data=tuple(ROWS)).exit_code

    assert run(ROWS, 2, workers=1) == 0
    with pytest.raises(UserError, match=r"data= \(list\)\) has changed since the checkpoint: its rows differ"):
        run([*ROWS[:-1], {"text": "the square of 59 is 3482"}], 4, workers=0)
    assert run(ROWS, 4, workers=0) == 0
    from_file = read_steps(tmp_path / "file")[-1]
    from_rows = read_steps(tmp_path / "rows")[-1]
    assert from_file["step"] == from_rows["step"] == 4
    assert from_file["loss"] == from_rows["loss"]
    assert from_file["eval/loss"] == from_rows["eval/loss"]


def test_rows_plugin_is_trained_and_inspected(
    tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = settings(tokenizer, tmp_path / "run", model={"config": model_config("qwen3")})
    sources = [
        {"rows": "own_rows:make", "options": {"count": 20, "word": "power"}},
        {"rows": "own_rows:Source", "options": {"count": 61}, "weight": 2.0},
    ]
    config["data"] |= {"sources": sources, "on_bad_row": "skip"}
    file = tmp_path / "config.yaml"
    file.write_text(json.dumps(config))
    assert main(["train", str(file)]) == 0
    assert len(losses(tmp_path / "run")) == 4
    assert main(["data", "inspect", str(file)]) == 0
    output = capsys.readouterr().out
    assert "own_rows:make" in output
    assert "own_rows:Source: Source row 13: " in output


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"rows": "own_rows:made"}, "own_rows has no 'made'"),
        ({"rows": "own_rows:make", "options": {"words": 1}}, "own_rows:make(count, word)"),
        ({"rows": "own_rows:fails"}, "RuntimeError: no disk"),
        ({"rows": "own_rows:NoRead"}, "TypeError: Can't instantiate abstract class NoRead"),
        ({"rows": "own_rows:ROWS"}, "own_rows has no 'ROWS'"),
        ({"rows": "own_rows"}, "data.sources.0.rows: 'own_rows'"),
        ({"rows": "own_rows:make", "path": "x"}, "data.sources.0: path and rows are both set"),
        ({"path": "x", "options": {"a": 1}}, "data.sources.0: options"),
        ({}, "data.sources.0: path and rows are both missing"),
    ],
)
def test_invalid_rows_plugin_raises_one_line(
    source: dict[str, Any], message: str, tokenizer: Path, tmp_path: Path
) -> None:
    config = settings(tokenizer, tmp_path, model={"config": model_config("qwen3")}, data={"sources": [source]})
    with pytest.raises(UserError) as caught:
        omnizoo.train(config)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_model_object_trains_like_its_folder(tokenizer: Path, tmp_path: Path) -> None:
    """The tokenizer may be an object as well. Training does not change the objects."""
    model = hf_model()
    model.save_pretrained(tmp_path / "model")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    attention = model.config._attn_implementation
    config = settings(tokenizer, tmp_path / "folder", model={"path": str(tmp_path / "model")})
    assert omnizoo.train(config, data=ROWS).exit_code == 0
    config = settings(tokenizer, tmp_path / "object", model={"tokenizer": None})
    assert (
        omnizoo.train(config, model=model, tokenizer=AutoTokenizer.from_pretrained(tokenizer), data=ROWS).exit_code == 0
    )
    assert losses(tmp_path / "object") == losses(tmp_path / "folder")
    assert model.config._attn_implementation == attention
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    for name in ("object", "folder"):
        export(tmp_path / name, tmp_path / f"{name}_out")
    trained = [AutoModelForCausalLM.from_pretrained(tmp_path / f"{name}_out") for name in ("object", "folder")]
    weights = [model.state_dict() for model in trained]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())


def test_module_object_keeps_weights_resumes_and_is_exported(tokenizer: Path, tmp_path: Path) -> None:
    def start(run: str, steps: int) -> int:
        model = plugin_model()
        model.positions.requires_grad_(False)
        return omnizoo.train(
            settings(tokenizer, tmp_path / run, train={"steps": steps}), model=model, data=ROWS
        ).exit_code

    assert start("uninterrupted", 4) == 0
    assert start("resumed", 2) == 0
    assert start("resumed", 4) == 0
    assert losses(tmp_path / "resumed")[2:] == losses(tmp_path / "uninterrupted")[2:]
    export(tmp_path / "resumed", tmp_path / "out")
    exported = plugin_model(seed=1)
    initial = plugin_model()
    load_torch_model(exported, tmp_path / "out")
    assert torch.equal(exported.positions.weight, initial.positions.weight)  # frozen
    assert not torch.equal(exported.head.weight, initial.head.weight)
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out")) == len(AutoTokenizer.from_pretrained(tokenizer))
    with (
        torch.no_grad()
    ):  # the loss of the exported model, computed with plain torch, is lower than that of the initial weights
        ids = torch.tensor([AutoTokenizer.from_pretrained(tokenizer)(ROWS[0]["text"]).input_ids])
        count = ids.shape[1]
        keep = {"position_ids": torch.arange(count)[None], "logits_to_keep": torch.arange(count - 1)}
        keep |= packed_inputs(torch.tensor([0, count], dtype=torch.int32), count)
        after = torch.nn.functional.cross_entropy(exported(ids, **keep).logits[0], ids[0, 1:])
        before = torch.nn.functional.cross_entropy(initial(ids, **keep).logits[0], ids[0, 1:])
    assert after < before


LAYOUTS = [Layout(dp_shard=4), Layout(dp_replicate=2, dp_shard=2), Layout(ulysses=2, ring=2)]
MODELS = {
    "own": (plugin_model, LAYOUTS),
    "published": (hf_model, LAYOUTS),
    "of experts": (moe_model, [Layout(dp_shard=2, ulysses=2, ep=2)]),
}


def try_models(process: Process, tokenizer: Path, folder: Path) -> None:
    """Run each model on each layout. Every rank builds its own objects: equal rows, weights from different seeds."""
    for name, (make, layouts) in MODELS.items():
        for layout in layouts if process.world_size > 1 else [Layout()]:
            sections = settings(tokenizer, folder, train={"steps": 3})
            config = load_config(sections, objects={"model": make(process.rank), "data": list(ROWS)})
            trial = run_trial(config, layout, process)
            if process.rank == 0:
                save_trial(trial, folder / name / (str(layout) if process.world_size > 1 else "one"))


def raise_on_all_ranks(process: Process, tokenizer: Path, folder: Path) -> None:
    """Check that every rank raises the error of rank 1."""
    stay_in_this_world()
    for message, objects in {
        r"\bdata= .* rank 1\b": {
            "model": plugin_model(),
            "data": ROWS[:: -1 if process.rank else 1],
        },
        r"^model=: rank 1\b": {
            "model": TinyModel(512, 32, 4, 2 + process.rank),
            "data": ROWS,
        },
        r"eval_data= .* rank 1\b": {
            "model": plugin_model(),
            "data": ROWS,
            "eval_data": ROWS[process.rank :],
        },
        "no rows": {"model": plugin_model(), "data": ROWS if process.rank == 0 else []},
    }.items():
        config = settings(tokenizer, folder / "refused", evaluation={"every": 2 * ("eval_data" in objects)})
        with pytest.raises(UserError, match=message):
            omnizoo.train(config, **objects)
    assert (
        omnizoo.train(settings(tokenizer, folder / "two"), model=plugin_model(process.rank), data=ROWS).exit_code == 0
    )


@pytest.mark.slow
def test_objects_on_four_ranks_match_one_process(tokenizer: Path, tmp_path: Path) -> None:
    for nproc in (1, 4):
        done = run_on_ranks(try_models, nproc, tokenizer, tmp_path)
        assert done.code == 0, done.stdout + done.stderr
    for name, (_, layouts) in MODELS.items():
        reference = load_trial(tmp_path / name / "one")
        for layout in layouts:
            trial = load_trial(tmp_path / name / str(layout))
            assert np.allclose(trial.losses, reference.losses, rtol=1e-6, atol=0)
            assert trial.gradients.keys() == reference.gradients.keys()
            for key, gradient in reference.gradients.items():
                assert (trial.gradients[key] - gradient).norm() <= 1e-5 * gradient.norm(), (name, str(layout), key)


@pytest.mark.slow
def test_objects_that_differ_between_ranks_raise_on_all_ranks(tokenizer: Path, tmp_path: Path) -> None:
    done = run_on_ranks(raise_on_all_ranks, 2, tokenizer, tmp_path)
    assert done.code == 0, done.stdout + done.stderr
    assert omnizoo.train(settings(tokenizer, tmp_path / "one"), model=plugin_model(), data=ROWS).exit_code == 0
    assert np.allclose(losses(tmp_path / "two"), losses(tmp_path / "one"), rtol=1e-6, atol=0)
