"""Exact resume: killed at any moment, or asked to stop, and started again by the same command, a run is bit for bit the
one that nobody disturbed; its metrics have each step once."""

import random
import signal
from pathlib import Path

import pytest
from processes import Running, run_on_ranks, start_omnizoo, train_in_this_world
from tiny import read_steps, write_config

from omnizoo.parallel.process import Process

STEPS, EVERY = 30, 3
VALUES = ("loss", "loss/text", "grad_norm", "lr", "tokens", "tokens_seen", "fill", "imbalance", "skipped_rows")
TIMEOUT = 180


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    train = {"steps": STEPS, "packs_per_step": 4, "warmup_steps": 5}
    return write_config(tmp_path_factory.mktemp("resume"), train=train, checkpoint={"every": EVERY})


def start(config: Path, run: Path, workers: int) -> Running:
    return start_omnizoo(["train", config, "--nproc", 2, "--log.dir", run, "--data.workers", workers])


def train(process: Process, config: Path, run: Path) -> None:
    assert train_in_this_world([config, "--log.dir", run]) == 0


@pytest.fixture(scope="module")
def undisturbed(config: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[float]]:
    run = tmp_path_factory.mktemp("undisturbed")
    result = run_on_ranks(train, 2, config, run)
    assert result.code == 0, result.stdout + result.stderr
    return values(run)


def values(run: Path) -> list[list[float]]:
    steps = read_steps(run)
    assert [row["step"] for row in steps] == list(range(1, STEPS + 1))
    return [[row[key] for key in VALUES] for row in steps]


def last_step(run: Path) -> int:
    steps = read_steps(run)
    return steps[-1]["step"] if steps else 0


def kill_one(running: Running, dice: random.Random) -> None:
    """SIGKILL to one rank: the launcher ends the other, says which one was killed, and exits with its signal."""
    dice.choice(running.ranks()).kill()
    result = running.wait(TIMEOUT)
    assert result.code == 128 + signal.SIGKILL, result.stdout + result.stderr
    assert "was killed by SIGKILL" in result.stderr


def ask_to_stop(running: Running, number: signal.Signals, run: Path) -> None:
    """A signal to stop: the step is finished and saved, and the run says so and exits with 0."""
    running.process.send_signal(number)
    result = running.wait(TIMEOUT)
    assert result.code == 0, result.stdout + result.stderr
    step = last_step(run)
    assert f"stopped by {number.name} after step {step}/{STEPS}" in result.stdout
    assert (run / "checkpoints" / f"step_{step:08d}" / "manifest.json").is_file()
    assert (run / "report.html").is_file()


@pytest.mark.slow
def test_killed_and_stopped_run_is_bit_identical(config: Path, undisturbed: list[list[float]], tmp_path: Path) -> None:
    """Five starts by the same command, but for the number of loader workers, which changes nothing."""
    dice = random.Random(0)

    moment = dice.randrange(1, 5)
    running = start(config, tmp_path, workers=2)
    assert running.wait_until(lambda: last_step(tmp_path) >= moment, TIMEOUT)
    kill_one(running, dice)

    # All at once, while a checkpoint is being written: the folder has this name until it is complete.
    moment = dice.randrange(last_step(tmp_path) + 1, 9)
    written = tmp_path / "checkpoints" / f".step_{-(-moment // EVERY) * EVERY:08d}.partial"
    running = start(config, tmp_path, workers=0)
    assert running.wait_until(lambda: written.exists() or last_step(tmp_path) > moment + EVERY, TIMEOUT)
    running.kill()

    for number, workers, latest in ((signal.SIGINT, 2, 13), (signal.SIGTERM, 0, 16)):
        moment = dice.randrange(last_step(tmp_path) + 1, max(latest, last_step(tmp_path) + 2))
        running = start(config, tmp_path, workers)
        assert running.wait_until(lambda moment=moment: last_step(tmp_path) >= moment, TIMEOUT)
        ask_to_stop(running, number, tmp_path)

    result = start(config, tmp_path, workers=0).wait(TIMEOUT)
    assert result.code == 0, result.stdout + result.stderr
    assert f"done, {STEPS} steps" in result.stdout
    assert values(tmp_path) == undisturbed
    assert not list((tmp_path / "checkpoints").glob(".*"))  # what the kill left half written is gone
