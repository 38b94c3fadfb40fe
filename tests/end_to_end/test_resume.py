"""Exact resume: a run that is killed or stopped and resumed by the same command is bit-identical to an uninterrupted
run, and its metrics have each step once."""

import random
import signal
from pathlib import Path

import pytest
import torch
from processes import Running, run_on_ranks, start_omnizoo, train_in_this_world
from safetensors.torch import load_file
from tiny import SHAPE, read_steps, write_config

from omnizoo.parallel.process import Process

STEPS = 30
EVERY = 3  # steps per checkpoint
VALUES = (
    "loss",
    "loss/texts",
    "loss/chats",
    "grad_norm",
    "lr",
    "tokens",
    "tokens_seen",
    "fill",
    "imbalance",
    "skipped_rows",
)
TIMEOUT = 180


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    warmup = {"steps": 12, "start": 0.2}
    train = {"steps": STEPS, "packs_per_step": None, "samples_per_step": 24, "warmup_steps": 5, "batch_warmup": warmup}
    folder = tmp_path_factory.mktemp("resume")
    return write_config(folder, data={"look_ahead": None}, train=train, checkpoint={"every": EVERY})


def start(config: Path, run: Path, workers: int) -> Running:
    return start_omnizoo(["train", config, "--nproc", 2, "--log.dir", run, "--data.workers", workers])


def train_on_rank(process: Process, config: Path, run: Path) -> None:
    assert train_in_this_world([config, "--log.dir", run]) == 0


@pytest.fixture(scope="module")
def uninterrupted(config: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[float | None]]:
    run = tmp_path_factory.mktemp("uninterrupted")
    result = run_on_ranks(train_on_rank, 2, config, run)
    assert result.code == 0, result.stdout + result.stderr
    return values(run)


def values(run: Path) -> list[list[float | None]]:
    steps = read_steps(run)
    assert [row["step"] for row in steps] == list(range(1, STEPS + 1))
    return [[row.get(key) for key in VALUES] for row in steps]


def last_step(run: Path) -> int:
    steps = read_steps(run)
    return steps[-1]["step"] if steps else 0


def kill_one_rank(running: Running, rng: random.Random) -> None:
    """Kill one rank with SIGKILL. The launcher must end the other one and exit with the code of the signal."""
    rng.choice(running.ranks()).kill()
    result = running.wait(TIMEOUT)
    assert result.code == 128 + signal.SIGKILL, result.stdout + result.stderr
    assert "killed by SIGKILL" in result.stderr


def stop_by_signal(running: Running, number: signal.Signals, run: Path) -> None:
    """Send a stop signal. The run must finish and save the step, and exit with 0."""
    running.process.send_signal(number)
    result = running.wait(TIMEOUT)
    assert result.code == 0, result.stdout + result.stderr
    step = last_step(run)
    assert f"stopped by {number.name} after step {step}/{STEPS}" in result.stdout
    assert (run / "checkpoints" / f"step_{step:08d}" / "manifest.json").is_file()
    assert (run / "report.html").is_file()


@pytest.mark.slow
def test_killed_and_stopped_run_is_bit_identical(
    config: Path, uninterrupted: list[list[float | None]], tmp_path: Path
) -> None:
    """The run starts five times with the same command. Only the number of loader workers differs."""
    rng = random.Random(0)

    moment = rng.randrange(1, 5)
    running = start(config, tmp_path, workers=2)
    assert running.wait_until(lambda: last_step(tmp_path) >= moment, TIMEOUT)
    kill_one_rank(running, rng)

    # Kill all ranks while a checkpoint is written: its folder has this name until it is complete.
    moment = rng.randrange(last_step(tmp_path) + 1, 9)
    partial_folder = tmp_path / "checkpoints" / f".step_{-(-moment // EVERY) * EVERY:08d}.partial"
    running = start(config, tmp_path, workers=0)
    assert running.wait_until(lambda: partial_folder.exists() or last_step(tmp_path) > moment + EVERY, TIMEOUT)
    running.kill()

    for number, workers, latest in ((signal.SIGINT, 2, 13), (signal.SIGTERM, 0, 16)):
        moment = rng.randrange(last_step(tmp_path) + 1, max(latest, last_step(tmp_path) + 2))
        running = start(config, tmp_path, workers)
        assert running.wait_until(lambda moment=moment: last_step(tmp_path) >= moment, TIMEOUT)
        stop_by_signal(running, number, tmp_path)

    result = start(config, tmp_path, workers=0).wait(TIMEOUT)
    assert result.code == 0, result.stdout + result.stderr
    assert f"done, {STEPS} steps" in result.stdout
    assert values(tmp_path) == uninterrupted
    assert not list((tmp_path / "checkpoints").glob(".*"))  # the partial folder of the killed run was deleted


@pytest.mark.long
def test_run_killed_ten_times_is_bit_identical(tmp_path: Path) -> None:
    """Shared adapters of experts, steps of samples that grow, losses by source and exports, on two ranks."""
    experts = {"model_type": "qwen3_moe", **SHAPE, "num_experts": 4, "num_experts_per_tok": 2}
    adapter = {"rank": 4, "targets": ["q_proj", "gate_proj", "up_proj", "down_proj"], "experts": "shared"}
    train = {"steps": 40, "packs_per_step": None, "samples_per_step": 24, "batch_warmup": {"steps": 30, "start": 0.2}}
    config = write_config(
        tmp_path,
        model={"config": experts | {"moe_intermediate_size": 16}, "adapter": adapter},
        data={"look_ahead": None},
        train=train,
        parallel={"ep": 2},
        checkpoint={"every": 2, "export": {"every": 8, "dtype": "bf16"}},
    )
    killed, uninterrupted = tmp_path / "killed", tmp_path / "uninterrupted"
    result = run_on_ranks(train_on_rank, 2, config, uninterrupted)
    assert result.code == 0, result.stdout + result.stderr

    rng = random.Random(1)
    for number in range(10):
        moment = max(last_step(killed), 3 * number) + rng.randrange(1, 4)
        running = start(config, killed, workers=number % 3)
        assert running.wait_until(lambda moment=moment: last_step(killed) >= moment, TIMEOUT)
        if number % 2:
            running.kill()
        else:
            kill_one_rank(running, rng)
    result = start(config, killed, workers=0).wait(TIMEOUT)
    assert result.code == 0, result.stdout + result.stderr

    steps, expected = read_steps(killed), read_steps(uninterrupted)
    assert [row["step"] for row in steps] == list(range(1, 41))
    for row, expected_row in zip(steps, expected, strict=True):
        assert [row.get(key) for key in VALUES] == [expected_row.get(key) for key in VALUES]
    for folder in (uninterrupted / "exports").iterdir():
        weights = load_file(folder / "adapter_model.safetensors")
        exported = load_file(killed / "exports" / folder.name / "adapter_model.safetensors")
        assert exported.keys() == weights.keys()
        assert all(torch.equal(exported[name], tensor) for name, tensor in weights.items())
