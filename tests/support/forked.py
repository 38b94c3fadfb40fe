"""In a process that was forked and has imported nearly everything: become `python ARGS`, as if it had just started.

What is replaced is `exec` alone. The launcher of `omnizoo` runs as it is, and its ranks are forks of it: sessions,
signals, pipes and exit codes are those of processes that start cold.
"""

import atexit
import importlib
import os
import runpy
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from types import SimpleNamespace


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
        else:
            sys.argv[:] = args
            runpy.run_path(args[0], run_name="__main__")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - what Python does with it
        traceback.print_exc()
        return 1
    return 0


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
