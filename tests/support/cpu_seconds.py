"""Measure the CPU seconds of tests, which unlike wall-clock time do not depend on the load of the machine.

    export PYTHONPATH=tests/support
    CPU_SECONDS=/tmp/cost pytest -p cpu_seconds ...         writes /tmp/cost.*.jsonl, one file per worker
    python tests/support/cpu_seconds.py /tmp/cost.*.jsonl   prints totals of all tests, files and tests

Child processes are included, ranks as well: their time is added to the parent when they end. A process that outlives
its parent is not counted.
"""

import json
import os
import sys
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import psutil
import pytest

FILE = f"{os.environ.get('CPU_SECONDS', 'cpu')}.{os.environ.get('PYTEST_XDIST_WORKER', 'one')}.jsonl"
SHOWN = 40


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and all its descendants, including those that have ended."""
    total = 0.0
    this_process = psutil.Process()
    for process in (this_process, *this_process.children(recursive=True)):
        try:
            total += sum(process.cpu_times()[:4])  # user and system time, of the process and of ended children
        except psutil.NoSuchProcess:
            continue
    return total


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    before = cpu_seconds()
    result = yield
    with open(FILE, "a") as out:
        out.write(json.dumps({"test": item.nodeid, "seconds": round(cpu_seconds() - before, 2)}) + "\n")
    return result


def main(files: list[str]) -> None:
    tests: Counter[str] = Counter()
    for file in files:
        for line in Path(file).read_text().splitlines():
            row = json.loads(line)
            tests[row["test"]] += row["seconds"]
    by_file: Counter[str] = Counter()
    for test, seconds in tests.items():
        by_file[test.partition("::")[0]] += seconds
    print(f"{sum(tests.values()):8.1f} s: {len(tests)} tests")
    for costs in (by_file, tests):
        print()
        for name, seconds in costs.most_common(SHOWN):
            print(f"{seconds:8.1f} s: {name}")


if __name__ == "__main__":
    main(sys.argv[1:])
