"""The plugins of docs/how-to/plugins.md: each has a small example, and a test trains and verifies each example."""

import json
import re
import sqlite3
import sys
from pathlib import Path

import pytest
import torch
from processes import Forked, run_omnizoo
from safetensors.torch import load_file
from tiny import read_steps

import omnizoo
from omnizoo.cli.main import main
from omnizoo.config import reference
from omnizoo.config.load import load_config
from omnizoo.models.recipe import read_facts
from omnizoo.training.setup import build_bundle

ROOT = Path(__file__).parents[2]
TEXT = str(ROOT / "examples/text_tiny.yaml")
MODULE = ["--model.module", "gpt:GPT", "--model.config", "{vocabulary: 512, width: 32, heads: 4, layers: 2}"]
RECIPE = ["--model.recipe", "fine_blocks:RECIPE"]
SMALL = ["--train.steps", "8", "--evaluation.every", "0", "--data.pack_tokens", "64", "--train.warmup_steps", "1"]
PLUGINS = {
    *("module", "recipe", "encoder", "decoder", "row source", "loss", "metric", "schedule", "optimizer"),
    *("callback", "logger"),
}


@pytest.fixture(autouse=True)
def plugins_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for name in ("own_module", "fine_blocks", "sqlite_rows", "restarts", "time_budget"):
        monkeypatch.syspath_prepend(str(ROOT / "examples" / name))
        monkeypatch.setenv("PYTHONPATH", str(ROOT / "examples" / name), prepend=":")


@pytest.fixture
def rows(tmp_path: Path) -> list[str]:
    """Return the arguments that train on a SQLite table."""
    with sqlite3.connect(tmp_path / "rows.db") as connection:
        connection.execute("CREATE TABLE texts (body)")
        connection.executemany("INSERT INTO texts VALUES (?)", [(f"the square of {i} is {i * i}",) for i in range(200)])
    options = {"path": str(tmp_path / "rows.db"), "table": "texts", "column": "body"}
    return ["--data.sources", json.dumps([{"rows": "sqlite_rows:SqliteRows", "options": options}])]


def plugin_table() -> list[list[str]]:
    lines = (ROOT / "docs/how-to/plugins.md").read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("| plugin |"))
    cells = []
    for line in lines[first + 2 :]:
        if not line.startswith("|"):
            break
        cells.append([cell.strip() for cell in line.strip("|").split("|")])
    return cells


def test_plugin_table_lists_keys_contracts_and_tested_examples() -> None:
    assert {plugin for plugins, *_ in plugin_table() for plugin in plugins.split(", ")} == PLUGINS
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    for plugins, key, contract, example in plugin_table():
        paths = re.findall(r"\]\(\.\./\.\./(examples/[\w/]+\.py)\)", example)
        assert paths, plugins
        for path in paths:
            assert len((ROOT / path).read_text().splitlines()) < 80, path
            folder = Path(path).parent.name
            assert f'"{folder}"' in tests or f"examples/{folder}" in tests, f"no test uses {path}"

        # `.decoder.kind` after `model.modalities.NAME.encoder.kind` replaces its last two names.
        first, *others = re.findall(r"`([^`]+)`", key)
        keys = [first, *(first.rsplit(".", 2)[0] + other if other.startswith(".") else other for other in others)]
        assert {reference.schema_key(word) for word in keys} <= {known.key for known in reference.all_keys()}, plugins
        for name in re.findall(r"`omnizoo\.(\w+)`", contract):
            assert name in omnizoo.__all__, name


def test_every_public_name_exists() -> None:
    for name in omnizoo.__all__:
        assert getattr(omnizoo, name) is not None
    assert {"Encoder", "Decoder", "MediaSize", "BadMedia", "Recipe", "Loss", "Callback", "Logger"} <= set(
        omnizoo.__all__
    )
    assert {"RowSource", "BadRow", "load_config", "train"} <= set(omnizoo.__all__)


def test_module_rows_schedule_and_callback_plugins_train_together(tmp_path: Path, rows: list[str]) -> None:
    callback = '[{kind: "time_budget:TimeBudget", options: {minutes: 600}}]'
    options = ["--train.schedule", "restarts:restarts", "--log.callbacks", callback, "--data.workers", "1"]
    assert main(["train", TEXT, *SMALL, *MODULE, *rows, *options, f"--log.dir={tmp_path / 'run'}"]) == 0
    steps = read_steps(tmp_path / "run")
    assert steps[-1]["loss"] < 0.9 * steps[0]["loss"]
    rates = [row["lr"] for row in steps]
    assert rates[0::2] == [2e-3] * 4  # a new cycle starts every two steps
    assert all(rate < 2e-3 for rate in rates[1::2])
    expired = callback.replace("600", "1.0e-9")
    assert (
        main(["train", TEXT, *SMALL, *MODULE, *rows, "--log.callbacks", expired, f"--log.dir={tmp_path / 'cut'}"]) == 0
    )
    assert len(read_steps(tmp_path / "cut")) == 2  # the step in progress is finished


@pytest.mark.slow
def test_module_and_rows_plugins_are_verified(rows: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    options = [*MODULE, *rows, "--train.schedule", "restarts:restarts"]
    assert main(["verify", TEXT, *options, "--world", "4", "--layouts", "uly2.ring2"]) == 0
    assert "1 of 1 layouts" in capfd.readouterr().out


@pytest.mark.slow
def test_recipe_plugin_determines_sharding(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = build_bundle(load_config(TEXT, RECIPE)).model
    assert {type(model.get_submodule(name)).__name__ for name in read_facts(model).blocks} == {
        "Qwen3Attention",
        "Qwen3MLP",
    }
    losses = []
    for name, options in (("plain", []), ("fine", [*RECIPE, "--parallel.recompute", "full"])):
        assert main(["train", TEXT, *SMALL, "--train.steps", "2", *options, f"--log.dir={tmp_path / name}"]) == 0
        losses.append([row["loss"] for row in read_steps(tmp_path / name)])
    assert losses[0] == losses[1]
    assert main(["verify", TEXT, *RECIPE, "--world", "2", "--layouts", "dp2,uly2"]) == 0
    assert "2 of 2 layouts" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--model.recipe", "fine_blocks:Recipes"],
            "model.recipe: cannot import fine_blocks:Recipes: ",
        ),
        (
            ["--model.recipe", "fine_blocks:Recipe"],
            "model.recipe: fine_blocks:Recipe is a type",
        ),
        (["--model.recipe", "nothing_like_it:R"], "model.recipe: cannot import nothing_like_it:R: ModuleNotFoundError"),
        (["--model.recipe", "fine blocks"], "model.recipe: 'fine blocks'"),
    ],
)
def test_invalid_recipe_plugin_prints_one_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    assert main(["train", TEXT, *SMALL, *arguments, f"--log.dir={tmp_path}"]) == 2
    assert message in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.slow
def test_killed_notebook_resumes_exactly_and_is_exported(tmp_path: Path) -> None:
    script = ROOT / "examples" / "notebook.py"
    assert len([line for line in script.read_text().splitlines() if line.strip()]) < 30
    uninterrupted = Forked([sys.executable, str(script), str(tmp_path / "uninterrupted")], {}).wait(240)
    assert uninterrupted.code == 0, uninterrupted.stderr
    assert "step 40: done" in uninterrupted.stdout
    killed = Forked([sys.executable, str(script), str(tmp_path / "run")], {})
    assert killed.wait_until(lambda: len(read_steps(tmp_path / "run")) >= 12, 240)
    killed.kill()
    assert 5 <= len(read_steps(tmp_path / "run")) < 40
    resumed = Forked([sys.executable, str(script), str(tmp_path / "run")], {}).wait(240)
    assert resumed.code == 0, resumed.stderr

    def losses(run: str) -> dict[int, tuple[float, float]]:
        return {row["step"]: (row["loss"], row["loss/modesty"]) for row in read_steps(tmp_path / run)}

    assert len(losses("run")) == 40
    assert losses("run") == losses("uninterrupted")
    exported = []
    for run in ("run", "uninterrupted"):
        done = run_omnizoo(["export", tmp_path / run, tmp_path / f"{run}_out"])
        assert done.code == 0, done.stderr
        exported.append(load_file(tmp_path / f"{run}_out" / "model.safetensors"))
    assert exported[0].keys() == {f"{name}.weight" for name in ("table", "head", "layers.0", "layers.1")} | {
        f"{name}.bias" for name in ("head", "layers.0", "layers.1")
    }
    assert all(torch.equal(tensor, exported[1][name]) for name, tensor in exported[0].items())
