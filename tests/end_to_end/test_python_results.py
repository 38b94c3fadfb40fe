"""Results of train, evaluate and export in Python: metrics, checkpoints and reasons, from real runs."""

import json
import os
import re
import signal
from pathlib import Path

import own_rows
import pytest
from fixtures import make_tokenizer
from notebook_kernel import install_kernel
from python_runs import ROWS, plugin_model, settings
from tiny import model_config
from transformers import AutoModelForCausalLM

import omnizoo
from omnizoo.cli.main import main


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def run(tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> omnizoo.TrainResult:
    """The result of a finished run with evaluations."""
    config = settings(tokenizer, tmp_path_factory.mktemp("run"), evaluation={"every": 2, "packs": 2})
    config["model"]["config"] = model_config("qwen3")
    config["checkpoint"] = {"best": "eval/loss", "keep": 1}
    return omnizoo.train(config, data=ROWS, eval_data=own_rows.make()[:8])


def test_train_returns_final_and_best_metrics_checkpoint_and_run_folder(run: omnizoo.TrainResult) -> None:
    rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert (run.step, run.stop_reason, run.is_finished, run.exit_code) == (4, "last step", True, 0)
    assert {"step": 4, **run.metrics} == rows[-1]
    assert run.evaluation == {name: value for name, value in rows[3].items() if name.startswith("eval/")}
    assert run.checkpoint == run.folder / "checkpoints" / "step_00000004"
    assert run.best is not None
    assert run.best.value == min(row["eval/loss"] for row in rows if "eval/loss" in row)
    assert (run.best.checkpoint / "manifest.json").is_file()


def test_train_returns_the_same_result_if_nothing_is_left_to_do(run: omnizoo.TrainResult) -> None:
    config = omnizoo.load_config(run.folder / "config.yaml", objects={"data": ROWS, "eval_data": ROWS[:8]})
    assert omnizoo.train(config) == run


def test_evaluate_and_export_use_the_run_that_train_returns(run: omnizoo.TrainResult, tmp_path: Path) -> None:
    evaluated = omnizoo.evaluate(run.folder, data=ROWS, eval_data=own_rows.make()[:8])
    assert evaluated.checkpoint == run.checkpoint
    assert evaluated.metrics["eval/loss"] == pytest.approx(run.evaluation["eval/loss"], abs=1e-6)
    assert json.loads((evaluated.folder / "metrics.json").read_text())["step"] == evaluated.step == 4
    exported = omnizoo.export(str(run.folder), tmp_path / "model", dtype="bf16")
    assert (exported.checkpoint, exported.out) == (run.checkpoint, tmp_path / "model")
    assert set(exported.parameters) == {"bfloat16"}
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model") is not None


@pytest.mark.parametrize(
    ("call", "key"),
    [
        (lambda run: omnizoo.export(run, "out", dtype="int3"), r"^dtype: "),
        (lambda run: omnizoo.evaluate(run, run, best=True), r"^best: "),
        (lambda run: omnizoo.evaluate(run / "checkpoints", eval_data=ROWS), r"config\.yaml"),
    ],
)
def test_wrong_argument_of_a_python_function_raises_one_line(run: omnizoo.TrainResult, call, key: str) -> None:
    with pytest.raises(omnizoo.UserError, match=key):
        call(run.folder)


def test_training_in_a_notebook_shows_the_curve_of_the_run_and_continues_it(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = install_kernel(monkeypatch)
    for steps in (2, 4):
        config = settings(tokenizer, tmp_path, train={"steps": steps})
        omnizoo.train(config, model=plugin_model(), data=ROWS)
        (curve,) = re.findall('points="(.*?)"', shown[-1])
        assert len(curve.split()) == steps
        assert f"done, {steps} steps" in shown[-1]
    assert "step 1/2" not in capsys.readouterr().out


class Interrupts(omnizoo.Callback):
    def on_step(self, event: omnizoo.StepEvent) -> omnizoo.Request:
        if event.step == 2:
            os.kill(os.getpid(), signal.SIGINT)


class Stops(omnizoo.Callback):
    def on_step(self, event: omnizoo.StepEvent) -> omnizoo.Request:
        return "stop" if event.step == 1 else None


def test_stop_reason_names_the_signal_or_the_callback(tokenizer: Path, tmp_path: Path) -> None:
    handler = signal.getsignal(signal.SIGINT)
    config = settings(tokenizer, tmp_path / "run")
    stopped = omnizoo.train(config, model=plugin_model(), data=ROWS, callbacks=[Stops()])
    assert "Stops" in stopped.stop_reason
    assert (stopped.step, stopped.is_finished) == (2, False)  # callbacks are heard in the step after
    config = settings(tokenizer, tmp_path / "other")
    interrupted = omnizoo.train(config, model=plugin_model(), data=ROWS, callbacks=[Interrupts()])
    assert interrupted.stop_reason == "SIGINT"
    assert interrupted.checkpoint == tmp_path / "other" / "checkpoints" / f"step_{interrupted.step:08d}"
    assert signal.getsignal(signal.SIGINT) == handler


def test_generate_returns_what_the_command_writes(run: omnizoo.TrainResult, tmp_path: Path) -> None:
    prompts = ["one and", "2 and 3", "x"]
    responses = omnizoo.generate(run.folder, prompts, max_tokens=5, temperature=0)
    flags = [argument for prompt in prompts for argument in ("--prompt", prompt)]
    out = tmp_path / "out.jsonl"
    command = ["generate", str(run.folder), *flags, "--max-tokens", "5", "--temperature", "0", "--out", str(out)]
    assert main(command) == 0
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(response.prompt, response.text) for response in responses] == [
        (record["prompt"], record["answer"]) for record in records
    ]
    (only,) = omnizoo.generate(run.folder, prompts[1], max_tokens=5, temperature=0)
    assert only == responses[1]


@pytest.mark.parametrize(
    ("prompts", "options", "key"),
    [([3], {}, r"^prompts\[0\]"), ("a", {"temperature": -1}, "temperature"), ("a", {"speaker": "me"}, "speaker")],
)
def test_wrong_argument_of_generate_raises_one_line(run: omnizoo.TrainResult, prompts, options, key: str) -> None:
    with pytest.raises(omnizoo.UserError, match=key):
        omnizoo.generate(run.folder, prompts, **options)
