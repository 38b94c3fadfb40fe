"""No process outlives its run, even if a loader worker is stopped and the launcher or a rank is killed.

A stopped worker stands for a stuck one: neither reacts to SIGTERM.
"""

import os
import signal
import socket
import sys
import threading
from pathlib import Path

import psutil
import pytest
from processes import Running, start_omnizoo
from tiny import read_steps, write_config

from omnizoo.data.loading import workers

SECONDS_TO_END = 10  # of all processes, after the launcher or a rank was killed
STEPS = {"steps": 100_000, "packs_per_step": 2}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-addr=127.0.0.1"]


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def survivors(processes: list[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Return the processes that are still alive after `seconds`. They are killed."""
    pause = threading.Event()
    alive = processes
    for _ in range(int(seconds / 0.02)):
        alive = [process for process in alive if is_alive(process)]
        if not alive:
            break
        pause.wait(0.02)
    for process in alive:
        process.kill()
    return alive


def workers_of(rank: psutil.Process) -> list[psutil.Process]:
    """Return the loader workers of a rank: children of the fork server that the rank has started."""
    return [child for child in rank.children(recursive=True) if child.ppid() != rank.pid]


def trained(folder: Path, start: str) -> tuple[Running, list[psutil.Process]]:
    """Start a run with loader workers. Return it, and its ranks, after three steps."""
    path = write_config(folder, train=STEPS, data={"workers": 2})
    if start == "torchrun":
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        run = Running([*TORCHRUN, f"--master-port={port}", "-m", "omnizoo", "train", str(path)], {})
    else:
        run = start_omnizoo(["train", path] + (["--nproc", 2] if start == "launcher" else []))
    assert run.wait_until(lambda: len(read_steps(folder / "run")) > 2, 300)
    return run, [run.process] if start == "one process" else run.ranks()


def saved_steps(folder: Path) -> list[int]:
    return [int(path.name.removeprefix("step_")) for path in (folder / "run" / "checkpoints").glob("step_*")]


@pytest.mark.slow
def test_killed_launcher_leaves_no_process_behind_although_a_worker_is_stopped(tmp_path: Path) -> None:
    run, ranks = trained(tmp_path, "launcher")
    tree = run.tree()
    workers_of(ranks[1])[0].suspend()
    run.process.kill()
    assert survivors(tree, SECONDS_TO_END) == []


@pytest.mark.slow
def test_sigterm_saves_and_ends_a_run_whose_worker_is_stopped(tmp_path: Path) -> None:
    run, ranks = trained(tmp_path, "one process")
    tree = run.tree()
    workers_of(ranks[0])[0].suspend()
    run.process.send_signal(signal.SIGTERM)
    result = run.wait(60)
    assert result.code == 0, result.stderr
    assert saved_steps(tmp_path) == [len(read_steps(tmp_path / "run"))]
    assert "stopped by SIGTERM after step" in result.stdout
    assert survivors(tree, SECONDS_TO_END) == []


class StoppedWorker:
    """A worker process that ignores SIGTERM."""

    sentinel = -1
    is_killed = False

    def is_alive(self) -> bool:
        return not self.is_killed

    def terminate(self) -> None:
        pass

    def kill(self) -> None:
        self.is_killed = True


def test_second_interrupt_while_workers_end_still_kills_a_stopped_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(workers, "wait", interrupt)
    worker = StoppedWorker()
    with pytest.raises(KeyboardInterrupt):
        workers.end_processes([worker], os.getpid())
    assert worker.is_killed


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("start", ["one process", "launcher", "torchrun"])
@pytest.mark.parametrize("end", ["SIGTERM", "SIGINT twice", "killed starter", "killed rank"])
@pytest.mark.parametrize("is_stuck", [True, False], ids=["stuck", "healthy"])
def test_no_process_outlives_the_run(start: str, end: str, is_stuck: bool, tmp_path: Path) -> None:
    run, ranks = trained(tmp_path, start)
    tree = run.tree()
    if is_stuck:
        workers_of(ranks[-1])[0].suspend()
    if end == "SIGTERM":
        run.process.terminate()
    elif end == "SIGINT twice":
        run.process.send_signal(signal.SIGINT)
        threading.Event().wait(0.5)
        if is_alive(run.process):
            run.process.send_signal(signal.SIGINT)
    elif end == "killed starter":
        run.process.kill()
    else:
        ranks[-1].kill()
    # A run that saves, and peers of a killed rank, take some seconds before they end.
    assert survivors(tree, SECONDS_TO_END if end == "killed starter" else 60) == []
    if end == "SIGTERM":
        assert saved_steps(tmp_path) == [len(read_steps(tmp_path / "run"))]


@pytest.mark.slow
@pytest.mark.long
def test_killed_launcher_ends_ranks_that_are_stopped(tmp_path: Path) -> None:
    run, ranks = trained(tmp_path, "launcher")
    tree = run.tree()
    ranks[0].suspend()
    run.process.kill()
    assert survivors(tree, SECONDS_TO_END) == []
