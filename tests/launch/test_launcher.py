"""The local launcher, with small scripts as ranks: exit codes, signals, and that no rank survives.

Ranks inherit the stdout of the launcher, so a test waits by reading it: a line reports the progress of a rank, and the
end of the stream means that all ranks have ended.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

LAUNCH = """
import sys
from omnizoo.launch.launcher import launch
sys.exit(launch([], int(sys.argv[1]), command=[sys.executable, "-c", sys.argv[2]], grace=float(sys.argv[3])))
"""
RANK = """
import json, os, select, signal, socket, sys
rank = int(os.environ["RANK"])
def say(*words): os.write(1, (" ".join(map(str, words)) + "\\n").encode())  # in one write
def wait():
    while True: signal.pause()
"""
FOREVER = 500.0  # longer than a test may take


@contextmanager
def launched(nproc: int, rank: str, grace: float = FOREVER, **env: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", LAUNCH, str(nproc), RANK + rank, str(grace)]
    clean = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "RANK", "WORLD_SIZE")}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=clean | env, **pipes) as launcher:
        try:
            yield launcher
        finally:
            launcher.kill()


def run(nproc: int, rank: str, grace: float = FOREVER, **env: str) -> tuple[int, str, str]:
    with launched(nproc, rank, grace, **env) as launcher:
        out, err = launcher.communicate()
        return launcher.returncode, out, err


def test_successful_ranks_exit_with_0_silently():
    assert run(3, "pass") == (0, "", "")


def test_every_rank_gets_rank_and_thread_variables():
    code, out, _ = run(2, "say(json.dumps(dict(os.environ)))")
    ranks = sorted((json.loads(line) for line in out.splitlines()), key=lambda env: env["RANK"])
    assert code == 0
    for i, env in enumerate(ranks):
        assert (env["RANK"], env["LOCAL_RANK"]) == (str(i), str(i))
        assert (env["WORLD_SIZE"], env["LOCAL_WORLD_SIZE"], env["MASTER_ADDR"]) == ("2", "2", "127.0.0.1")
        assert env["OMP_NUM_THREADS"] == str(max(1, len(os.sched_getaffinity(0)) // 2))
        assert ("OMNIZOO_STORE_FD" in env) == (i == 0)


def test_existing_thread_setting_is_kept():
    assert run(2, "assert os.environ['OMP_NUM_THREADS'] == '7'", OMP_NUM_THREADS="7")[0] == 0


CONNECT = """
if rank == 0:
    store = socket.socket(fileno=int(os.environ["OMNIZOO_STORE_FD"]))
    connections = [store.accept()[0] for _ in range(int(os.environ["WORLD_SIZE"]) - 1)]
else:
    peer = socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
"""


def test_rank_0_owns_the_listening_socket_behind_the_master_port():
    talk = "\nif rank: say(peer.recv(5).decode())\nelse: [c.sendall(b'hello') for c in connections]"
    assert run(3, CONNECT + talk) == (0, "hello\nhello\n", "")


def test_exit_code_is_that_of_first_failed_rank():
    rank = """
if rank == 0:
    connections[0].sendall(str(os.getpid()).encode())
    sys.exit(3)
try:  # rank 1 ends after rank 0
    select.select([os.pidfd_open(int(peer.recv(16)))], [], [])
except ProcessLookupError:
    pass
sys.exit(1)
"""
    assert run(2, CONNECT + rank) == (3, "", "error: rank 0 exited with code 3\n")


def test_waiting_ranks_are_killed_after_grace_time():
    assert run(3, "if rank == 1: sys.exit(5)\nwait()", grace=0.1) == (5, "", "error: rank 1 exited with code 5\n")


def test_user_error_on_every_rank_is_printed_once():
    rank = "from omnizoo.launch.stderr import report_error\nreport_error('a.jsonl:3: no text\\nb: too')\nsys.exit(2)"
    assert run(3, rank) == (2, "", "error: a.jsonl:3: no text\nerror: b: too\n")


def test_message_of_failed_rank_replaces_exit_code_message():
    rank = (
        "from omnizoo.launch.stderr import report_error\nif rank: sys.exit(1)\nreport_error('disk full')\nsys.exit(1)"
    )
    assert run(2, rank) == (1, "", "error: disk full\n")


def test_user_error_takes_precedence_over_earlier_failure():
    assert run(2, CONNECT + "\nif rank: peer.recv(1); sys.exit(2)\nsys.exit(1)")[0] == 2


def test_killed_rank_is_named_and_ends_other_ranks():
    with launched(3, "say(rank, os.getpid())\nwait()", grace=0.1) as launcher:
        pids = dict(launcher.stdout.readline().split() for _ in range(3))
        os.kill(int(pids["2"]), signal.SIGKILL)
        out, err = launcher.communicate()
    assert (launcher.returncode, out) == (128 + signal.SIGKILL, "")
    assert err == "error: rank 2 was killed by SIGKILL (out of memory?)\n"


def test_terminal_signals_do_not_reach_ranks():
    assert run(2, "assert os.getsid(0) == os.getpid()")[0] == 0


GRACEFUL = """
def stop(number, frame):
    say(signal.Signals(number).name)
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, stop)
say("ready")
wait()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stop_signal_reaches_every_rank_and_exits_with_0(number):
    with launched(3, GRACEFUL) as launcher:
        assert [launcher.stdout.readline() for _ in range(3)] == ["ready\n"] * 3
        launcher.send_signal(number)
        out, _ = launcher.communicate()
    assert (launcher.returncode, out.split()) == (0, [number.name] * 3)


def test_second_ctrl_c_kills_ranks():
    with launched(2, "signal.signal(signal.SIGINT, lambda *_: say('no'))\nsay('ready')\nwait()") as launcher:
        assert [launcher.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
        launcher.send_signal(signal.SIGINT)
        assert [launcher.stdout.readline() for _ in range(2)] == ["no\n"] * 2
        launcher.send_signal(signal.SIGINT)
        out, err = launcher.communicate()
    assert (launcher.returncode, out) == (128 + signal.SIGINT, "")
    assert err == "stopping; press Ctrl-C again to end all ranks without saving\n"


def test_second_sigterm_is_not_forwarded():
    rank = """
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1})
say(os.getpid())
signal.sigwait({signal.SIGTERM})
say("saving")
signal.sigwait({signal.SIGUSR1})
assert signal.SIGTERM not in signal.sigpending()
"""
    with launched(1, rank) as launcher:
        pid = int(launcher.stdout.readline())
        launcher.send_signal(signal.SIGTERM)
        assert launcher.stdout.readline() == "saving\n"
        launcher.send_signal(signal.SIGTERM)
        os.kill(pid, signal.SIGUSR1)
        assert launcher.communicate() == ("", "")
    assert launcher.returncode == 0


def test_ranks_end_when_the_launcher_is_killed():
    rank = "from omnizoo.launch.launcher import watch_launcher\nwatch_launcher()\nsay('ready')\nwait()"
    with launched(2, rank) as launcher:
        assert [launcher.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
        launcher.kill()
        assert launcher.stdout.read() == ""  # the pipe ends when no rank has it open


def test_watch_launcher_without_launcher_does_nothing(monkeypatch):
    from omnizoo.launch.launcher import watch_launcher

    monkeypatch.delenv("OMNIZOO_LAUNCHER_FD", raising=False)
    watch_launcher()
