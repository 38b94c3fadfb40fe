"""What tests cost, in seconds of the processor: those of a busy machine, unlike those on the clock, can be compared.

    CPU_SECONDS=/tmp/cost PYTHONPATH=tests pytest -p cpu_seconds ...     writes /tmp/cost.*.jsonl, one for each worker
    python tests/support/cpu_seconds.py /tmp/cost.*.jsonl   prints totals: of all, of files, of tests

All processes below count, ranks included: what they took is added to their parent when they end. Only of a process that
outlives its parent nothing is known.
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


def spent() -> float:
    """By this process and all below it, those that have ended included."""
    total = 0.0
    for process in (own := psutil.Process(), *own.children(recursive=True)):
        try:
            total += sum(process.cpu_times()[:4])  # own time of users and system, and that of children that have ended
        except psutil.NoSuchProcess:
            continue
    return total


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    before = spent()
    result = yield
    with open(FILE, "a") as out:
        out.write(json.dumps({"test": item.nodeid, "seconds": round(spent() - before, 2)}) + "\n")
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
