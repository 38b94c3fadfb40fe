"""`train.deterministic`: repeated runs are bitwise equal, and an operator that cannot comply is an error."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_omnizoo
from tiny import model_config, read_steps, write_config

from omnizoo import Loss
from omnizoo.cli.main import main

MEASURED = ("tokens_per_sec", "memory_gb", "data_wait", "mfu", "time")


class Unordered(Loss):  # type: ignore[misc]
    """A loss with an operator that has no deterministic algorithm."""

    def from_logits(self, logits: torch.Tensor, batch: Any) -> torch.Tensor:
        total = torch.zeros(1).put_(torch.zeros(2, dtype=torch.int64), torch.ones(2))
        return logits.float().square().sum() * total.sum()


def results(run: Path) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Return the metrics of each step without measured times, and the hash of each file of tensors."""
    steps = []
    for row in read_steps(run):
        steps.append({key: value for key, value in row.items() if key not in MEASURED})
    files = sorted((run / "checkpoints").glob("*/tensors/*.safetensors"))
    assert files
    return steps, {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


@pytest.mark.slow
def test_repeated_runs_are_bitwise_equal(tmp_path: Path) -> None:
    """Experts, dropout-free attention and two ranks with two threads each."""
    config = write_config(
        tmp_path,
        model={"config": model_config("gpt_oss")},
        train={"steps": 2, "packs_per_step": 2, "deterministic": True},
    )
    for name in ("first", "second"):
        args = ["train", config, "--nproc", 2, "--log.dir", tmp_path / name]
        result = run_omnizoo(args, OMP_NUM_THREADS="2", OMP_WAIT_POLICY="PASSIVE")  # threads do not spin
        assert result.code == 0, result.stdout + result.stderr
    first = results(tmp_path / "first")
    assert len(first[0]) == 2
    assert first == results(tmp_path / "second")


def test_operator_without_deterministic_algorithm_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loss = {"kind": "test_deterministic:Unordered"}
    config = write_config(tmp_path, train={"steps": 1, "deterministic": True, "losses": [loss]})
    assert main(["train", str(config)]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "train.deterministic: put_" in error
    assert error.endswith("or change the model or loss that uses this operator.")
    assert main(["train", str(config), "--train.deterministic", "false"]) == 0


def test_settings_of_torch_are_restored_after_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    config = write_config(tmp_path, train={"steps": 1, "deterministic": True})
    assert main(["train", str(config)]) == 0
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory
