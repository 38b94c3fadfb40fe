"""Hundreds of invalid inputs: each case is an `omnizoo` command that must succeed or print one error line, in time.

Each `corpus_*.py` has a list of cases, and `test_corpus.py` runs them. Each command runs in its own process, forked
from a server that has imported all modules, two at a time.
"""

import os
import resource
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Lock

from processes import STREAMS, Result, stacks_of, start_server

SECONDS = 10.0  # limit of CPU seconds per case
HANGS = 90.0  # limit of wall-clock seconds, as the machine may be busy
forking = Lock()  # the fork server accepts one client at a time

Prepare = Callable[[Path], Sequence[object]]


def anything_goes(folder: Path, result: Result) -> str | None:
    return None


@dataclass(frozen=True)
class Case:
    """One command and its expected result.

    `prepare(folder)` writes files into an empty folder and returns the arguments of `omnizoo`. `says` has the parts
    that the one error line must contain (exit code 2); if it is empty, the exit code must be 0. `check` returns what is
    wrong with the result, or None.
    """

    name: str
    prepare: Prepare
    says: tuple[str, ...] = ()
    check: Callable[[Path, Result], str | None] = field(default=anything_goes)


@dataclass(frozen=True)
class Outcome:
    case: Case
    wrong: str | None  # None: the result is as expected
    seconds: float  # CPU seconds


def run_cases(cases: Iterable[Case], folder: Path) -> list[Outcome]:
    """Run all cases, two at a time."""
    start_server()
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda numbered: run_case(numbered[1], folder / f"{numbered[0]:03d}"), enumerate(cases)))


def run_case(case: Case, folder: Path) -> Outcome:
    folder.mkdir(parents=True)
    try:
        args = [str(arg) for arg in case.prepare(folder)]
        result, seconds = run_main(args)
    except TimeoutError as error:
        return Outcome(case, f"hangs: {error}", HANGS)
    wrong = case.check(folder, result) or judge(case, result)
    if wrong is None and seconds > SECONDS:
        wrong = f"took {seconds:.1f} s of the processor"
    return Outcome(case, wrong and f"{wrong}\n  stderr: {result.stderr[-2000:]}", seconds)


def judge(case: Case, result: Result) -> str | None:
    if "Traceback" in result.stderr or "Traceback" in result.stdout:
        return "a traceback"
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    if not case.says:
        return None if result.code == 0 else f"exit code {result.code}, should have ended well"
    if result.code != 2:
        return f"exit code {result.code}, should have been refused (2)"
    if len(lines) != 1:
        return f"{len(lines)} error lines, not one"
    missing = [word for word in case.says if word not in lines[0]]
    return f"does not say {', '.join(map(repr, missing))}" if missing else None


def run_main(args: Sequence[str]) -> tuple[Result, float]:
    """Run `omnizoo args` in a forked process; return its output, exit code and CPU seconds."""
    context = get_context("forkserver")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        child = context.Process(target=_main, args=(args, folder))
        with forking:
            child.start()
        _wait(child)
        text = {stream: (folder / stream).read_text(errors="replace") for stream in STREAMS}
        # Not `child.exitcode`: a thread that starts a process polls this child as well, and one of the two reads 255.
        ended = folder / "ended"
        code, seconds = ended.read_text().split() if ended.exists() else ("-1", "0")
        return Result(int(code), text["stdout"], text["stderr"]), float(seconds)


def _wait(child: BaseProcess) -> None:
    started = time.monotonic()
    child.join(HANGS)
    if child.exitcode is None:
        stacks = stacks_of([child.pid])
        child.kill()
        child.join()
        raise TimeoutError(f"more than {time.monotonic() - started:.0f} s\n{stacks}")


def _main(args: Sequence[str], folder: Path) -> None:
    import torch

    from omnizoo.cli.main import main

    for number, name in enumerate(STREAMS, start=1):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT), number)
    os.environ |= {"COLUMNS": "200"}
    torch.set_num_threads(1)
    try:
        code = main(list(args))
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:  # noqa: BLE001 - the test looks for tracebacks
        traceback.print_exc()
        code = 1
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    seconds = sum(usage.ru_utime + usage.ru_stime for usage in usages)
    (folder / "ended").write_text(f"{code} {seconds}")
    for number in (1, 2):
        os.fsync(number)
    os._exit(code)


def report(outcomes: Sequence[Outcome]) -> str:
    """Return the counts, and every case with an unexpected result."""
    wrong = [outcome for outcome in outcomes if outcome.wrong]
    kinds = {
        "tracebacks": sum("a traceback" in (o.wrong or "") for o in wrong),
        "hangs": sum((o.wrong or "").startswith(("hangs", "took")) for o in wrong),
    }
    rest = len(wrong) - sum(kinds.values())
    slowest = max(outcomes, key=lambda outcome: outcome.seconds)
    counts = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    first = f"{len(outcomes)} cases: {counts}, {rest} otherwise wrong"
    last = f"slowest: {slowest.case.name} ({slowest.seconds:.1f} s)"
    return "\n".join([f"{first}; {last}", *(f"- {outcome.case.name}: {outcome.wrong}" for outcome in wrong)])
