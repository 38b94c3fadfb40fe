"""`omnizoo convert`: configs of other trainers become valid configs, and no key is dropped silently."""

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from foreign_configs import CONFIGS
from model_folders import model_folder
from tiny import write_rows

from omnizoo.cli.convert.conversion import convert
from omnizoo.cli.convert.render import render
from omnizoo.cli.convert.source_file import Source, read_source
from omnizoo.cli.main import main
from omnizoo.config import reference
from omnizoo.config.errors import UserError
from omnizoo.config.foreign.lookup import TRAINERS, flatten, hint_for
from omnizoo.config.load import load_config

CASES = [pytest.param(trainer, name, id=f"{trainer}-{name}") for trainer, texts in CONFIGS.items() for name in texts]
FIRST = {(trainer, next(iter(texts))) for trainer, texts in CONFIGS.items()}
TRAINED = [
    pytest.param(trainer, name, id=f"{trainer}-{name}", marks=[] if (trainer, name) in FIRST else pytest.mark.long)
    for trainer, texts in CONFIGS.items()
    for name in texts
]


@cache
def chats(count: int = 40) -> list[dict[str, Any]]:
    turns = [("user", "what is {}?"), ("assistant", "it is the number {}")]
    return [{"messages": [{"role": role, "content": text.format(i)} for role, text in turns]} for i in range(count)]


def pairs(count: int = 40) -> list[dict[str, Any]]:
    return [{"prompt": f"what is {i}?", "chosen": f"it is {i}", "rejected": "no idea"} for i in range(count)]


def write_source(folder: Path, trainer: str, name: str, model: str = "models/small") -> Path:
    rows = write_rows(folder / "rows.jsonl", chats())
    if name == "pretrain.yaml" and trainer in ("axolotl", "veomni"):
        rows = write_rows(folder / "texts.jsonl", [{"text": f"this is row {i}"} for i in range(40)])
    preferences = write_rows(folder / "pairs.jsonl", pairs())
    text = CONFIGS[trainer][name]
    for placeholder, path in {"MODEL": model, "ROWS": rows, "PAIRS": preferences, "OUT": folder / "run"}.items():
        text = re.sub(rf"\b{placeholder}\b", str(path), text)
    file = folder / name
    file.write_text(text)
    return file


def leaves(source: Source) -> set[str]:
    return {key for key, _ in flatten(source.fields)}


def test_twelve_configs_of_each_trainer_are_tested() -> None:
    assert set(CONFIGS) == set(TRAINERS)
    assert {len(texts) for texts in CONFIGS.values()} == {12}


@pytest.mark.parametrize(("trainer", "name"), CASES)
def test_converted_config_is_valid_and_contains_every_key(trainer: str, name: str, tmp_path: Path) -> None:
    source = read_source(write_source(tmp_path, trainer, name), None)
    assert source.trainer.name == trainer, "detected"
    converted = convert(source)
    text = render(converted)
    (tmp_path / "converted.yaml").write_text(text)
    config = load_config(tmp_path / "converted.yaml", [])
    assert config.model.path == "models/small"
    assert config.train.steps == 3
    assert config.data.pack_tokens == 96
    assert config.data.sources[0].path.endswith(".jsonl")  # type: ignore[union-attr]
    for key in leaves(source):
        assert re.search(rf"(?<![\w.]){re.escape(key)}(?!\w)", text), f"{key} is dropped silently"
    for key in ("no_such_key", "no_such_option"):
        if key in source.file.read_text():
            assert re.search(rf"# [\w.]*{key}: 3 -> not a known key of {source.trainer.title}", text)
            assert len([line for line in converted.notices if key in line]) == 1


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(model_folder("dense", tmp_path_factory.mktemp("model") / "small"))


@pytest.mark.parametrize(("trainer", "name"), TRAINED)
def test_converted_config_trains(
    trainer: str, name: str, model: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = write_source(tmp_path, trainer, name, model)
    out = tmp_path / "converted.yaml"
    assert main(["convert", str(file), "--out", str(out)]) == 0
    code = main(["train", str(out), "--data.workers", "0", "--train.precision", "fp32"])
    error = capfd.readouterr().err
    if code != 0:  # one line that names what is missing
        message = error.strip().splitlines()[-1]
        assert re.search(r"model\.modalities|optimizer\.kind|data\.|train\.", message), message
        assert (trainer, name) not in FIRST, message
        return
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) >= 3


@pytest.mark.parametrize(
    ("trainer", "name"),
    [
        ("llama-factory", "lora.yaml"),
        ("ms-swift", "args.yaml"),
        ("trl", "sft.yaml"),
        ("axolotl", "full.yaml"),
        ("veomni", "nested.yaml"),
        ("veomni", "flat.yaml"),
    ],
)
def test_train_names_convert_for_configs_of_other_trainers(
    trainer: str, name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = write_source(tmp_path, trainer, name)
    assert main(["train", str(file)]) == 2
    error = capfd.readouterr().err
    assert error.count("\n") == 1
    assert f"omnizoo convert {file}" in error
    assert TRAINERS[trainer].title in error


def test_mistakes_in_our_config_are_not_taken_for_another_trainer(tmp_path: Path) -> None:
    path = tmp_path / "ours.yaml"
    path.write_text("model: {path: a}\ndata: {sources: [{path: b}]}\ntrain: {learning_rate: 1e-4, max_steps: 2}\n")
    with pytest.raises(UserError, match=r"train\.learning_rate is not a key; use train\.lr"):
        load_config(path, [])


def test_hints_look_into_nested_keys(tmp_path: Path) -> None:
    path = tmp_path / "ours.yaml"
    path.write_text("model: {path: a, lora_config: {rank: 4, alpha: 8}}\ndata: {sources: [{path: b}]}\n")
    with pytest.raises(
        UserError, match=r"model\.lora_config .*rank: use model\.adapter\.rank; .*model\.adapter\.alpha"
    ):
        load_config(path, [])


@pytest.mark.parametrize("trainer", TRAINERS)
def test_every_key_of_the_tables_has_a_valid_hint(trainer: str) -> None:
    keys = {key.key for key in reference.all_keys()} | set(reference.sections())
    sections = "|".join(reference.sections())
    names = []
    for rule in TRAINERS[trainer].rules:
        names += rule.names
        for key in re.findall(rf"\b(?:{sections})\.[a-zA-Z_.0-9]+", rule.hint):
            known = reference.schema_key(key.rstrip(".:").replace(".NAME.", ".image."))
            assert known in keys or "options." in known or known.endswith("options"), f"{rule.names}: {key}"
        assert rule.hint
        assert rule.convert == "" or rule.status == "copied"
    assert len(names) >= 58
    for name in names:
        if "*" not in name:
            assert hint_for(name), name


@pytest.mark.parametrize(
    ("text", "trainer", "expected"),
    [
        ("- 1\n", None, "contains no config"),
        ("a: 1\nb: 2\n", None, "--from"),
        ("#!/bin/bash\necho hi\n", None, "no command of a known trainer"),
        ("#!/bin/bash\nswift sft --model 'a\n", None, "shell script"),
        ("model: [1\n", None, "x.yaml"),
    ],
)
def test_file_that_cannot_be_converted_raises_one_line(
    text: str, trainer: str | None, expected: str, tmp_path: Path
) -> None:
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(UserError, match=expected) as caught:
        read_source(tmp_path / "x.yaml", trainer)
    assert "\n" not in str(caught.value)


def test_missing_model_and_data_are_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.yaml").write_text("learning_rate: 1e-4\ncutoff_len: 512\n")
    assert main(["convert", str(tmp_path / "x.yaml"), "--from", "llama-factory"]) == 0
    out, error = capfd.readouterr()
    assert "path: CHOOSE # required" in out
    assert "no model; set model.path" in error
    assert "no data; set data.sources" in error


def test_invalid_value_becomes_a_comment(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("model_name_or_path: m\ndataset: a.jsonl\nlearning_rate: -1\ncutoff_len: long\n")
    converted = convert(read_source(tmp_path / "x.yaml", "llama-factory"))
    assert {key for key, _, _ in converted.unconverted} >= {"learning_rate", "cutoff_len"}


def test_existing_output_is_not_overwritten(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = write_source(tmp_path, "trl", "sft.yaml")
    assert main(["convert", str(file), "--out", str(file)]) == 2
    assert "already exists" in capfd.readouterr().err


def test_names_in_dataset_info_become_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data/dataset_info.json").write_text(
        '{"mine": {"file_name": "mine.json", "columns": {"prompt": "ask", "response": "answer"}}}'
    )
    (tmp_path / "x.yaml").write_text("model_name_or_path: m\nstage: sft\ntemplate: qwen\ndataset: mine, other\n")
    sources = convert(read_source(tmp_path / "x.yaml", None)).fields["data"]["sources"]
    assert sources[0] == {
        "path": "data/mine.json",
        "columns": {"instruction": "ask", "output": "answer"},
        "format": "alpaca",
    }
    assert sources[1] == {"path": "other"}
