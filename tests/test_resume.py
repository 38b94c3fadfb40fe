"""Exact resume: killed at any moment, or asked to stop, and started again by the same command, a run is bit for bit the
one that nobody disturbed; its metrics have each step once."""

import random
import signal
from pathlib import Path

import pytest
from processes import Running, start_omnizoo
from tiny import read_steps, write_config

STEPS, EVERY = 20, 3
VALUES = ("loss", "loss/text", "grad_norm", "lr", "tokens", "tokens_seen", "fill", "imbalance", "skipped_rows")
TIMEOUT = 180


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    train = {"steps": STEPS, "global_batch": 4, "warmup_steps": 5}
    return write_config(tmp_path_factory.mktemp("resume"), train=train, checkpoint={"every": EVERY})


def start(config: Path, run: Path, workers: int = 0) -> Running:
    return start_omnizoo(["train", config, "--nproc", 2, "--log.dir", run, "--data.workers", workers])


def finish(config: Path, run: Path, workers: int = 0) -> None:
    result = start(config, run, workers).wait(TIMEOUT)
    assert result.code == 0, result.stdout + result.stderr
    assert f"done, {STEPS} steps" in result.stdout


@pytest.fixture(scope="module")
def undisturbed(config: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[float]]:
    run = tmp_path_factory.mktemp("undisturbed")
    finish(config, run)
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
@pytest.mark.parametrize(("workers", "number"), [(0, signal.SIGTERM), (2, signal.SIGINT)])
def test_a_run_killed_and_stopped_at_random_moments_is_bit_for_bit_the_undisturbed_one(
    config: Path, undisturbed: list[list[float]], tmp_path: Path, workers: int, number: signal.Signals
) -> None:
    dice = random.Random(workers)

    moment = dice.randrange(1, 6)
    running = start(config, tmp_path, workers)
    assert running.wait_until(lambda: last_step(tmp_path) >= moment, TIMEOUT)
    kill_one(running, dice)

    # All at once, while a checkpoint is being written: the folder has this name until it is complete.
    moment = dice.randrange(last_step(tmp_path) + 1, 10)
    written = tmp_path / "checkpoints" / f".step_{-(-moment // EVERY) * EVERY:08d}.partial"
    running = start(config, tmp_path, workers)
    assert running.wait_until(lambda: written.exists() or last_step(tmp_path) > moment + EVERY, TIMEOUT)
    running.kill()

    moment = dice.randrange(last_step(tmp_path) + 1, 15)
    running = start(config, tmp_path, workers)
    assert running.wait_until(lambda: last_step(tmp_path) >= moment, TIMEOUT)
    ask_to_stop(running, number, tmp_path)

    finish(config, tmp_path, workers)
    assert values(tmp_path) == undisturbed
    assert not list((tmp_path / "checkpoints").glob(".*"))  # what the kill left half written is gone
