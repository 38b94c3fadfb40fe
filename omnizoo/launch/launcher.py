"""Start ranks on this machine, forward signals to them, and return the exit code of the first rank that fails.

torchrun is not used, because its agent exits with code 1 after a graceful stop by SIGTERM, and takes seconds to start.
This launcher does not import torch, and it waits for signals instead of polling. If it is killed, all ranks end, too.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import psutil

from omnizoo.launch.rank_failure import USER_ERROR, failure_message, first_failure
from omnizoo.launch.stderr import CRASH, ERROR_FD, print_error
from omnizoo.parallel.parent_death import IS_LINUX, death_signal, end_with_torchrun
from omnizoo.reporting.start_clock import LAUNCHED_AT

# Environment variables that contain the number of an inherited file descriptor.
LAUNCHER_FD = "OMNIZOO_LAUNCHER_FD"  # read end of a pipe that closes when the launcher ends
STORE_FD = "OMNIZOO_STORE_FD"  # socket that listens on MASTER_PORT; only set for rank 0
GRACE = 5.0  # seconds for the other ranks to exit on their own after one has failed


def launch(
    args: Sequence[str], nproc: int, command: Sequence[str] = (sys.executable, "-m", "omnizoo"), grace: float = GRACE
) -> int:
    """Run `command args` as `nproc` ranks and wait for all of them.

    Signals stay blocked after the call, so the caller should exit.

    Args:
        args: Arguments of the command.
        nproc: Number of ranks.
        command: The program to run.
        grace: Seconds to wait for the other ranks after one has failed, before they are killed.

    Returns:
        The exit code for this process.
    """
    # Signals are blocked, and sigwait receives them one at a time, so no signal is lost between two system calls. A
    # signal that is already ignored, as in background jobs of a script, stays ignored.
    stop_signals = {s for s in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(s) is not signal.SIG_IGN}
    watched_signals = stop_signals | {signal.SIGCHLD, signal.SIGALRM}
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, watched_signals)
    error_reader, error_writer = os.pipe()
    os.set_blocking(error_reader, False)
    processes = _start([*command, *args], nproc, error_writer, old_mask)
    ranks = _Ranks(processes, error_reader)

    while ranks.alive:
        ranks.handle_signal(signal.sigwait(watched_signals))
        failed = ranks.collect_ended()
        ranks.collect_messages()
        if failed and not ranks.failures:
            signal.setitimer(signal.ITIMER_REAL, grace)  # SIGALRM then kills ranks that still wait for the failed rank
        # If several ranks ended between two checks, their order is unknown. A rank with a user error or a signal is
        # then treated as the first, because other exit codes usually come from connections that were lost afterwards.
        ranks.failures += sorted(failed, key=lambda failure: (failure[1] != USER_ERROR, failure[1] < 128))
    return ranks.exit_code()


@dataclass
class _Ranks:
    """The ranks on this machine: the running processes, and the failures of ranks that have ended."""

    alive: dict[int, subprocess.Popen[bytes]]  # running processes, by rank
    error_reader: int  # read end of the pipe that ranks write errors to
    failures: list[tuple[int, int]] = field(default_factory=list)  # (rank, exit code), without ranks killed here
    printed: set[str] = field(default_factory=set)  # messages that were already printed
    crashes: list[str] = field(default_factory=list)  # messages of ranks that end with a traceback, oldest first
    is_stopping: bool = False  # whether a stop signal was forwarded
    is_killed: bool = False  # whether the launcher has killed the ranks

    def handle_signal(self, received: int) -> None:
        """Forward the first SIGTERM or SIGINT to the ranks. Kill them on another SIGINT or on SIGALRM."""
        if received in (signal.SIGTERM, signal.SIGINT) and not self.is_stopping:
            self.is_stopping = True
            if received == signal.SIGINT:
                print("stopping; press Ctrl-C again to end all ranks without saving", file=sys.stderr, flush=True)
            for child in self.alive.values():
                child.send_signal(received)
        elif received in (signal.SIGALRM, signal.SIGINT):
            self.is_killed = True
            for child in self.alive.values():
                os.killpg(child.pid, signal.SIGKILL)  # kill the rank and its loader workers

    def collect_ended(self) -> list[tuple[int, int]]:
        """Remove ranks that have ended. Return (rank, exit code) of failed ranks that the launcher did not kill."""
        failed = []
        for rank, child in list(self.alive.items()):
            code = _exit_code(child)
            if code is None:
                continue
            del self.alive[rank]
            if code < 0:
                os.killpg(child.pid, signal.SIGKILL)  # end the processes that the rank has started, such as compilers
            if code != 0 and not (self.is_killed and code == -signal.SIGKILL):
                failed.append((rank, 128 - code if code < 0 else code))
        return failed

    def collect_messages(self) -> None:
        """Print each distinct error that ranks have reported, and store reports of crashes for `exit_code`."""
        for message in _read_messages(self.error_reader):
            if message.startswith(CRASH):
                self.crashes.append(message.removeprefix(CRASH))
            elif message not in self.printed and message not in self.crashes:
                print_error(message)
                self.printed.add(message)

    def exit_code(self) -> int:
        """Return the exit code of the rank that failed first. Print the reason if no rank has printed it."""
        if not self.failures:
            return 128 + signal.SIGINT if self.is_killed else 0
        rank, code = first_failure(self.failures)
        message = failure_message(rank, code, self.crashes, has_printed=bool(self.printed))
        if message is not None:
            print_error(message)
        return code


def _start(
    command: list[str], nproc: int, error_writer: int, signal_mask: set[int | signal.Signals]
) -> dict[int, subprocess.Popen[bytes]]:
    """Start the processes of all ranks.

    Args:
        command: Program and arguments.
        nproc: Number of ranks.
        error_writer: Write end of the pipe that ranks write errors to.
        signal_mask: Signals that the ranks block.

    Returns:
        The process of each rank.
    """
    launcher, _ = os.pipe()  # ranks detect that it closes when this process ends; nothing is written to it
    world_env = {
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": "127.0.0.1",
        LAUNCHED_AT: str(psutil.Process().create_time()),
    }
    num_threads = max(1, len(os.sched_getaffinity(0)) // nproc)
    default_env = {"OMP_NUM_THREADS": str(num_threads)}
    processes = {}
    # The launcher binds the port and rank 0 inherits the socket, so no other program can bind the port in between. The
    # launcher closes its copy once rank 0 has started, because connections to a dead rank 0 must fail at once.
    set_death_signal = death_signal()
    launcher_id = os.getpid()

    def prepare_rank() -> None:
        """Restore the signal mask, and let Linux kill this rank if the launcher dies. Runs in the new process."""
        signal.pthread_sigmask(signal.SIG_SETMASK, signal_mask)
        if IS_LINUX:
            set_death_signal(launcher_id)

    with socket.create_server(("127.0.0.1", 0), backlog=1024) as store:
        world_env["MASTER_PORT"] = str(store.getsockname()[1])
        for rank in range(nproc):
            rank_env = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                LAUNCHER_FD: str(launcher),
                ERROR_FD: str(error_writer),
            }
            inherited_fds = [launcher, error_writer]
            if rank == 0:
                rank_env[STORE_FD] = str(store.fileno())
                inherited_fds.append(store.fileno())
            processes[rank] = subprocess.Popen(
                command,
                env=default_env | os.environ | world_env | rank_env,
                pass_fds=inherited_fds,
                start_new_session=True,  # Ctrl-C sends SIGINT to the launcher only
                preexec_fn=prepare_rank,
            )
    return processes


def _exit_code(child: subprocess.Popen[bytes]) -> int | None:
    """Return the exit code of a process, or minus the signal that killed it; None while it runs.

    The process stays a zombie. Otherwise the system could reuse its id. The process group has the same id.
    """
    end = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if end is None:
        return None
    return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status


def _read_messages(fd: int) -> list[str]:
    """Return the messages that ranks have written to the pipe `fd`. Each message ends with a NUL byte.

    Ranks write before they end, so all messages of a rank that has ended are in the pipe.
    """
    try:
        return os.read(fd, 2**20).decode().split("\0")[:-1]
    except BlockingIOError:
        return []


def watch_launcher() -> None:
    """End this process when its launcher or torchrun ends. Do nothing if neither of them has started it."""
    end_with_torchrun()
    if LAUNCHER_FD not in os.environ:
        return
    fd = int(os.environ[LAUNCHER_FD])

    def wait() -> None:
        os.read(fd, 1)  # blocks until the pipe closes
        os._exit(1)

    threading.Thread(target=wait, name="watch-launcher", daemon=True).start()
