"""Scheduler jobs: ranks find the rendezvous, and the job files of `omnizoo launch` start a run."""

import os
import re
import shlex
import sys
from pathlib import Path
from socket import create_server

import pytest
import yaml
from processes import Forked, Running
from tiny import write_config

from omnizoo.cli.main import main
from omnizoo.config.errors import UserError
from omnizoo.parallel.rendezvous import first_host, meeting_point, place_in_world, ranks_on_node

STEP = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "3", "SLURM_JOB_ID": "4321"}


@pytest.fixture(autouse=True)
def no_master(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT", "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu1", "gpu1"),
        ("gpu1,gpu2", "gpu1"),
        ("gpu[003-006,9],login1", "gpu003"),
        ("gpu[7,12-19]", "gpu7"),
        ("rack[2-3]-gpu[08-11].example", "rack2-gpu08.example"),
        ("a-b-1,a-b-[2-4]", "a-b-1"),
    ],
)
def test_first_node_of_slurm_node_list_is_parsed(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_slurm_step_derives_rendezvous_from_node_and_step(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (STEP | {"SLURM_JOB_NODELIST": "n[01-09]", "SLURM_STEP_NODELIST": "n[02-03]"}).items():
        monkeypatch.setenv(name, value)
    assert place_in_world() == (1, 2, 1)
    host, port = meeting_point(2)
    assert host == "n02"
    assert 1024 < port < 32768
    monkeypatch.setenv("SLURM_STEP_ID", "4")  # two steps of a job may run at the same time
    assert meeting_point(2)[1] != port
    monkeypatch.setenv("MASTER_ADDR", "elsewhere")  # variables of the user take precedence
    monkeypatch.setenv("MASTER_PORT", "1234")
    assert meeting_point(2) == ("elsewhere", 1234)
    monkeypatch.setenv("MASTER_PORT", "70000")
    with pytest.raises(UserError, match=r"^MASTER_PORT\b.*70000"):
        meeting_point(2)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"SLURM_STEP_TASKS_PER_NODE": "8(x2),4", "SLURM_NODEID": "0"}, 8),
        ({"SLURM_STEP_TASKS_PER_NODE": "8(x2),4", "SLURM_NODEID": "1"}, 8),
        ({"SLURM_STEP_TASKS_PER_NODE": "8(x2),4", "SLURM_NODEID": "2"}, 4),
        ({"SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0"}, 2),
        ({"SLURM_STEP_TASKS_PER_NODE": "2", "LOCAL_WORLD_SIZE": "4"}, 4),  # torchrun below srun
        ({"RANK": "1"}, 1),
        ({}, 1),
    ],
)
def test_ranks_on_node_come_from_slurm(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: int
) -> None:
    """Without them, checks of host memory assumed one rank per node under `srun`."""
    for name in ("LOCAL_WORLD_SIZE", "RANK", "SLURM_NODEID", "SLURM_STEP_TASKS_PER_NODE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (STEP | variables).items():
        monkeypatch.setenv(name, value)
    assert ranks_on_node() == expected


def test_batch_script_without_srun_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("SLURM_PROCID", "SLURM_NTASKS"):  # a batch script has no step
        monkeypatch.setenv(name, {"SLURM_PROCID": "0", "SLURM_NTASKS": "16"}[name])
    assert main(["train", str(write_config(tmp_path))]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: Slurm: ")
    assert "16 tasks" in err


@pytest.mark.slow
def test_two_ranks_with_slurm_variables_train_together(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    command = [sys.executable, "-m", "omnizoo", "train", str(config), "--train.steps", "2"]

    # The job id is the process id, so that tests in parallel have different ports.
    shared = STEP | {"SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_JOB_ID": str(os.getpid())}
    ranks = [Forked(command, shared | {"SLURM_PROCID": str(r), "SLURM_LOCALID": str(r)}) for r in range(2)]
    results = [rank.wait(400) for rank in ranks]
    assert [result.code for result in results] == [0, 0], "".join(result.stderr for result in results)
    assert "2/2" in results[0].stdout


def job_file(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Return the output of `omnizoo launch`."""
    assert main(["launch", *argv]) == 0
    return capsys.readouterr().out


def test_slurm_job_file_contains_the_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = str(write_config(tmp_path))
    argv = ["--slurm", "--nodes", "2", "--nproc", "2", "--partition", "gpu", "--train.lr", "1e-3", "--log.dir", "a b"]
    text = job_file(capsys, config, *argv)
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)", text, re.M))
    assert (options["nodes"], options["ntasks-per-node"], options["gpus-per-node"]) == ("2", "2", "2")
    assert (options["partition"], options["job-name"]) == ("gpu", "a-b")
    (command,) = re.findall("^exec srun --kill-on-bad-exit=1 (.*)$", text, re.M)
    assert shlex.split(command) == ["omnizoo", "train", config, "--train.lr", "1e-3", "--log.dir", "a b"]
    assert "gpus-per-node" not in job_file(capsys, config, *argv, "--no-gpus")


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        ([], "one of the arguments --slurm --kubernetes is required"),
        (["--slurm", "--nodes", "0"], "--nodes: 0"),
        (["--slurm", "--nproc", "3"], "train.packs_per_step"),
        (["--slurm", "--nproc", "2", "--parallel.ulysses", "3"], "parallel.ulysses"),
        (["--slurm", "--nproc", "2", "--time", "a day"], "--time: 'a day'"),
        (["--slurm", "--nproc", "2", "--partition", "x\ny"], "--partition: "),
        (["--slurm", "--nproc", "2", "--train.lrr", "1"], "did you mean"),
    ],
)
def test_invalid_arguments_of_launch_print_one_line(
    argv: list[str], error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", str(write_config(tmp_path)), *argv]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert error in err


@pytest.mark.slow
@pytest.mark.long
def test_kubernetes_command_trains_in_two_pods(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two torchrun processes on this machine replace the pods. Only host name and port of the command are changed."""
    config = str(write_config(tmp_path))
    text = job_file(capsys, config, "--kubernetes", "--nodes", "2", "--nproc", "1", "--no-gpus", "--train.steps", "2")
    service, job = yaml.safe_load_all(text)
    pod = job["spec"]["template"]["spec"]
    host = f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    (command,) = pod["containers"][0]["args"]
    assert f"--master-addr={host} " in command
    assert pod["subdomain"] == service["metadata"]["name"]
    with create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    here = command.replace(host, "127.0.0.1").replace("=29500", f"={port}")
    here = here.replace("torchrun", f"{sys.executable} -m torch.distributed.run")
    pods = [Running(["/bin/sh", "-c", here], {"JOB_COMPLETION_INDEX": str(i)}) for i in range(2)]
    results = [pod.wait(180) for pod in pods]
    assert [result.code for result in results] == [0, 0], "".join(result.stderr for result in results)
    assert "2/2" in results[0].stdout
