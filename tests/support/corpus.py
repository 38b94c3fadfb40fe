"""Bad input by the hundred: each case is one `omnizoo` command that must be refused in one line, or end well, in time.

Cases live in `corpus_*.py`, one list a file; `test_corpus.py` runs them. Each command runs in its own process,
forked from a server that has imported everything, two at a time.
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

SECONDS = 10.0  # of the processor, for any one case
HANGS = 90.0  # on the clock: the machine may be busy
forking = Lock()  # the fork server answers one client at a time

Prepare = Callable[[Path], Sequence[object]]


def anything_goes(folder: Path, result: Result) -> str | None:
    return None


@dataclass(frozen=True)
class Case:
    """`prepare(folder)` lays out an empty folder and gives the arguments of `omnizoo`.

    `says`: what the one error line must contain, for a case that is refused (exit code 2). Empty: the command ends with
    code 0. `check` then, or besides, says what is wrong with what was done, or None.
    """

    name: str
    prepare: Prepare
    says: tuple[str, ...] = ()
    check: Callable[[Path, Result], str | None] = field(default=anything_goes)


@dataclass(frozen=True)
class Outcome:
    case: Case
    wrong: str | None  # None: as it should be
    seconds: float  # of the processor


def run_cases(cases: Iterable[Case], folder: Path) -> list[Outcome]:
    """All of them, two at a time."""
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
    """`omnizoo args` in a forked process: what it printed, its exit code, and its seconds of the processor."""
    context = get_context("forkserver")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        child = context.Process(target=_main, args=(args, folder))
        with forking:
            child.start()
        _wait(child)
        text = {stream: (folder / stream).read_text(errors="replace") for stream in STREAMS}
        # Not `child.exitcode`: another thread that starts a process polls this child, too, and one of them finds 255.
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
    except BaseException:  # noqa: BLE001 - a traceback is what the test is after
        traceback.print_exc()
        code = 1
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = sum(use.ru_utime + use.ru_stime for use in (own, children))
    (folder / "ended").write_text(f"{code} {spent}")
    for number in (1, 2):
        os.fsync(number)
    os._exit(code)


def report(outcomes: Sequence[Outcome]) -> str:
    """Counts, and every case that is not as it should be."""
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
