"""The last line of a failed run names the rank that failed first and the cause."""

import signal
from pathlib import Path

import psutil
import pytest
from failing_module import FAILURES
from processes import Running, run_omnizoo, start_omnizoo
from tiny import read_steps, write_config

from omnizoo.cli.main import main
from omnizoo.data.loading.workers import exit_message
from omnizoo.launch.rank_failure import expected_failure

MODEL = {"module": "failing_module:FailingModel", "config": {"vocab_size": 512, "width": 16, "heads": 2, "layers": 1}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("failure", "expected", "has_traceback"),
    [
        pytest.param(
            "device",
            ("rank 1", "CUDA out of memory", "data.pack_tokens", "recompute"),
            False,
            marks=pytest.mark.long,
        ),
        ("bug", ("rank 1", "IndexError: row 7 of a table of 5"), True),
    ],
)
def test_last_line_names_failed_rank_and_cause(
    failure: str, expected: tuple[str, ...], has_traceback: bool, tmp_path: Path
) -> None:
    path = write_config(tmp_path, model=MODEL, train={"steps": 3, "packs_per_step": 2})
    # The only run of `make test` whose launcher and ranks start cold, as those of users do.
    result = run_omnizoo(["train", path, "--nproc", 2], cold=True, FAILS_WITH=failure)
    *earlier_lines, last_line = result.stderr.splitlines()
    assert result.code == 1
    assert last_line.startswith("error: ")
    for part in expected:
        assert part in last_line, result.stderr
    assert ("IndexError" in "".join(earlier_lines)) == has_traceback


@pytest.mark.parametrize("failure", ["memory", "device", "allocator"])
def test_out_of_memory_errors_are_one_line_with_advice(failure: str) -> None:
    line = expected_failure(3, FAILURES[failure])
    assert line is not None
    assert "\n" not in line
    assert line.startswith("rank 3")
    assert "out of memory" in line
    assert "parallel.dp_shard" in line


def test_one_process_out_of_memory_prints_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise FAILURES["allocator"]

    monkeypatch.setattr("omnizoo.training.loop.train_step", fail)
    assert main(["train", str(write_config(tmp_path))]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "rank 0" in err
    assert "out of memory" in err
    assert "137438953472 bytes" in err


def worker_of(run: Running, rank: int) -> psutil.Process:
    """Return a loader worker of a rank: a child of the fork server that the rank started."""
    process = sorted(run.ranks(), key=psutil.Process.create_time)[rank]
    return next(child for child in process.children(recursive=True) if child.ppid() != process.pid)


@pytest.mark.slow
def test_last_line_names_killed_loader_worker_and_rank(tmp_path: Path) -> None:
    path = write_config(tmp_path, train={"steps": 100_000, "packs_per_step": 2}, data={"workers": 1})
    run = start_omnizoo(["train", path, "--nproc", 2])
    assert run.wait_until(lambda: len(read_steps(tmp_path / "run")) > 2, 240)
    worker_of(run, 1).send_signal(signal.SIGKILL)
    result = run.wait(240)
    last = result.stderr.splitlines()[-1]
    assert result.code == 1
    assert last.startswith(
        "error: rank 1: data.workers: a loader worker was killed (SIGKILL), as the kernel does when memory runs"
    )
    assert "data.workers" in last


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (-signal.SIGKILL, "killed (SIGKILL)"),
        (-signal.SIGBUS, "/dev/shm"),
        (-signal.SIGSEGV, "Segmentation fault"),
        (1, "a loader worker ended with exit code 1"),
    ],
)
def test_every_exit_of_a_worker_is_explained(code: int, expected: str) -> None:
    assert expected in exit_message(code)
    assert "data.workers" in exit_message(code)
