"""Data a step ahead: the same steps and states as by hand, errors when their step is due, and no hang at the end."""

import json
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from processes import Forked, Running, run_on_ranks
from tiny import write_config

from omnizoo.balancing.balancer import Balancer
from omnizoo.balancing.prefetch import Prefetcher, next_step
from omnizoo.balancing.step_data import StepData
from omnizoo.config.errors import UserError
from omnizoo.config.load import load_config
from omnizoo.data.loading.lane_stream import LoadedStep
from omnizoo.data.loading.loader import Loader
from omnizoo.parallel.mesh import build_mesh
from omnizoo.parallel.process import Process, process_group
from omnizoo.parallelize.parallelize import parallelize_model
from omnizoo.training.setup import build_bundle

STEPS = 4


def build(process: Process, path: Path, workers: int) -> tuple[Balancer, Loader]:
    config = load_config(path, ["--data.workers", str(workers)])
    mesh = build_mesh(config, process)
    assembled = build_bundle(config)
    loader = assembled.loader(mesh)
    parallelize_model(assembled.model, mesh, config)
    return Balancer(assembled.model, mesh, config), loader


def seen(data: StepData, state: dict[str, Any]) -> str:
    batches = [[batch.sample_ids, batch.columns["input_ids"].tolist(), batch.packs] for batch in data.micro_batches]
    return json.dumps([batches, data.totals.targets, data.counters, data.imbalance, state])


class Spoilt:
    """A loader that fails at its third step, on one rank only."""

    def __init__(self, loader: Loader, error: Exception | None) -> None:
        self.loader, self.error, self.workers = loader, error, loader.workers
        self.start, self.counters, self.state_dict = loader.start, loader.counters, loader.state_dict
        self.close, self.stop, self.read = loader.close, loader.stop, 0

    def next_step(self) -> LoadedStep:
        self.read += 1
        if self.read == 3 and self.error is not None:
            raise self.error
        return self.loader.next_step()


def on_ranks(process: Process, path: Path) -> None:
    for workers in (0, 2):
        balancer, loader = build(process, path, workers)
        by_hand = [seen(next_step(loader, balancer), loader.state_dict()) for _ in range(STEPS)]
        loader.close()
        loader = build(process, path, workers)[1]
        with Prefetcher(loader, balancer, STEPS) as ahead:
            assert [seen(ahead.next(), ahead.state) for _ in range(STEPS)] == by_hand
            time.sleep(0.2)
            assert loader.state_dict() == ahead.state  # nothing is read beyond the last step
        assert "data" not in [thread.name for thread in threading.enumerate()]  # it could abort the end of Python

        loader = build(process, path, workers)[1]
        spoilt = Spoilt(loader, UserError("a spoilt row") if process.rank == process.world_size - 1 else None)
        with Prefetcher(spoilt, balancer, STEPS) as ahead:  # type: ignore[arg-type]  # all that is asked of a loader
            assert [seen(ahead.next(), ahead.state) for _ in range(2)] == by_hand[:2]
            with pytest.raises(UserError, match="a spoilt row"):
                ahead.next()

        loader = build(process, path, workers)[1]
        with Prefetcher(Spoilt(loader, IndexError("a bug")), balancer, STEPS) as ahead:  # type: ignore[arg-type]  # as above
            assert [seen(ahead.next(), ahead.state) for _ in range(2)] == by_hand[:2]
            with pytest.raises(IndexError, match="a bug"):
                ahead.next()


def test_prefetched_steps_of_one_process_match_direct_loading(tmp_path: Path) -> None:
    path = write_config(tmp_path)
    with process_group() as process:
        on_ranks(process, path)


@pytest.mark.slow
def test_prefetched_steps_of_two_ranks_match_direct_loading(tmp_path: Path) -> None:
    result = run_on_ranks(on_ranks, 2, write_config(tmp_path))
    assert result.code == 0, result.stdout + result.stderr


def leave_while_the_thread_waits(path: Path) -> None:
    """Rank 1 never asks for its third step, so rank 0's thread waits for it when rank 0 ends."""
    with process_group() as process:
        balancer, loader = build(process, path, 0)
        with Prefetcher(loader, balancer, STEPS) as ahead:
            ahead.next()
            if process.rank == 1:
                time.sleep(500)  # until it is killed
            ahead.next()
            time.sleep(0.5)
            sys.exit(2)


@pytest.mark.slow
def test_rank_can_end_while_its_prefetch_thread_waits(tmp_path: Path) -> None:
    path = write_config(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    code = f"import sys, pathlib; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_prefetch as test; "
    code += f"test.leave_while_the_thread_waits(pathlib.Path({str(path)!r}))"
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    first = Running([sys.executable, "-c", code], world | {"RANK": "0"})  # Python itself has to end, so it starts cold
    second = Forked([sys.executable, "-c", code], world | {"RANK": "1"})
    result = first.wait(400)
    assert second.process.is_running()  # asleep: it was not what ended the first one
    second.kill()
    second.wait(30)
    assert result.code == 2, result.stderr
    assert "terminate" not in result.stderr
