"""Exact resume with media: a run is killed while its workers prefetch, and resumes on another layout."""

import os
import random
from pathlib import Path

import pytest
from omni import SENSOR, write_omni_config
from processes import Running, start_omnizoo
from tiny import read_steps

STEPS, TIMEOUT = 7, 240
EXACT = ("loss", "loss/text", "loss/image", "loss/audio", "loss/series", "grad_norm", "tokens", "fill")
FOLDERS = (SENSOR, Path(__file__).parents[1] / "support", Path(__file__).parents[2])
PATH = os.pathsep.join(map(str, FOLDERS))


def start(config: Path, run: Path, workers: int, *layout: object) -> Running:
    return start_omnizoo(["train", config, "--log.dir", run, "--data.workers", workers, *layout], PYTHONPATH=PATH)


def finish(running: Running) -> None:
    result = running.wait(TIMEOUT)
    assert result.code == 0, result.stdout + result.stderr


@pytest.mark.slow
def test_killed_omni_run_resumes_exactly_on_any_layout(tmp_path: Path) -> None:
    config = write_omni_config(tmp_path, train={"steps": STEPS, "warmup_steps": 2}, checkpoint={"every": 2})
    two = ("--nproc", 2, "--parallel.ulysses", 2, "--parallel.ep", 2)
    finish(start(config, tmp_path / "uninterrupted", 0, *two))
    uninterrupted = read_steps(tmp_path / "uninterrupted")

    run = tmp_path / "killed"
    rng = random.Random(0)
    running = start(config, run, 2, *two)
    assert running.wait_until(lambda: len(read_steps(run)) >= 3, TIMEOUT)
    rng.choice(running.ranks()).kill()
    running.wait(TIMEOUT)
    running = start(config, run, 0, *two)
    assert running.wait_until(lambda: len(read_steps(run)) >= 5, TIMEOUT)
    running.kill()
    killed = read_steps(run)
    assert [[row[key] for key in EXACT] for row in killed] == [
        [row[key] for key in EXACT] for row in uninterrupted[: len(killed)]
    ]

    finish(start(config, run, 0))
    resumed = read_steps(run)
    assert [row["step"] for row in resumed] == list(range(1, STEPS + 1))
    assert [row["tokens"] for row in resumed] == [row["tokens"] for row in uninterrupted]
    assert max(abs(a["loss"] / b["loss"] - 1) for a, b in zip(resumed, uninterrupted, strict=True)) < 1e-5
