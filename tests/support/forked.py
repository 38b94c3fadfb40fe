"""In a process that was forked and has imported nearly everything: become `python ARGS`, as if it had just started.

What is replaced is `exec` alone. The launcher of `omnizoo` runs as it is, and its ranks are forks of it: sessions,
signals, pipes and exit codes are those of processes that start cold. The server of a rank's loader workers is a fork of
the rank, too, from before the rank has threads.
"""

import atexit
import fcntl
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.connection import Connection
from types import SimpleNamespace

LAST_FD = 500  # file descriptors that a process inherits have smaller numbers


def begin(args: Sequence[str], env: Mapping[str, str], outputs: Sequence[Connection]) -> None:
    """`outputs` become stdout and stderr."""
    for number, output in enumerate(outputs, start=1):
        os.dup2(output.fileno(), number)
        output.close()
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # a server that loader workers came from first blocks SIGTERM
    # Whoever starts loader workers here starts the server for them, too, as in a new process.
    forkserver._forkserver.__init__()  # type: ignore[attr-defined, misc]
    resource_tracker._resource_tracker.__init__()  # type: ignore[misc]
    from omnizoo.launch import launcher

    launcher.subprocess = SimpleNamespace(Popen=Rank)  # type: ignore[assignment]
    _become(args, env)


def _become(args: Sequence[str], env: Mapping[str, str]) -> None:
    """`python ARGS`, to its end, which is the end of this process."""
    code = 1
    try:
        os.environ.clear()
        os.environ.update(env)
        sys.path[:0] = env["PYTHONPATH"].split(os.pathsep)
        sys.stdout, sys.stderr = (open(number, "w", closefd=False) for number in (1, 2))  # noqa: SIM115
        import torch
        from huggingface_hub import constants

        importlib.reload(constants)  # huggingface_hub reads the environment when it is imported
        torch.set_num_threads(int(env["OMP_NUM_THREADS"]))
        if "RANK" in env or "--nproc" not in args:  # not the launcher, whose children are ranks
            util.spawnv_passfds = SpareProcess(util.spawnv_passfds)
        code = _run(args)
        threading._shutdown()  # type: ignore[attr-defined]  # as Python ends: first threads, then what `atexit` knows
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _run(args: Sequence[str]) -> int:
    try:
        if args[0] == "-m":
            sys.argv[:] = args[1:]
            runpy.run_module(args[1], run_name="__main__", alter_sys=True)
        elif args[0] == "-c":
            sys.argv[:] = ["-c", *args[2:]]
            exec(args[1], vars(sys.modules["__main__"]) | {"__name__": "__main__"})
        else:
            sys.argv[:] = args
            runpy.run_path(args[0], run_name="__main__")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - what Python does with it
        traceback.print_exc()
        return 1
    return 0


class SpareProcess:
    """`multiprocessing.util.spawnv_passfds`: the first fork server is a process that has waited since the start.

    A cold server imports torch and transformers for seconds. A fork at the time of the call would copy locks that
    threads hold.
    """

    def __init__(self, spawn: Callable[..., int]) -> None:
        self.spawn = spawn
        self.socket, other = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            _wait_for_command(other.detach())
        other.close()

    def __call__(self, path: object, args: Sequence[object], passfds: Sequence[int]) -> int:
        command = args[-1]
        if not isinstance(command, str) or "forkserver" not in command or not self.pid:
            return self.spawn(path, args, passfds)
        fds = [1, 2, *passfds]
        blocked = [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())]
        state = {"command": command, "fds": fds, "environment": dict(os.environ), "blocked": blocked}
        message = json.dumps(state).encode()
        socket.send_fds(self.socket, [len(message).to_bytes(8, "big")], fds)
        self.socket.sendall(message)
        self.socket.close()
        pid, self.pid = self.pid, 0
        return pid


def _wait_for_command(socket_fd: int) -> None:
    """Become the process of the command that arrives, with the same numbers of its file descriptors."""
    code = 0
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        connection = socket.socket(fileno=fcntl.fcntl(socket_fd, fcntl.F_DUPFD, LAST_FD))
        os.closerange(3, LAST_FD)  # pipes of the parent, which end when it closes them
        header, fds, *_ = socket.recv_fds(connection, 8, 16)
        if header:
            state = json.loads(connection.recv(int.from_bytes(header, "big"), socket.MSG_WAITALL))
            copies = [fcntl.fcntl(fd, fcntl.F_DUPFD, LAST_FD) for fd in fds]
            os.closerange(3, LAST_FD)
            for fd, number in zip(copies, state["fds"], strict=True):
                os.dup2(fd, number)
                os.close(fd)
            connection.close()
            os.environ.clear()
            os.environ.update(state["environment"])
            sys.modules.pop("omnizoo.parallel.tied_server", None)  # it acts when it is imported
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.pthread_sigmask(signal.SIG_SETMASK, state["blocked"])
            exec(state["command"], {"__name__": "__main__"})
    except SystemExit:
        pass
    except BaseException:  # noqa: BLE001 - what Python does with it
        traceback.print_exc()
        code = 1
    finally:
        os._exit(code)


class Rank:
    """`subprocess.Popen` as the launcher uses it."""

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        pass_fds: Sequence[int],
        start_new_session: bool,
        preexec_fn: Callable[[], object],
    ) -> None:
        self.pid = os.fork()
        if self.pid:
            return
        if start_new_session:
            os.setsid()
        preexec_fn()
        for fd in map(int, os.listdir("/proc/self/fd")):
            if fd > 2 and fd not in pass_fds:
                try:
                    os.close(fd)
                except OSError:  # that of the list itself
                    continue
        _become(command[1:], env)

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)
