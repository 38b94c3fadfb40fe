"""Start N ranks on this machine, pass signals on to them, and end as they end.

Our own and not torchrun: its agent turns a graceful end after SIGTERM into exit code 1, and takes seconds to start.
This one does not import torch, never polls, and leaves no rank behind, not even when it is killed itself.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence

import psutil

from omnizoo.cli.stderr import CRASH, ERROR_FD, print_error
from omnizoo.training.start_clock import LAUNCHED_AT

LAUNCHER_FD = "OMNIZOO_LAUNCHER_FD"  # reading end of a pipe that ends when the launcher does
STORE_FD = "OMNIZOO_STORE_FD"  # rank 0 only: the listening socket behind MASTER_PORT
GRACE = 5.0  # seconds for the other ranks to notice that one has failed, and to end by themselves
USER_ERROR = 2


def launch(
    args: Sequence[str], nproc: int, command: Sequence[str] = (sys.executable, "-m", "omnizoo"), grace: float = GRACE
) -> int:
    """Run `command args` as `nproc` ranks; returns the exit code for this process, which should end then."""
    # Signals are blocked and taken one by one with sigwait, so that none is lost between two system calls. One that is
    # ignored (in a background job of a script) stays ignored.
    stop = {s for s in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(s) is not signal.SIG_IGN}
    watched = stop | {signal.SIGCHLD, signal.SIGALRM}
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    errors, errors_in = os.pipe()
    os.set_blocking(errors, False)
    alive = _start([*command, *args], nproc, errors_in, unblocked)

    failures: list[tuple[int, int]] = []  # (rank, exit code) as they happen, without the ranks killed here
    shown: set[str] = set()
    crashes: list[str] = []  # what ranks say that end with a traceback, the first of them first
    stopping = killed = False
    while alive:
        received = signal.sigwait(watched)
        if received in stop and not stopping:
            stopping = True
            if received == signal.SIGINT:
                print("stopping; Ctrl-C again ends all ranks at once, without saving", file=sys.stderr, flush=True)
            for child in alive.values():
                child.send_signal(received)
        elif received == signal.SIGALRM or (received == signal.SIGINT and stopping):
            killed = True
            for child in alive.values():
                os.killpg(child.pid, signal.SIGKILL)  # with its loader workers

        ended = {rank: code for rank, child in alive.items() if (code := child.poll()) is not None}
        alive = {rank: child for rank, child in alive.items() if rank not in ended}
        for message in _messages(errors):
            if message.startswith(CRASH):
                crashes.append(message.removeprefix(CRASH))
            elif message not in shown and message not in crashes:
                print_error(message)
                shown.add(message)
        failed = [
            (rank, 128 - code if code < 0 else code)
            for rank, code in ended.items()
            if code != 0 and not (killed and code == -signal.SIGKILL)
        ]
        if failed and not failures:
            signal.setitimer(signal.ITIMER_REAL, grace)  # its SIGALRM ends ranks that wait for the failed one forever
        # Ranks that ended between two looks have no order: a user error or a signal is then the cause, and any other
        # code the lost connection that follows from it.
        failures += sorted(failed, key=lambda failure: (failure[1] != USER_ERROR, failure[1] < 128))

    if not failures:
        return 128 + signal.SIGINT if killed else 0
    # Nothing but the world outside sends these signals, while a rank may abort since another one is gone.
    outside = (128 + number for number in set(signal.Signals) - {signal.SIGABRT})
    causes = ({USER_ERROR}, set(outside))
    rank, code = next((f for codes in causes for f in failures if f[1] in codes), failures[0])
    if code > 128 and not (code == 128 + signal.SIGABRT and crashes):
        memory = " (out of memory?)" if code == 128 + signal.SIGKILL else ""
        print_error(f"rank {rank} was killed by {signal.Signals(code - 128).name}{memory}")
    elif crashes and not shown:
        print_error(crashes[0])  # the others' are that the first one is gone
    elif not shown:  # else a rank has said it better
        print_error(f"rank {rank} exited with code {code}")
    return code


def _start(
    command: list[str], nproc: int, errors: int, unblocked: set[int | signal.Signals]
) -> dict[int, subprocess.Popen[bytes]]:
    launcher, _ = os.pipe()  # nobody writes; the other end stays open, and in this process only, as long as it lives
    world = {"WORLD_SIZE": str(nproc), "LOCAL_WORLD_SIZE": str(nproc), "MASTER_ADDR": "127.0.0.1"}
    world[LAUNCHED_AT] = str(psutil.Process().create_time())
    threads = {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // nproc))}
    ranks = {}
    # Bound here and inherited by rank 0, so that no other program can take the port in between. Closed here once rank 0
    # has it: connecting to a dead rank 0 must fail rather than wait.
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as store:
        world["MASTER_PORT"] = str(store.getsockname()[1])
        for rank in range(nproc):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), LAUNCHER_FD: str(launcher), ERROR_FD: str(errors)}
            fds = [launcher, errors]
            if rank == 0:
                own[STORE_FD] = str(store.fileno())
                fds.append(store.fileno())
            ranks[rank] = subprocess.Popen(
                command,
                env=threads | os.environ | world | own,
                pass_fds=fds,
                start_new_session=True,  # Ctrl-C reaches the launcher alone
                preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, unblocked),
            )
    return ranks


def _messages(fd: int) -> list[str]:
    """What ranks have written to `fd` so far; a rank writes before it ends, so nothing comes after its end."""
    try:
        return os.read(fd, 2**20).decode().split("\0")[:-1]
    except BlockingIOError:
        return []


def watch_launcher() -> None:
    """In a rank of `launch`: end this process when the launcher is gone, however it went. Elsewhere: nothing."""
    if LAUNCHER_FD not in os.environ:
        return
    fd = int(os.environ[LAUNCHER_FD])

    def wait() -> None:
        os.read(fd, 1)  # blocks until the end of the pipe
        os._exit(1)

    threading.Thread(target=wait, name="watch-launcher", daemon=True).start()
