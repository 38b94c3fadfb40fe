"""Tests of `omnizoo new`: its configs train without edits, for usual model folders and data."""

import json
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from model_folders import DATA, MEDIA, ROOT, TEXT, model_folder
from processes import Forked

import omnizoo
from omnizoo.cli.main import main
from omnizoo.config.load import load_config


def composed_folder(folder: Path) -> Path:
    """Export a composed model with an encoder for small images."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    tower = {"model_type": "siglip_vision_model", **sizes, "image_size": 16, "patch_size": 8}
    run = {
        "model": {
            "foundation": {"config": {"model_type": "qwen3"} | TEXT},
            "tokenizer": str(DATA / "tokenizer"),
            "modalities": {"image": {"encoder": {"kind": "vision", "config": tower}}},
        },
        "data": {"sources": [{"path": str(image_rows(folder.parent))}], "pack_tokens": 128},
        "train": {"steps": 1, "packs_per_step": 1},
        "log": {"dir": str(folder.parent / "composing")},
    }
    assert omnizoo.train(run).exit_code == 0
    assert main(["export", str(folder.parent / "composing"), str(folder)]) == 0
    return folder


def image_rows(folder: Path) -> Path:
    """Write rows with an image and a question."""
    shutil.copy(DATA / "image0.png", folder)
    prompt = [{"type": "image", "image": "image0.png"}, {"type": "text", "text": "what is it"}]
    path = folder / "images.jsonl"
    with path.open("w") as file:
        for i in range(40):
            response = {"role": "assistant", "content": f"a square {i}"}
            file.write(json.dumps({"messages": [{"role": "user", "content": prompt}, response]}) + "\n")
    return path


def data_file(kind: str, folder: Path) -> Path:
    """Write 60 rows of a schema."""
    path = folder / {"alpaca": "rows.csv", "chats": "chats.jsonl", "text": "plain.jsonl"}[kind]
    if kind == "alpaca":
        path.write_text("instruction,input,output\n" + "".join(f"add,{i} and 1,{i + 1}\n" for i in range(60)))
    elif kind == "chats":
        turns = [[{"role": "user", "content": f"hi {i}"}, {"role": "assistant", "content": "yes"}] for i in range(60)]
        path.write_text("".join(json.dumps({"messages": turn}) + "\n" for turn in turns))
    else:
        path.write_text("".join(json.dumps({"text": "some words " * (1 + i % 9)}) + "\n" for i in range(60)))
    return path


def trains(model: Path, data: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    """Run `omnizoo new`, train two steps with its config, and return the config."""
    out = folder / "first.yaml"
    assert main(["new", str(model), str(data), "--out", str(out)]) == 0
    assert "omnizoo train" in capsys.readouterr().out
    short = ["--log.dir", str(folder / "run"), "--evaluation.every", "1", "--checkpoint.every", "0"]
    config = load_config(out, short)
    train = config.train.model_copy(update={"epochs": None, "steps": 2})
    assert omnizoo.train(config.model_copy(update={"train": train})).exit_code == 0
    lines = (folder / "run/metrics.jsonl").read_text().splitlines()
    assert len(lines) == 2
    assert "eval/loss" in json.loads(lines[1])
    settings: dict[str, object] = yaml.safe_load(out.read_text())
    return settings


def cases() -> list[object]:
    """Return all pairs of a model and a format. Most of them are long tests."""
    models = ("text", "moe", "qwen3_vl", "qwen3_omni", "composed")
    formats = ("alpaca", "chats", "text")
    short_cases = {("text", "alpaca"), ("moe", "chats")}
    all_cases = [(model, format) for model in models for format in formats]
    return [case if case in short_cases else pytest.param(*case, marks=pytest.mark.long) for case in all_cases]


@pytest.mark.parametrize(("model", "format"), cases())
def test_new_config_trains_without_edits(
    model: str, format: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make = composed_folder if model == "composed" else lambda folder: model_folder(model, folder)
    config = trains(make(tmp_path / "model"), data_file(format, tmp_path), tmp_path, capsys)
    assert config["data"]["sources"][0]["take"] == "all but every 10th"


@pytest.mark.parametrize("model", ["qwen3_vl", pytest.param("qwen3_omni", marks=pytest.mark.long)])
def test_new_config_lists_modalities_of_the_model(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = model_folder(model, tmp_path / "model")
    trains(folder, DATA / MEDIA[model], tmp_path, capsys)
    assert "accepts image" in (tmp_path / "first.yaml").read_text()


def test_sizes_depend_on_model_data_and_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, data, out = model_folder("moe", tmp_path / "model"), data_file("text", tmp_path), tmp_path / "a.yaml"
    assert main(["new", str(model), str(data), "--nproc", "4", "--out", str(out)]) == 0
    config = load_config(out)
    assert config.parallel.ep == 4
    assert config.train.packs_per_step % 4 == 0
    assert config.data.pack_tokens <= 256  # positions of the model
    assert config.train.epochs == 1
    assert "--nproc 4" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (["gone", "rows.csv"], "MODEL: gone "),
        (["org/gone", "rows.csv"], "hf download org/gone"),
        (["model", "gone.jsonl"], "gone.jsonl: the data source does not exist"),
        (["model", "rows.csv", "--nproc", "0"], "--nproc: 0"),
        (["model", "rows.csv", "--out", "here.yaml"], "--out: here.yaml "),
        (["modality", "Thermal Map"], "new modality Thermal Map: "),
    ],
)
def test_invalid_arguments_of_new_print_one_line(
    argv: list[str], error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.yaml").touch()
    if "model" in argv and "gone.jsonl" in argv:
        model_folder("text", tmp_path / "model")
    data_file("alpaca", tmp_path)
    capsys.readouterr()
    assert main(["new", *argv]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert error in err


def test_templates_are_package_data() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    cli = ROOT / "omnizoo/cli"
    files = {file for pattern in patterns["omnizoo"] for file in (ROOT / "omnizoo").glob(pattern)}
    assert {file for file in cli.rglob("*") if file.is_file() and file.suffix not in (".py", ".pyc")} <= files
    assert cli / "templates/config.yaml.jinja" in files


def test_new_modality_passes_its_generated_test(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new", "modality", "thermal_map", "--out", str(tmp_path)]) == 0
    assert main(["new", "modality", "thermal_map", "--out", str(tmp_path)]) == 2
    assert "thermal_map.py already exists" in capsys.readouterr().err
    ruff = [str(Path(sys.executable).with_name("ruff")), "check", "--isolated", "--line-length", "120", str(tmp_path)]
    assert subprocess.run(ruff, check=False).returncode == 0
    test = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(tmp_path)]
    done = Forked(test, {}).wait(240)
    assert "3 passed" in done.stdout, done.stdout + done.stderr
