"""Closed or full output, too few open files, unusable shared memory and a C locale are one line, not a traceback."""

import errno
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fixtures import make_tokenizer
from processes import environment
from tiny import write_config

from omnizoo.config.load import load_config
from omnizoo.data.loading.lane_stream import LoadedStep
from omnizoo.data.loading.loader import build_loader, share_tensors
from omnizoo.data.loading.workers import Workers
from omnizoo.launch.system_limits import explain_limit

ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
OMNIZOO = [sys.executable, "-m", "omnizoo"]


def run_shell(command: str, timeout: float = 240, **env: str) -> subprocess.CompletedProcess[bytes]:
    """Run a shell command in which `omnizoo` is the command of this checkout."""
    script = f'omnizoo() {{ "{sys.executable}" -m omnizoo "$@"; }}\n{command}'
    clean = environment(dict(env))
    clean.pop("PYTHONIOENCODING", None)
    return subprocess.run(["bash", "-c", script], env=clean, capture_output=True, timeout=timeout, check=False)


def run_without_reader(args: list[str]) -> tuple[int, bytes]:
    """Run a command whose standard output is a pipe that nobody reads. Return the exit code and stderr."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [*OMNIZOO, *args], env=environment({}), stdout=writer, stderr=subprocess.PIPE, timeout=240, check=False
    )
    os.close(writer)
    return done.returncode, done.stderr


@pytest.mark.parametrize("args", [["--help"], ["launch", "CONFIG", "--slurm", "--nproc", "1"]])
def test_closed_output_ends_a_command_quietly(args: list[str], tmp_path: Path) -> None:
    path = str(write_config(tmp_path))
    assert run_without_reader([path if arg == "CONFIG" else arg for arg in args]) == (141, b"")


def test_full_output_is_one_line() -> None:
    done = run_shell("omnizoo --help > /dev/full")
    assert done.returncode == 1
    assert done.stderr.startswith(b"error: standard output: No space left on device.")
    assert done.stderr.count(b"\n") == 1


def test_full_error_output_keeps_the_exit_code() -> None:
    assert run_shell("omnizoo trian 2> /dev/full").returncode == 2


@pytest.mark.slow
def test_run_continues_without_reader_of_its_output(tmp_path: Path) -> None:
    path = write_config(tmp_path, train={"steps": 2})
    code, err = run_without_reader(["train", str(path)])
    assert code == 0
    assert (tmp_path / "run" / "checkpoints" / "step_00000002").is_dir()
    assert err == b"warning: standard output cannot be written (Broken pipe). The run continues without it.\n"


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("limit", range(8, 18, 2))
def test_too_few_open_files_are_one_line(limit: int, tmp_path: Path) -> None:
    path = write_config(tmp_path, train={"steps": 2})
    done = run_shell(f"ulimit -n {limit}; omnizoo train {path}")
    lines = done.stderr.splitlines()
    assert len(lines) == (1 if done.returncode else 0), lines
    assert all(b"open files" in line for line in lines)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    ("limit", "reason"),
    [
        ("ulimit -n 64;", "Too many open files"),
        ("mount -t tmpfs -o ro tmpfs /dev/shm;", "Read-only file system"),
        ("mount -t tmpfs -o size=16k tmpfs /dev/shm;", "No space left on device"),
    ],
)
def test_run_continues_without_workers_if_they_cannot_be_started(limit: str, reason: str, tmp_path: Path) -> None:
    path = write_config(tmp_path, train={"steps": 2, "packs_per_step": 16}, data={"lanes": 16, "workers": 4})
    command = f"{limit} exec {sys.executable} -m omnizoo train {path} --nproc 2"
    done = run_shell(f"unshare --user --map-root-user --mount bash -c '{command}'")
    assert done.returncode == 0, done.stderr
    assert b"done, 2 steps" in done.stdout
    assert done.stderr.startswith(b"WARNING: data.workers: using 0 instead of 4")
    assert reason.encode() in done.stderr
    assert done.stderr.count(b"\n") == 1


def test_loader_reads_rows_itself_if_shared_memory_is_read_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Workers, "Queue", fail)
    config = load_config(write_config(tmp_path), ["--data.workers", "2"])
    loader = build_loader(config, make_tokenizer(tmp_path / "tokenizer"), 0, 1)
    with caplog.at_level(logging.WARNING):
        assert len(loader.next_step().packs) == 8
    (line,) = [record.getMessage() for record in caplog.records if "data.workers" in record.getMessage()]
    assert "Read-only file system" in line
    assert loader.workers == 0


def test_full_shared_memory_becomes_the_error_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)")

    monkeypatch.setattr(torch.Tensor, "share_memory_", fail)
    pack = SimpleNamespace(items=[SimpleNamespace(inputs={"pixels": torch.zeros(4)})])
    error = share_tensors(LoadedStep(packs=[pack])).error  # type: ignore[list-item]
    assert error is not None
    assert error.startswith("data.workers: unable to allocate shared memory")


def test_argument_that_a_c_locale_cannot_represent_is_one_line(tmp_path: Path) -> None:
    done = run_shell(f"omnizoo train {write_config(tmp_path)} --log.dir räume", **ASCII)
    assert done.returncode == 2
    assert done.stderr.startswith(b"error: locale: ")
    assert b"PYTHONUTF8=1" in done.stderr
    assert done.stderr.count(b"\n") == 1


@pytest.mark.slow
@pytest.mark.long
def test_run_folder_that_a_c_locale_cannot_represent_is_one_line(tmp_path: Path) -> None:
    path = write_config(tmp_path, train={"steps": 2}, log={"dir": str(tmp_path / "räume")})
    done = run_shell(f"omnizoo train {path}", **ASCII)
    assert done.returncode == 1
    assert done.stderr.startswith(b"error: rank 0: locale: ")
    assert done.stderr.count(b"\n") == 1


def test_characters_that_the_output_lacks_are_escaped() -> None:
    code = "from omnizoo.launch.output import prepare_streams; prepare_streams(); print('ä')"
    env = environment({"PYTHONIOENCODING": "ascii"})
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, b"\\xe4\n")


def test_causes_of_an_error_are_searched_for_limits() -> None:
    error = RuntimeError("the worker failed")
    error.__cause__ = OSError(errno.EMFILE, "Too many open files")
    assert str(explain_limit(error)).startswith("ulimit -n: ")
    assert explain_limit(RuntimeError("received 0 items of ancillary data")) is not None
    assert explain_limit(RuntimeError("a bug")) is None
