"""Processes of a test, each with a bound: `omnizoo` as a user runs it, and Python functions on N ranks.

On a timeout the stacks of every process of the run are printed before it is killed: a hang is then a finding.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path

import psutil

TESTS = Path(__file__).parent
WORLD = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_ID")
STREAMS = ("stdout", "stderr")
IMPORTED = ["pytest", "hypothesis", "omnizoo.training.run", "omnizoo.verification.compare"]


@dataclass(frozen=True)
class Result:
    code: int
    stdout: str
    stderr: str


class Running:
    """A started command and all processes below it. Output is collected by threads, so that no pipe ever fills."""

    def __init__(self, command: Sequence[str], env: dict[str, str]) -> None:
        clean = {key: value for key, value in os.environ.items() if key not in WORLD}
        path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
        self.process = psutil.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=clean | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "COLUMNS": "200"} | env,
        )
        self.command = " ".join(command)
        self._text: dict[str, list[str]] = {"stdout": [], "stderr": []}
        self._readers = [threading.Thread(target=self._read, args=(name,)) for name in self._text]
        for reader in self._readers:
            reader.start()

    def _read(self, name: str) -> None:
        self._text[name].extend(getattr(self.process, name))

    def tree(self) -> list[psutil.Process]:
        """The command's process and everything it has started, loader workers included."""
        try:
            return [self.process, *self.process.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def ranks(self) -> list[psutil.Process]:
        return list(self.process.children())

    def wait(self, timeout: float) -> Result:
        try:
            code = self.process.wait(timeout)
            for reader in self._readers:
                reader.join(timeout)  # ends when no process holds the pipe any more
            assert not any(reader.is_alive() for reader in self._readers), f"{self.command} left processes behind"
        except psutil.TimeoutExpired:
            stacks = self.stacks()
            self.kill()
            raise AssertionError(f"{self.command} took more than {timeout} s\n{stacks}\n{self.output()}") from None
        return Result(code, "".join(self._text["stdout"]), "".join(self._text["stderr"]))

    def wait_until(self, reached: Callable[[], bool], timeout: float) -> bool:
        """Look until `reached()`; False if the process ended before that. The look-up is cheap and the wait bounded."""
        pause, looks = 0.002, int(timeout / 0.002)
        ended = threading.Event()
        for _ in range(looks):
            if reached():
                return True
            if self.process.poll() is not None:
                return reached()
            ended.wait(pause)
        stacks = self.stacks()
        self.kill()
        raise AssertionError(f"{self.command}: not reached within {timeout} s\n{stacks}\n{self.output()}")

    def output(self) -> str:
        return "".join(self._text["stdout"][-40:] + self._text["stderr"][-40:])

    def stacks(self) -> str:
        return stacks_of(process.pid for process in self.tree())

    def kill(self) -> None:
        """SIGKILL to all of the tree, at one moment: it is stopped first, so that nobody sees another one end."""
        tree = self.tree()
        for act in ("suspend", "kill"):
            for process in tree:
                with suppress(psutil.NoSuchProcess):
                    getattr(process, act)()
        _, alive = psutil.wait_procs(tree, timeout=30)
        assert not alive, f"{alive} survived SIGKILL"


def stacks_of(pids: Iterable[int | None]) -> str:
    dumps = []
    for pid in pids:
        spy = [str(Path(sys.executable).with_name("py-spy")), "dump", "--pid", str(pid)]
        done = subprocess.run(spy, capture_output=True, text=True, timeout=30, check=False)
        dumps.append(f"--- pid {pid}\n{done.stdout}{done.stderr}")
    return "\n".join(dumps)


def start_omnizoo(args: Sequence[object], **env: str) -> Running:
    return Running([sys.executable, "-m", "omnizoo", *map(str, args)], env)


def run_omnizoo(args: Sequence[object], timeout: float = 240, **env: str) -> Result:
    """`omnizoo args`, to its end."""
    return start_omnizoo(args, **env).wait(timeout)


def run_on_ranks(function: Callable[..., None], nproc: int, *args: object, timeout: float = 300) -> Result:
    """`function(process, *args)` on `nproc` ranks of one process group, forked from the server of this test session.

    The function lives in a test module and leaves what it found in files.
    """
    start_server()
    context = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory() as folder:
        given = [(rank, nproc, Path(folder), function, args) for rank in range(nproc)]
        ranks = [context.Process(target=_rank, args=rank) for rank in given]
        for rank in ranks:
            rank.start()
        until, alive = time.monotonic() + timeout, ranks
        try:
            while alive and not any(rank.exitcode for rank in ranks):
                if not wait([rank.sentinel for rank in alive], max(0, until - time.monotonic())):
                    stacks = stacks_of(rank.pid for rank in alive)
                    raise AssertionError(f"{function.__name__} took more than {timeout} s on {nproc} ranks\n{stacks}")
                alive = [rank for rank in alive if rank.exitcode is None]
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()
        code = next((rank.exitcode for rank in ranks if rank.exitcode not in (0, -signal.SIGKILL)), 0)
        stdout, stderr = (
            "".join(file.read_text() for file in sorted(Path(folder).glob(f"*.{name}"))) for name in STREAMS
        )
    return Result(code, stdout, stderr)


def start_server() -> None:
    """What ranks are forked from: it has imported what they need, and so they start in a blink."""
    multiprocessing.set_forkserver_preload(IMPORTED)
    forkserver.ensure_running()  # if it is not


def _rank(rank: int, nproc: int, folder: Path, function: Callable[..., None], args: tuple[object, ...]) -> None:
    import torch

    from omnizoo.parallel.process import process_group

    for number, name in enumerate(STREAMS, start=1):
        os.dup2(os.open(folder / f"{rank}.{name}", os.O_WRONLY | os.O_CREAT), number)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(nproc), "COLUMNS": "200"}
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(str(folder / "store"), nproc)
    try:
        with process_group((rank, nproc, rank), store) as process:
            function(process, *args)
    except BaseException:  # noqa: BLE001 - whatever it is, the test is to show it
        traceback.print_exc()
        os._exit(1)  # at once: others may wait for this rank


def train_in_this_world(args: Sequence[object]) -> int:
    """`omnizoo train args` in this process."""
    from omnizoo.cli.main import main

    stay_in_this_world()
    return main(["train", *map(str, args)])


def train_on_ranks(args: Sequence[object], nproc: int) -> Result:
    """`omnizoo train args` on ranks that start in a blink: where it is not the start that is tested."""
    return run_on_ranks(_train, nproc, list(map(str, args)))


def _train(process: object, args: Sequence[str]) -> None:
    code = train_in_this_world(args)
    assert code == 0, f"exit code {code}"


def stay_in_this_world() -> None:
    """Let `omnizoo.train` find the world that a rank has joined already, which can be done only once."""
    from omnizoo.parallel import process
    from omnizoo.training import run

    @contextmanager
    def joined(**_):
        import torch

        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        yield process.Process(rank, world, rank, torch.device("cpu"))

    run.process_group = joined if "RANK" in os.environ else process.process_group
