"""Evaluation is of something, or it is not there: no figure is ever made from no targets."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from fixtures import CHATML, make_tokenizer
from omni import SENSOR, write_omni_config
from tiny import read_steps, write_config, write_rows

from omnizoo.cli.main import main
from omnizoo.reporting.report import write_report
from omnizoo.reporting.run_folder import RunFolder

SHORT = {"steps": 2, "packs_per_step": 2}


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")


def held_out(folder: Path, rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {"eval_sources": [{"path": str(write_rows(folder / "held_out.jsonl", rows))}]}


def test_evaluation_without_held_out_data_prints_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(write_config(tmp_path, train=SHORT, evaluation={"every": 1}))]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "evaluation.every" in err
    assert "data.eval_sources" in err
    assert not (tmp_path / "run").exists()


def test_unused_held_out_data_is_reported_at_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not even opened: the file need not exist."""
    data = {"eval_sources": [{"path": str(tmp_path / "nowhere.jsonl")}]}
    assert main(["train", str(write_config(tmp_path, train=SHORT, data=data))]) == 0
    assert "evaluation.every is 0" in capsys.readouterr().out
    assert not any(key.startswith("eval/") for row in read_steps(tmp_path / "run") for key in row)


def test_too_few_packs_and_late_evaluation_are_reported_at_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = held_out(tmp_path, [{"text": "a row"}])
    path = write_config(tmp_path, train=SHORT, evaluation={"every": 5}, data=data)
    assert main(["train", str(path)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "1 pack (all available; evaluation.packs is 16), every 5 steps, so never in a run of 2" in out


def test_held_out_rows_without_response_raise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What fits of a long conversation may hold none, and it is all that is evaluated on."""
    words = "many words " * 200
    turns = [{"role": "user", "content": words}, {"role": "assistant", "content": "yes"}]
    data = held_out(tmp_path, [{"messages": turns}])
    path = write_config(tmp_path, train=SHORT, evaluation={"every": 1, "packs": 1}, data=data)
    assert main(["train", str(path)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "data.eval_sources" in err
    assert "has no usable row" in err
    assert "data.pack_tokens (96)" in err


def test_step_without_targets_has_no_loss_and_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of three lanes two end early: their turns come, and they have nothing left."""
    texts = ["many words " * 60, "a few words", "some more words"]
    rows = write_rows(tmp_path / "long.jsonl", [{"text": text} for text in texts])
    data = {"sources": [{"path": str(rows)}], "lanes": 3, "look_ahead": 1, "shuffle": False}
    path = write_config(tmp_path, train={"packs_per_step": 1}, data=data)
    config = yaml.safe_load(path.read_text())
    config["train"] = {"epochs": 1, "packs_per_step": 1}
    path.write_text(yaml.safe_dump(config))
    assert main(["train", str(path)]) == 0
    assert "no targets" in capsys.readouterr().out
    steps = read_steps(tmp_path / "run")
    assert {row["loss"] is None for row in steps} == {True, False}
    assert all(("loss/text" in row) == (row["loss"] is not None) for row in steps)
    assert all(row["loss"] is None or row["loss"] > 0.5 for row in steps)


def test_loss_term_without_targets_is_not_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(SENSOR))
    make_tokenizer(tmp_path / "tokenizer", CHATML)
    turns = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": "an answer"}]
    rows = write_rows(tmp_path / "text_only.jsonl", [{"messages": turns}] * 8)
    data = held_out(tmp_path, [{"messages": turns}]) | {"sources": [{"path": str(rows)}]}
    path = write_omni_config(tmp_path, "llama", train=SHORT, evaluation={"every": 1}, data=data)
    assert main(["train", str(path)]) == 0
    out = capsys.readouterr().out
    steps = read_steps(tmp_path / "run")
    for row in steps:
        assert row["loss/text"] > 0
        assert row["loss"] == pytest.approx(row["loss/text"])
        assert row["eval/loss"] == pytest.approx(row["eval/loss/text"])
        assert {key for key in row if "loss/" in key} == {"loss/text", "eval/loss/text"}
    assert "eval/loss/text" in out
    assert "eval/loss/series" not in out
    page = write_report(RunFolder(tmp_path / "run")).read_text()
    assert "loss/series" not in json.dumps(page)
