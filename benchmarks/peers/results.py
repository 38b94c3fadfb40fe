"""Results of the standing benchmark: records in JSON lines, shown as tables, a page and a chart."""

import json
import statistics
import sys
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterable
from html import escape
from pathlib import Path
from typing import Any

from peers.contestants import CONTESTANTS, OURS
from rich.console import Console
from rich.table import Table

Record = dict[str, Any]  # figures of one run, as `standing.py` writes them
Case = tuple[str, int, int]  # model, number of processes, threads per process
SPEED, MEMORY, PROFILE = "speed", "memory", "profile"
PEERS = ("transformers, padded", "transformers, packed", "trl", "llama-factory")
LEANEST = "omnizoo, leanest"
DISABLED = {contestant.name: contestant.without for contestant in CONTESTANTS if contestant.without}


# Kinds of operators in a profile. An operator belongs to the first kind with a word that its name contains.
KINDS = {
    "matmuls": ("addmm", "::mm", "bmm", "grouped_mm", "::linear"),
    "attention": ("attention", "flash"),
    "update": ("adam", "foreach_norm", "clip"),
    "communication": ("c10d", "gloo", "all_gather", "reduce_scatter", "isend", "irecv", "send", "recv"),
    "copies": ("copy", "::cat", "clone", "contiguous", "split_with_sizes", "index", "gather", "scatter", "embedding"),
    "allocation": ("::empty", "::zeros", "zero_", "fill_", "resize"),
    "softmax, loss": ("softmax", "nll", "logsumexp", "cross_entropy", "exp"),
}
REST, OUTSIDE = "other operators", "outside operators"
ABOUT = """\
All contestants train the same small models with random weights, on the same rows and with the same optimizer.

- *Real tokens* are tokens that are not padding.
- *CPU s* is user and system time of all ranks and their workers. It hardly depends on other work on the machine.
- Contestants take turns. Figures are medians over rounds.
- *omnizoo / this row* is the median of the ratios within a round.
- *Fraction of matmul limit* compares with a step that consists of matmuls only, measured in the same round.
- *Tensors* is the peak of all live tensors on a rank after the first step, counted in separate runs."""


def read(paths: Iterable[Path]) -> list[Record]:
    """Read the records of stored runs."""
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def by_case(records: list[Record], mode: str) -> dict[Case, dict[str, list[Record]]]:
    """Group the records of successful runs by case and contestant."""
    found: dict[Case, dict[str, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        if record["mode"] == mode and "failed" not in record:
            found[record["model"], record["processes"], record["threads"]][record["contestant"]].append(record)
    order = list(dict.fromkeys(contestant_model for c in CONTESTANTS for contestant_model in c.models))
    return dict(sorted(found.items(), key=lambda item: (order.index(item[0][0]), *item[0][1:])))


def median(runs: list[Record], key: str) -> float:
    """Return the median of a figure over runs."""
    return statistics.median(run[key] for run in runs)


def ratio(ours: list[Record], theirs: list[Record], key: str = "per_cpu_second") -> float:
    """Return the median of the ratios within common rounds, which cancels changes of the machine's speed.

    Without common rounds, return the ratio of the medians.
    """
    our_rounds = {(run["session"], run["round"]): run[key] for run in ours}
    ratios = []
    for run in theirs:
        round_id = (run["session"], run["round"])
        if round_id in our_rounds:
            ratios.append(our_rounds[round_id] / run[key])
    return statistics.median(ratios) if ratios else median(ours, key) / median(theirs, key)


def title_of(case: Case) -> str:
    """Return the title of a case: "dense, 2 processes x 1 thread"."""
    model, processes, threads = case
    process_text = "process" if processes == 1 else "processes"
    thread_text = "thread" if threads == 1 else "threads"
    return f"{model}, {processes} {process_text} x {threads} {thread_text}"


def speed_rows(each: dict[str, list[Record]]) -> list[list[str]]:
    """Return the table rows of a case, fastest first."""
    rows = []
    shown = {name: runs for name, runs in each.items() if name not in DISABLED}
    for name, runs in sorted(shown.items(), key=lambda item: -median(item[1], "per_cpu_second")):
        speeds = [run["per_cpu_second"] for run in runs]
        fractions = [run["per_cpu_second"] / run["limit"] for run in runs if run.get("limit")]
        rows.append(
            [
                name,
                f"{statistics.median(speeds):.0f}",
                f"{min(speeds):.0f} - {max(speeds):.0f} ({len(runs)})",
                f"{ratio(each[OURS], runs):.2f}" if OURS in each else "",
                f"{statistics.median(fractions):.2f}" if fractions else "",
                f"{median(runs, 'per_second'):.0f}",
                f"{median(runs, 'padding'):.1%}",
                f"{median(runs, 'peak_rss_mb'):.0f}",
                f"{median(runs, 'first_step'):.1f}",
            ]
        )
    return rows


SPEED_HEADINGS = [
    "",
    "real tokens / CPU s",
    "range (runs)",
    "omnizoo / this row",
    "fraction of matmul limit",
    "real tokens / s",
]
SPEED_HEADINGS += ["padding", "RSS MB", "first step s"]
MEMORY_HEADINGS = ["", "tensors MB", "omnizoo / this row", "RSS MB"]
OFF_HEADINGS = ["disabled optimization", "case", "real tokens / CPU s", "on / off"]
GOAL_HEADINGS = ["goal", "case", "measured", "reached", "runs (omnizoo / other)"]


def memory_rows(each: dict[str, list[Record]]) -> list[list[str]]:
    """Return the table rows of a case, least memory first."""
    rows = []
    for name, runs in sorted(each.items(), key=lambda item: median(item[1], "peak_tensors_mb")):
        peak = median(runs, "peak_tensors_mb")
        share = f"{median(each[OURS], 'peak_tensors_mb') / peak:.2f}" if OURS in each else ""
        rows.append([name, f"{peak:.0f}", share, f"{median(runs, 'peak_rss_mb'):.0f}"])
    return rows


def profile_rows(each: dict[str, list[Record]]) -> tuple[list[str], list[list[str]]]:
    """Return headings and rows of CPU milliseconds per 1,000 real tokens, by kind of operator.

    A profile has wall times. Their fractions are applied to the CPU seconds per token of the run.
    """
    spent: dict[str, dict[str, float]] = {}
    for name, runs in each.items():
        run = runs[-1]
        parts = dict.fromkeys([*KINDS, REST], 0.0)
        for operator, seconds in run["operators"].items():
            kind = next((kind for kind, words in KINDS.items() if any(w in operator.lower() for w in words)), REST)
            parts[kind] += seconds
        parts[OUTSIDE] = max(0.0, run["profiled"] - sum(parts.values()))
        total = sum(parts.values())
        spent[name] = {kind: 1e6 * part / total / run["per_cpu_second"] for kind, part in parts.items()}
    names = sorted(spent, key=lambda name: sum(spent[name].values()))
    rows = [[kind, *(f"{spent[name][kind]:.0f}" for name in names)] for kind in [*KINDS, REST, OUTSIDE]]
    rows.append(["total", *(f"{sum(spent[name].values()):.0f}" for name in names)])
    return ["CPU ms per 1,000 real tokens", *names], rows


def off_rows(speeds: dict[Case, dict[str, list[Record]]]) -> list[list[str]]:
    """Return the table rows of OmniZoo with an optimization disabled."""
    rows = []
    for case, each in speeds.items():
        for name, optimization in DISABLED.items():
            if name in each and OURS in each:
                speed = f"{median(each[name], 'per_cpu_second'):.0f}"
                rows.append([optimization, title_of(case), speed, f"{ratio(each[OURS], each[name]):.2f}"])
    return sorted(rows)


def goal_rows(records: list[Record]) -> list[list[str]]:
    """Return the table rows of all goals in all cases, each compared with the best of the others."""
    speeds, memory, rows = by_case(records, SPEED), by_case(records, MEMORY), []

    def add_row(goal: str, case: Case, value: float, runs: tuple[list[Record], list[Record]], reached: bool) -> None:
        counts = " / ".join(str(len(records)) for records in runs)
        rows.append([goal, title_of(case), f"{value:.2f}", "yes" if reached else "no", counts])

    for case, each in speeds.items():
        if OURS not in each:
            continue
        kind = case[0].partition("_")[0]
        peers = [name for name in PEERS if name in each]
        if kind == "dense" and "tuned" in each:
            faster = ratio(each[OURS], each["tuned"])
            add_row("at least 1.1 x the tuned loop", case, faster, (each[OURS], each["tuned"]), faster >= 1.1)
        goal = {"dense": 1.25, "moe": 1.6, "vlm": 1.6}.get(kind)
        if goal is not None and peers:
            best = max(peers, key=lambda name: median(each[name], "per_cpu_second"))
            faster = ratio(each[OURS], each[best])
            goal_text = f"at least {goal} x the fastest trainer ({best})"
            add_row(goal_text, case, faster, (each[OURS], each[best]), faster >= goal)
        one_process = speeds.get((case[0], 1, case[2]), {}).get(OURS)
        if case[1] == 2 and one_process:
            kept = median(each[OURS], "per_cpu_second") / median(one_process, "per_cpu_second")
            goal_text = "two processes have at least 0.92 x the tokens per CPU second of one"
            add_row(goal_text, case, kept, (each[OURS], one_process), kept >= 0.92)
    for case, each in memory.items():
        peers = [name for name in each if not name.startswith(OURS)]
        for variant in (name for name in (OURS, LEANEST) if name in each and peers):
            best = min(peers, key=lambda name: median(each[name], "peak_tensors_mb"))
            share = median(each[variant], "peak_tensors_mb") / median(each[best], "peak_tensors_mb")
            goal_text = f"tensors of {variant} at most 0.6 x those of the leanest other ({best})"
            add_row(goal_text, case, share, (each[variant], each[best]), share <= 0.6)
    return rows


def failures(records: list[Record]) -> list[str]:
    """Return a line for each contestant that failed in all runs of a case."""
    keys = ("mode", "contestant", "model", "processes", "threads")
    ran = {tuple(record[key] for key in keys) for record in records if "failed" not in record}
    lines: dict[str, None] = {}
    for record in records:
        if "failed" in record and tuple(record[key] for key in keys) not in ran:
            case = title_of((record["model"], record["processes"], record["threads"]))
            last = [line for line in record["failed"].splitlines() if line.strip()][-1:]
            lines[f"- {record['contestant']}, {case}: `{''.join(last)[:300]}`"] = None
    return list(lines)


def tables(records: list[Record]) -> list[tuple[str, list[str], list[list[str]]]]:
    """Return all tables that have rows, as (title, headings, rows)."""
    speeds = by_case(records, SPEED)
    found = [(title_of(case), SPEED_HEADINGS, speed_rows(each)) for case, each in speeds.items()]
    for case, each in by_case(records, MEMORY).items():
        found.append((f"Memory: {title_of(case)}", MEMORY_HEADINGS, memory_rows(each)))
    for case, each in by_case(records, PROFILE).items():
        found.append(
            (
                f"Time by kind of operator (from wall times; valid on an idle machine only): {title_of(case)}",
                *profile_rows(each),
            )
        )
    found.append(("Each optimization, on and off", OFF_HEADINGS, off_rows(speeds)))
    found.append(("Goals", GOAL_HEADINGS, goal_rows(records)))
    return [table for table in found if table[2]]


def show(records: list[Record]) -> None:
    """Print all tables."""
    console = Console(width=None if sys.stdout.isatty() else 160)
    for title, headings, rows in tables(records):
        table = Table(*headings, title=title)
        for row in rows:
            table.add_row(*row)
        console.print(table)


def page(records: list[Record], commands: list[str], drawing: str, note: str) -> str:
    """Return the text of RESULTS.md."""
    versions = ", ".join(sorted({record["torch"] for record in records}))
    commits = ", ".join(sorted({record["commit"] for record in records}))
    days = " and ".join(sorted({record["when"][:10] for record in records}))
    origin = f"Produced by `benchmarks/standing.py` on {days} (torch {versions}; commits {commits}; fp32, CPUs):"
    parts = [
        "# Standing benchmark",
        textwrap.fill(origin, 120),
        "```sh\n" + "\n".join(commands) + "\n```",
        *([textwrap.fill(note, 120)] if note else []),
        ABOUT,
        f"![real tokens per CPU second]({drawing})",
    ]
    for title, headings, rows in tables(records):
        head = ["| " + " | ".join(headings) + " |", "|---" * len(headings) + "|"]
        parts.append(
            f"## {title[0].upper()}{title[1:]}\n\n" + "\n".join(head + ["| " + " | ".join(row) + " |" for row in rows])
        )
    present = {(record["contestant"], record["model"]) for record in records}
    notes = {f"- {c.name}: {c.note}" for c in CONTESTANTS if c.note and any((c.name, m) in present for m in c.models)}
    parts.append("## Contestants\n\n" + "\n".join(sorted(notes)))
    if failed := failures(records):
        parts.append("## Failed runs\n\n" + "\n".join(failed))
    return "\n\n".join(parts) + "\n"


def draw(records: list[Record]) -> str:
    """Return an SVG bar chart of real tokens per CPU second. The longest bar of each case has the full width."""
    left, width, bar, gap = 210, 420, 16, 30
    lines: list[str] = []
    y = 10
    for case, each in by_case(records, SPEED).items():
        shown = {name: median(runs, "per_cpu_second") for name, runs in each.items() if name not in DISABLED}
        lines.append(f'<text x="{left}" y="{y + 12}" font-weight="bold">{escape(title_of(case))}</text>')
        y += 20
        most = max(shown.values())
        key: Callable[[str], float] = shown.__getitem__
        for name in sorted(shown, key=key, reverse=True):
            length = width * shown[name] / most
            color = "#2a6fbb" if name == OURS else "#a9b4c0"
            lines.append(f'<text x="{left - 8}" y="{y + 12}" text-anchor="end">{escape(name)}</text>')
            lines.append(f'<rect x="{left}" y="{y}" width="{length:.0f}" height="{bar - 3}" fill="{color}"/>')
            lines.append(f'<text x="{left + length + 6:.0f}" y="{y + 11}">{shown[name]:.0f}</text>')
            y += bar
        y += gap - bar
    size = f'width="{left + width + 60}" height="{y}" viewBox="0 0 {left + width + 60} {y}"'
    style = 'font-family="sans-serif" font-size="12" fill="#222"'
    page = '<rect width="100%" height="100%" fill="#fff"/>'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>', page, *lines, "</svg>", ""])
