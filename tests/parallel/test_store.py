"""Ranks that wait for others at the start say which ones and where, and give up when time is up or on a signal."""

import re
import signal
import socket
import sys
from pathlib import Path

import pytest
from processes import Running, run_omnizoo, start_omnizoo
from tiny import write_config

from omnizoo.config.errors import TrainingError
from omnizoo.parallel import store
from omnizoo.parallel.store import open_store, ranges


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        number = int(server.getsockname()[1])
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(number))
    monkeypatch.setattr(store, "WAIT_SECONDS", 0.02)
    monkeypatch.setattr(store, "FIRST_MESSAGE", 0.05)
    return number


@pytest.mark.parametrize(("rank", "world_size", "missing"), [(0, 2, "rank 1"), (0, 9, "ranks 1-8"), (1, 2, "rank 0")])
def test_lone_rank_prints_missing_ranks_and_address(
    rank: int, world_size: int, missing: str, port: int, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(TrainingError, match=rf"^parallel\.join_timeout: {missing} did not .* 127\.0\.0\.1:{port} "):
        open_store(rank, world_size, timeout=0.4)
    lines = capfd.readouterr().err.splitlines()
    assert 1 <= len(lines) <= 3  # sparse
    for line in lines:
        assert re.match(rf"rank {rank} of {world_size} on \S+ waits for {missing} at 127\.0\.0\.1:{port} \(", line)


def test_stop_request_ends_the_wait(port: int) -> None:
    with pytest.raises(TrainingError, match="rank 1"):
        open_store(0, 2, timeout=60, stop_requested=lambda: True)


def test_ranges_are_short() -> None:
    assert ranges([1]) == "1"
    assert ranges([1, 4, 5, 6, 7]) == "1, 4-7"
    assert ranges(range(0, 100, 2)) == "0, 2, 4, 6, 8, 10, 12, 14, ..."


@pytest.mark.slow
@pytest.mark.parametrize("world", ["env", "slurm"])
def test_sigterm_ends_a_lone_rank_that_waits(world: str, tmp_path: Path, port: int) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "2"}
    if world == "slurm":
        variables = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "127.0.0.1"}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    path = write_config(tmp_path, train={"packs_per_step": 2})
    run = start_omnizoo(["train", path], **variables, **address)
    assert run.wait_until(lambda: is_listening(port), 120)
    run.process.send_signal(signal.SIGTERM)
    result = run.wait(30)
    assert result.code == 1
    assert result.stderr == "error: stopped by a signal while rank 0 waited for rank 1\n"


def is_listening(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.slow
@pytest.mark.long
def test_lone_rank_of_torchrun_prints_what_it_waits_for_after_10_seconds(tmp_path: Path, port: int) -> None:
    """Two nodes with one rank each. The agent of the second node meets that of the first, but its rank never starts."""
    path = write_config(tmp_path, train={"packs_per_step": 2})
    torchrun = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1"]
    python = sys.executable
    nodes = [
        Running([python, *torchrun, f"--master-port={port}", f"--node-rank={node}", *command], {})
        for node, command in enumerate(
            [["-m", "omnizoo", "train", str(path)], ["--no-python", "sleep", "300"]],
        )
    ]
    assert nodes[0].wait_until(lambda: "waits for rank 1 at 127.0.0.1" in nodes[0].output(), 120)
    for node in nodes:
        node.kill()


@pytest.mark.slow
def test_join_timeout_is_one_line(tmp_path: Path, port: int) -> None:
    path = write_config(tmp_path, train={"packs_per_step": 2})
    world = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    result = run_omnizoo(["train", path, "--parallel.join_timeout", "1.5"], timeout=120, **world)
    assert (result.code, result.stderr.count("\n")) == (1, 1)
    assert result.stderr.startswith(f"error: parallel.join_timeout: rank 0 did not connect to 127.0.0.1:{port} ")
