"""Compare finished runs, for the tables in the docs. Reads `metrics.jsonl` of each run folder.

    python benchmarks/compare_runs.py runs/one runs/fsdp runs/hsdp
    python benchmarks/compare_runs.py --exact BEFORE AFTER

The first form compares runs on other layouts with the first run. It prints relative differences at the first step, and
the largest ones over all steps. The second form takes two folders that contain runs of the same names, for example of
two commits, and prints whether losses and gradient norms are bit-identical. It exits with 1 if any run differs.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omnizoo.config.errors import UserError
from omnizoo.reporting.metrics_file import read_metrics
from omnizoo.reporting.run_folder import RunFolder

HEAD = "| run | steps | loss, step 1 | loss, all steps | grad norm, step 1 | grad norm, all steps | tokens |"
EXACT_HEAD = "| run | steps | losses | gradient norms | last loss |"


def read_run(run: Path) -> list[dict[str, Any]]:
    rows = read_metrics(RunFolder(run).metrics)
    if not rows:
        raise UserError(f"{run}: no metrics. Pass folders of finished runs.")
    return rows


def differences(values: Sequence[float], reference: Sequence[float]) -> tuple[float, float]:
    """Return the relative difference of the first values, and the largest one."""
    pairs = zip(values, reference, strict=True)
    relative = [abs(value - expected) / abs(expected) for value, expected in pairs]
    return relative[0], max(relative)


def compare(run: Path, reference: Path) -> str:
    """Return the table row of one run."""
    rows, expected = read_run(run), read_run(reference)
    if [row["step"] for row in rows] != [row["step"] for row in expected]:
        raise UserError(f"{run} has {len(rows)} steps and {reference} has {len(expected)}. Pass finished, equal runs.")
    figures: list[float] = []
    for name in ("loss", "grad_norm"):
        figures += differences([row[name] for row in rows], [row[name] for row in expected])
    same_tokens = [row["tokens"] for row in rows] == [row["tokens"] for row in expected]
    cells = " | ".join(f"{figure:.1e}" for figure in figures)
    return f"| {run.name} | {len(rows)} | {cells} | {'identical' if same_tokens else 'DIFFERENT'} |"


def compare_exactly(before: Path, after: Path) -> bool:
    """Print one row per run that `before` contains, and return whether all runs are equal."""
    all_equal = True
    for run in sorted(path.parent for path in before.glob("*/metrics.jsonl")):
        old, new = read_run(run), read_run(after / run.name)
        verdicts = []
        for name in ("loss", "grad_norm"):
            is_equal = [row[name] for row in old] == [row[name] for row in new]
            verdicts.append("bit-identical" if is_equal else "DIFFERENT")
            all_equal &= is_equal
        print(f"| {run.name} | {len(new)} | {verdicts[0]} | {verdicts[1]} | {new[-1]['loss']!r} |")
    return all_equal


def print_head(head: str) -> None:
    print(head)
    print("|" + "---|" * (head.count("|") - 1))


def main(arguments: Sequence[str]) -> int:
    paths = [Path(argument) for argument in arguments if argument != "--exact"]
    if len(paths) < 2:
        sys.exit(__doc__)
    if "--exact" in arguments:
        print_head(EXACT_HEAD)
        return 0 if compare_exactly(*paths) else 1
    print_head(HEAD)
    for run in paths[1:]:
        print(compare(run, paths[0]))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        sys.exit(f"error: {error}")
