"""Custom training loops with two optimizers, on two models and on components of one model."""

import ast
import math
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from processes import run_script_on_ranks
from tiny import write_config

import omnizoo
from omnizoo.config.load import load_config
from omnizoo.parallel.process import process_group

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "two_optimizers" / "two_optimizers.py"
STEPS = 6
SMALL = ["--model.config.hidden_size", "32", "--model.config.num_hidden_layers", "2", "--data.pack_tokens", "64"]
ARGUMENTS = ["examples/text_tiny.yaml", *SMALL, "--train.steps", str(STEPS), "--train.lr", "0.02"]
Lines = list[tuple[int, str, float, float]]  # step, model, cross entropy, divergence from the other model


def run_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *ARGUMENTS])
    runpy.run_path(str(SCRIPT), run_name="__main__")


def read_lines(stdout: str) -> Lines:
    matches = re.findall(r"^step (\d+) model (\w)  text (\S+)  peer (\S+)  grad norm \S+$", stdout, re.M)
    return [(int(step), model, float(text), float(peer)) for step, model, text, peer in matches]


def test_example_is_short_and_uses_public_names_only() -> None:
    source = SCRIPT.read_text()
    assert len(source.splitlines()) < 80
    modules = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom) and node.module]
    assert not [node.module for node in modules if str(node.module).startswith("omnizoo")]
    assert set(re.findall(r"omnizoo\.(\w+)", source)) - {"omnizoo"} <= set(omnizoo.__all__)


def test_two_models_teach_each_other_in_turn(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run_script(monkeypatch)
    lines = read_lines(capsys.readouterr().out)
    assert [(step, model) for step, model, *_ in lines] == [(step, m) for step in range(1, STEPS + 1) for m in "ab"]
    assert all(math.isfinite(value) for line in lines for value in line[2:])
    first, last = lines[:2], lines[-2:]
    assert all(after[2] < before[2] for before, after in zip(first, last, strict=True))  # both learn
    assert first[0][2] != first[1][2]  # from different weights

    # Before its first update, model a has the cross entropy of a run without a peer.
    assert (
        omnizoo.train(
            load_config(ARGUMENTS[0], [*ARGUMENTS[1:], "--train.steps", "1", f"--log.dir={tmp_path}"])
        ).exit_code
        == 0
    )
    one_step_loss = float(re.findall(r'"loss": ([\d.]+)', (tmp_path / "metrics.jsonl").read_text())[0])
    assert first[0][2] == pytest.approx(one_step_loss, abs=1e-6)


@pytest.mark.slow
def test_two_ranks_match_one_process(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run_script(monkeypatch)
    one_process = read_lines(capsys.readouterr().out)
    result = run_script_on_ranks([SCRIPT, *ARGUMENTS], 2)
    assert result.code == 0, result.stdout + result.stderr
    two_ranks = read_lines(result.stdout)
    assert [line[:2] for line in two_ranks] == [line[:2] for line in one_process]
    for expected, line in zip(one_process, two_ranks, strict=True):
        assert line[2:] == pytest.approx(expected[2:], rel=1e-4)


def test_norm_and_update_cover_the_parameters_of_the_optimizer(tmp_path: Path) -> None:
    config = load_config(write_config(tmp_path), ["--train.grad_clip", "1000"])
    with process_group() as process:
        mesh = omnizoo.build_mesh(config, process)
        model = omnizoo.build_model(config.model, config.train.precision)
        loader = omnizoo.build_loader(config, omnizoo.load_tokenizer(config.model), 0, 1)
        omnizoo.parallelize_model(model, mesh, config)
        objective = omnizoo.build_objective(model, mesh, config)
        data = omnizoo.next_step(loader, omnizoo.Balancer(model, mesh, config))
        parameters = list(model.parameters())
        halves = [torch.optim.SGD(parameters[:2], lr=1.0), torch.optim.SGD(parameters[2:], lr=1.0)]
        for batch in objective.micro_batches(data, 1):
            objective.backward(objective.loss(batch))
        before = [parameter.detach().full_tensor().clone() for parameter in parameters]
        expected = torch.linalg.vector_norm(torch.stack([p.grad.full_tensor().norm() for p in parameters]))
        first = omnizoo.optimizer_step(objective, halves[0], 1)
        is_updated = [not torch.equal(p.detach().full_tensor(), b) for p, b in zip(parameters, before, strict=True)]
        second = omnizoo.optimizer_step(objective, halves[1], 1)
    assert is_updated == [True, True] + [False] * (len(parameters) - 2)
    assert math.hypot(first.grad_norm, second.grad_norm) == pytest.approx(float(expected), rel=1e-5)
    assert first.loss > 0
    assert second.terms == {}  # the losses belong to the first optimizer step
