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

import forked
import psutil

TESTS = Path(__file__).parent
WORLD = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_ID")
STREAMS = ("stdout", "stderr")
IMPORTED = [
    "pytest",
    "hypothesis",
    "omnizoo.training.loop",
    "omnizoo.verification.compare",
    "omnizoo.cli.train",
    "transformers.models.qwen3.modeling_qwen3",
]


@dataclass(frozen=True)
class Result:
    code: int
    stdout: str
    stderr: str


class Running:
    """A started command and all processes below it. Output is collected by threads, so that no pipe ever fills."""

    def __init__(self, command: Sequence[str], env: dict[str, str]) -> None:
        self.command = " ".join(command)
        self.process, streams = self._start(command, environment(env))
        self._text: dict[str, list[str]] = {name: [] for name in STREAMS}
        self._readers = [
            threading.Thread(target=self._text[name].extend, args=(stream,))
            for name, stream in zip(STREAMS, streams, strict=True)
        ]
        for reader in self._readers:
            reader.start()

    def _start(self, command: Sequence[str], env: dict[str, str]) -> tuple[psutil.Process, Iterable[Iterable[str]]]:
        pipe = subprocess.PIPE
        self._popen = psutil.Popen(command, stdout=pipe, stderr=pipe, text=True, env=env)
        return self._popen, (self._popen.stdout, self._popen.stderr)

    def code(self, timeout: float = 0) -> int | None:
        """How the command has ended; None as long as it has not."""
        try:
            return self._popen.wait(timeout)
        except psutil.TimeoutExpired:
            return None

    def tree(self) -> list[psutil.Process]:
        """The command's process and everything it has started, loader workers included."""
        try:
            return [self.process, *self.process.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def ranks(self) -> list[psutil.Process]:
        return list(self.process.children())

    def wait(self, timeout: float) -> Result:
        if (code := self.code(timeout)) is None:
            stacks = self.stacks()
            self.kill()
            raise AssertionError(f"{self.command} took more than {timeout} s\n{stacks}\n{self.output()}")
        for reader in self._readers:
            reader.join(timeout)  # ends when no process holds the pipe any more
        assert not any(reader.is_alive() for reader in self._readers), f"{self.command} left processes behind"
        return Result(code, "".join(self._text["stdout"]), "".join(self._text["stderr"]))

    def wait_until(self, reached: Callable[[], bool], timeout: float) -> bool:
        """Look until `reached()`; False if the process ended before that. The look-up is cheap and the wait bounded."""
        pause, looks = 0.002, int(timeout / 0.002)
        ended = threading.Event()
        for _ in range(looks):
            if reached():
                return True
            if self.code() is not None:
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


def environment(env: dict[str, str]) -> dict[str, str]:
    """Of a command: as here, but outside of any world."""
    clean = {key: value for key, value in os.environ.items() if key not in WORLD}
    path = os.pathsep.join([str(TESTS), str(TESTS.parents[1])])
    return clean | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "COLUMNS": "200"} | env


class Forked(Running):
    """`python ...` that starts in a blink, ranks and loader workers included: forked from the server of this test
    session, which has imported what takes seconds."""

    def _start(self, command: Sequence[str], env: dict[str, str]) -> tuple[psutil.Process, Iterable[Iterable[str]]]:
        start_server()
        context = multiprocessing.get_context("forkserver")
        pipes = [context.Pipe(duplex=False) for _ in STREAMS]
        self._forked = context.Process(target=forked.begin, args=(command[1:], env, [end for _, end in pipes]))
        self._forked.start()
        multiprocessing.process._children.discard(self._forked)  # of a test that fails, it is not waited for at the end
        for _, end in pipes:
            end.close()
        return psutil.Process(self._forked.pid), [os.fdopen(os.dup(end.fileno())) for end, _ in pipes]

    def code(self, timeout: float = 0) -> int | None:
        self._forked.join(timeout)
        return self._forked.exitcode


def start_omnizoo(args: Sequence[object], cold: bool = False, **env: str) -> Running:
    """`omnizoo args`. Cold: by the command line, which takes seconds of imports in each process."""
    return (Running if cold else Forked)([sys.executable, "-m", "omnizoo", *map(str, args)], env)


def run_omnizoo(args: Sequence[object], timeout: float = 240, cold: bool = False, **env: str) -> Result:
    """`omnizoo args`, to its end."""
    return start_omnizoo(args, cold, **env).wait(timeout)


def run_script_on_ranks(command: Sequence[object], nproc: int, timeout: float = 240) -> Result:
    """`python command` as each of `nproc` ranks, started by the launcher of `omnizoo`."""
    code = "import sys; from omnizoo.launch.launcher import launch; sys.exit(launch(sys.argv[2:], int(sys.argv[1]), "
    code += "[sys.executable]))"
    return Forked([sys.executable, "-c", code, str(nproc), *map(str, command)], {}).wait(timeout)


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
    from omnizoo.training import setup

    @contextmanager
    def joined(**_):
        import torch

        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        yield process.Process(rank, world, rank, torch.device("cpu"))

    setup.process_group = joined if "RANK" in os.environ else process.process_group
