"""How far runs of the same config on other layouts are from the first one, as the table in README.md.

    python benchmarks/compare_runs.py runs/one runs/fsdp runs/hsdp

Reads `metrics.jsonl` of each run folder. Differences are relative, at the first step and the largest over all steps.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from omnizoo.config.errors import UserError
from omnizoo.training.metrics import RunFolder, read_metrics

HEAD = "| run | steps | loss, step 1 | loss, all steps | grad norm, step 1 | grad norm, all steps | tokens |"


def differences(values: Sequence[float], reference: Sequence[float]) -> tuple[float, float]:
    """(first, largest) relative difference."""
    relative = [abs(value - wanted) / abs(wanted) for value, wanted in zip(values, reference, strict=True)]
    return relative[0], max(relative)


def compare(run: Path, reference: Path) -> str:
    rows, wanted = read_metrics(RunFolder(run).metrics), read_metrics(RunFolder(reference).metrics)
    if not wanted or [row["step"] for row in rows] != [row["step"] for row in wanted]:
        raise UserError(f"{run} has {len(rows)} steps and {reference} has {len(wanted)}: give finished, equal runs")
    loss, norm = (differences([r[k] for r in rows], [w[k] for w in wanted]) for k in ("loss", "grad_norm"))
    same = all(row["tokens"] == other["tokens"] for row, other in zip(rows, wanted, strict=True))
    figures = " | ".join(f"{figure:.1e}" for figure in (*loss, *norm))
    return f"| {run.name} | {len(rows)} | {figures} | {'identical' if same else 'DIFFERENT'} |"


def main(reference: Path, others: Sequence[Path]) -> None:
    print(HEAD, "|" + "---|" * HEAD.count(" | ") + "---|", sep="\n")
    for run in others:
        print(compare(run, reference))


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    try:
        main(Path(sys.argv[1]), [Path(arg) for arg in sys.argv[2:]])
    except UserError as error:
        sys.exit(f"error: {error}")
