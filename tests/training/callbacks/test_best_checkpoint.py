"""The best checkpoint is kept and exported, and a run ends once it gets no better: the same after any resume."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tiny import read_steps, write_config, write_rows

from omnizoo.checkpoint.export import export
from omnizoo.checkpoint.folder import checkpoints, damage, folder_of
from omnizoo.checkpoint.retention import Best, prune, read_best, write_best
from omnizoo.cli.main import main
from omnizoo.config.errors import UserError
from omnizoo.training import loop as training
from omnizoo.training.callbacks.base import EvaluationEvent, SaveEvent, StartEvent, StepEvent
from omnizoo.training.callbacks.best_checkpoint import BestCheckpoint
from omnizoo.training.callbacks.early_stop import EarlyStop
from omnizoo.training.evaluation.held_out import Evaluator

# Held-out loss of the evaluations in order; what a run of the real thing does is luck.
CURVE = [5.0, 4.0, 4.5, 3.0, 3.5, 3.25, 3.125, 3.0625, 3.05, 3.04]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Evaluates after every step; the n-th step's held-out loss is the n-th of CURVE."""
    monkeypatch.setenv("COLUMNS", "400")
    held_out = {"eval_sources": [{"path": str(write_rows(tmp_path / "held_out.jsonl", [{"text": "some words"}]))}]}
    path = write_config(tmp_path, train={"steps": 10, "packs_per_step": 2}, evaluation={"every": 1}, data=held_out)
    real = training.train_step

    def step_and_note(*args: Any, **kwargs: Any) -> Any:
        now.append(args[3])
        return real(*args, **kwargs)

    now: list[int] = []
    monkeypatch.setattr(training, "train_step", step_and_note)
    monkeypatch.setattr(Evaluator, "losses", lambda _: {"eval/loss": CURVE[now[-1] - 1]})
    return path


def train(config: Path, *flags: str) -> int:
    return main(["train", str(config), *flags])


def steps(run: Path) -> list[int]:
    found = checkpoints(run / "checkpoints")
    assert all(damage(folder) is None for folder in found)
    return sorted(int(folder.name.removeprefix("step_")) for folder in found)


def named(run: Path) -> tuple[int, float]:
    best = read_best(run / "checkpoints")
    assert best is not None
    assert best.run == json.loads((run / "run.json").read_text())["id"]
    return best.step, best.value


def test_best_checkpoint_is_kept_and_exported(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    assert train(config, "--checkpoint.best=eval/loss", "--checkpoint.every=2", "--checkpoint.keep=2") == 0
    assert named(run) == (4, 3.0)
    assert steps(run) == [4, 8, 10]
    assert main(["export", str(run), str(tmp_path / "best"), "--best"]) == 0
    assert main(["export", str(run / "checkpoints" / "step_00000004"), str(tmp_path / "named")]) == 0
    assert main(["export", str(run), str(tmp_path / "newest")]) == 0
    best, by_name, newest = (
        (tmp_path / name / "model.safetensors").read_bytes() for name in ("best", "named", "newest")
    )
    assert best == by_name != newest


def test_each_new_best_evaluation_is_saved(config: Path, tmp_path: Path) -> None:
    assert train(config, "--checkpoint.best=eval/loss", "--checkpoint.keep=10") == 0
    assert steps(tmp_path / "run") == [1, 2, 4, 10]


def test_resumed_run_keeps_the_same_checkpoints_and_metrics(config: Path, tmp_path: Path) -> None:
    flags = ("--checkpoint.best=eval/loss", "--checkpoint.every=3", "--checkpoint.keep=1")
    for last in (3, 5, 10):
        assert train(config, *flags, f"--train.steps={last}", "--train.schedule=constant") == 0
    assert train(config, *flags, "--train.schedule=constant", f"--log.dir={tmp_path / 'whole'}") == 0
    assert named(tmp_path / "run") == named(tmp_path / "whole") == (4, 3.0)
    assert steps(tmp_path / "run") == steps(tmp_path / "whole") == [4, 10]
    resumed, whole = ([[row["loss"], row["grad_norm"]] for row in read_steps(tmp_path / n)] for n in ("run", "whole"))
    assert resumed == whole


def test_early_stop_ends_the_run_and_prevents_resume(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert train(config, "--evaluation.early_stop={patience: 3}") == 0
    assert "stopped by evaluation.early_stop after step 7/10" in capsys.readouterr().out
    assert len(read_steps(run)) == 7
    assert steps(run) == [7]
    assert train(config, "--evaluation.early_stop={patience: 3}") == 0
    assert "nothing to do: evaluation.early_stop stopped the run at step 7" in capsys.readouterr().out
    assert len(read_steps(run)) == 7
    assert train(config, "--evaluation.early_stop={patience: 5}") == 0
    assert "stopped by evaluation.early_stop after step 9/10" in capsys.readouterr().out


def test_early_stop_count_is_resumed(config: Path, tmp_path: Path) -> None:
    for last in (2, 6):
        assert train(config, "--evaluation.early_stop={patience: 3}", f"--train.steps={last}") == 0
    assert train(config, "--evaluation.early_stop={patience: 3}") == 0
    assert len(read_steps(tmp_path / "run")) == 7


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--checkpoint.best=eval/accuracy", ("checkpoint.best: eval/accuracy", "eval/loss, eval/loss/text")),
        ("--checkpoint.best=loss", ("checkpoint.best: loss", "eval/loss")),
        (
            "--evaluation.early_stop={metric: eval/loss/pictures}",
            ("evaluation.early_stop.metric: eval/loss/pictures",),
        ),
        ("--evaluation.early_stop={patience: 0}", ("evaluation.early_stop.patience is 0",)),
        ("--evaluation.early_stop={min_delta: -1}", ("evaluation.early_stop.min_delta is -1",)),
        ("--evaluation.early_stop=3", ("evaluation.early_stop is 3",)),
    ],
)
def test_unknown_metric_raises_at_start(
    flag: str, words: tuple[str, ...], config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(config, flag) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1, err
    for expected in words:
        assert expected in err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("flag", ["--checkpoint.best=eval/loss", "--evaluation.early_stop={}"])
def test_best_checkpoint_without_evaluations_raises(
    flag: str, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(config, flag, "--evaluation.every=0") == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert f"{flag[2:].partition('=')[0]}: " in err
    assert "evaluation.every is 0" in err


def test_export_of_missing_best_checkpoint_raises(config: Path, tmp_path: Path) -> None:
    assert train(config, "--checkpoint.best=eval/loss", "--train.steps=5") == 0
    directory, other = tmp_path / "run" / "checkpoints", {"run": "a", "metric": "m", "value": 1.0, "step": 4}
    good = directory / "step_00000004"

    def refused(words: str, folder: Path = tmp_path / "run") -> None:
        with pytest.raises(UserError, match=words):
            export(folder, tmp_path / "out", best=True)
        assert not (tmp_path / "out").exists()

    refused("is not a run folder", good)
    refused("is not a run folder", tmp_path / "nowhere")
    (good / "state.json").write_text("{}")
    refused("damaged or incomplete: state.json")
    shutil.rmtree(good)
    refused("step_00000004 of run")
    for text in (
        "{",
        "[]",
        "{}",
        json.dumps(other | {"step": "../.."}),
        json.dumps(other | {"value": "x"}),
        "[" * 10**5,
    ):
        (directory / "best.json").write_text(text)
        refused("has no best.json")
    (directory / "best.json").write_text(json.dumps(other))
    refused("step_00000004 of run a,")
    (directory / "best.json").unlink()
    refused("has no best.json")


def test_branched_run_has_a_separate_best_checkpoint(config: Path, tmp_path: Path) -> None:
    """The best checkpoint of the run it branched from is in another folder."""
    flags = ("--checkpoint.best=eval/loss", "--checkpoint.keep=9")
    assert train(config, *flags, "--train.steps=5") == 0
    source = tmp_path / "run" / "checkpoints" / "step_00000005"
    assert train(config, *flags, f"--checkpoint.resume={source}", f"--log.dir={tmp_path / 'branch'}") == 0
    assert named(tmp_path / "branch") == (10, 3.04)
    assert steps(tmp_path / "branch") == [6, 7, 8, 9, 10]


def start(folder: Path, step: int = 0) -> StartEvent:
    return StartEvent(folder, folder, {}, step, 10, 1)


def test_unsaved_checkpoint_does_not_become_the_best(tmp_path: Path) -> None:
    watcher = BestCheckpoint("eval/loss", "me")
    watcher.on_start(start(tmp_path))
    for step, loss, is_saved in ((1, 5.0, True), (2, 3.0, False), (3, 4.0, True), (4, float("nan"), True)):
        watcher.on_step(StepEvent(step, {}))
        asked = watcher.on_evaluation(EvaluationEvent(step, {"eval/loss": loss}))
        assert asked == ("save" if step < 4 else None)
        if is_saved:
            watcher.on_save(SaveEvent(step, folder_of(tmp_path, step)))
    assert read_best(tmp_path) == Best("me", "eval/loss", 4.0, 3)


def test_gain_up_to_min_delta_is_not_an_improvement() -> None:
    watcher = EarlyStop("eval/loss", patience=2, min_delta=0.5)
    asked = [
        watcher.on_evaluation(EvaluationEvent(n, {"eval/loss": loss})) for n, loss in enumerate((3.0, 2.5, 2.0, 1.5))
    ]
    assert asked == [None, None, None, None]
    assert watcher.on_evaluation(EvaluationEvent(9, {"eval/loss": float("nan")})) == "stop"


def test_best_json_of_another_run_protects_no_checkpoint(config: Path, tmp_path: Path) -> None:
    directory = tmp_path / "run" / "checkpoints"
    assert train(config, "--checkpoint.every=1", "--checkpoint.keep=9", "--train.steps=4") == 0
    write_best(directory, Best("another", "eval/loss", 1.0, 2))
    prune(directory, 1, folder_of(directory, 4))
    assert steps(tmp_path / "run") == [4]
