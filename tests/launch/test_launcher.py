"""The local launcher, with small stand-ins for ranks: exit codes, signals, and that nobody is left behind.

Ranks inherit the launcher's stdout, so a test waits by reading it: a line says how far a rank is, its end that all are
gone.
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
def say(*words): os.write(1, (" ".join(map(str, words)) + "\\n").encode())  # in one piece
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


def test_ranks_that_all_succeed_give_exit_code_0_and_no_message():
    assert run(3, "pass") == (0, "", "")


def test_every_rank_knows_its_place_and_its_threads():
    code, out, _ = run(2, "say(json.dumps(dict(os.environ)))")
    ranks = sorted((json.loads(line) for line in out.splitlines()), key=lambda env: env["RANK"])
    assert code == 0
    for i, env in enumerate(ranks):
        assert (env["RANK"], env["LOCAL_RANK"]) == (str(i), str(i))
        assert (env["WORLD_SIZE"], env["LOCAL_WORLD_SIZE"], env["MASTER_ADDR"]) == ("2", "2", "127.0.0.1")
        assert env["OMP_NUM_THREADS"] == str(max(1, len(os.sched_getaffinity(0)) // 2))
        assert ("OMNIZOO_STORE_FD" in env) == (i == 0)


def test_a_number_of_threads_that_is_set_stays():
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


def test_the_exit_code_is_that_of_the_first_rank_that_fails():
    rank = """
if rank == 0:
    connections[0].sendall(str(os.getpid()).encode())
    sys.exit(3)
try:  # rank 1 ends because rank 0 is gone
    select.select([os.pidfd_open(int(peer.recv(16)))], [], [])
except ProcessLookupError:
    pass
sys.exit(1)
"""
    assert run(2, CONNECT + rank) == (3, "", "error: rank 0 exited with code 3\n")


def test_ranks_that_wait_for_a_failed_one_are_ended_after_the_grace_time():
    assert run(3, "if rank == 1: sys.exit(5)\nwait()", grace=0.1) == (5, "", "error: rank 1 exited with code 5\n")


def test_a_user_error_on_every_rank_is_shown_once_and_gives_2():
    rank = "from omnizoo.launch.stderr import report_error\nreport_error('a.jsonl:3: no text\\nb: too')\nsys.exit(2)"
    assert run(3, rank) == (2, "", "error: a.jsonl:3: no text\nerror: b: too\n")


def test_what_a_failing_rank_says_replaces_the_note_of_its_exit_code():
    rank = (
        "from omnizoo.launch.stderr import report_error\nif rank: sys.exit(1)\nreport_error('disk full')\nsys.exit(1)"
    )
    assert run(2, rank) == (1, "", "error: disk full\n")


def test_a_user_error_is_the_cause_even_if_another_rank_ends_before_it():
    assert run(2, CONNECT + "\nif rank: peer.recv(1); sys.exit(2)\nsys.exit(1)")[0] == 2


def test_a_killed_rank_is_named_and_ends_the_others():
    with launched(3, "say(rank, os.getpid())\nwait()", grace=0.1) as launcher:
        pids = dict(launcher.stdout.readline().split() for _ in range(3))
        os.kill(int(pids["2"]), signal.SIGKILL)
        out, err = launcher.communicate()
    assert (launcher.returncode, out) == (128 + signal.SIGKILL, "")
    assert err == "error: rank 2 was killed by SIGKILL (out of memory?)\n"


def test_ranks_are_out_of_reach_of_the_terminal():
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
def test_a_signal_to_stop_reaches_every_rank_and_a_graceful_end_gives_0(number):
    with launched(3, GRACEFUL) as launcher:
        assert [launcher.stdout.readline() for _ in range(3)] == ["ready\n"] * 3
        launcher.send_signal(number)
        out, _ = launcher.communicate()
    assert (launcher.returncode, out.split()) == (0, [number.name] * 3)


def test_the_second_ctrl_c_kills_ranks_that_do_not_stop():
    with launched(2, "signal.signal(signal.SIGINT, lambda *_: say('no'))\nsay('ready')\nwait()") as launcher:
        assert [launcher.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
        launcher.send_signal(signal.SIGINT)
        assert [launcher.stdout.readline() for _ in range(2)] == ["no\n"] * 2
        launcher.send_signal(signal.SIGINT)
        out, err = launcher.communicate()
    assert (launcher.returncode, out) == (128 + signal.SIGINT, "")
    assert err == "stopping; press Ctrl-C again to end all ranks without saving\n"


def test_a_second_sigterm_is_not_passed_on():
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
        assert launcher.stdout.read() == ""  # returns at the end of the pipe: no rank holds it any more


def test_watching_is_nothing_where_there_is_no_launcher(monkeypatch):
    from omnizoo.launch.launcher import watch_launcher

    monkeypatch.delenv("OMNIZOO_LAUNCHER_FD", raising=False)
    watch_launcher()
