"""What runs of the standing benchmark found: kept as lines of JSON, shown as tables, a page and a drawing."""

import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from html import escape
from pathlib import Path
from typing import Any

from peers.contestants import CONTESTANTS, OURS
from rich.console import Console
from rich.table import Table

Record = dict[str, Any]  # of one run, as `standing.py` writes it
Case = tuple[str, int, int]  # model, processes, threads of each
SPEED, MEMORY, PROFILE = "speed", "memory", "profile"
PEERS = ("transformers, padded", "transformers, packed", "trl", "llama-factory")
LEANEST = "omnizoo, leanest"
TURNED_OFF = {contestant.name: contestant.without for contestant in CONTESTANTS if contestant.without}


# What an operator of a profile is counted as: the first whose words are in its name.
KINDS = {
    "matrix products": ("addmm", "::mm", "bmm", "grouped_mm", "::linear"),
    "attention": ("attention", "flash"),
    "update": ("adam", "foreach_norm", "clip"),
    "messages": ("c10d", "gloo", "all_gather", "reduce_scatter", "isend", "irecv", "send", "recv"),
    "copies": ("copy", "::cat", "clone", "contiguous", "split_with_sizes", "index", "gather", "scatter", "embedding"),
    "new memory": ("::empty", "::zeros", "zero_", "fill_", "resize"),
    "softmax, loss": ("softmax", "nll", "logsumexp", "cross_entropy", "exp"),
}
REST, OUTSIDE = "other operators", "outside operators"
ABOUT = """\
The same small models with random weights, the same rows and the same optimizer for all. *Real tokens* are those that
are not padding; CPU seconds are user and system time of all ranks and their workers, and change little with what else
the machine does. Contestants take turns; figures are medians over rounds, and `omnizoo / it` is the median of the
ratios within a round. *Of the matmul limit* is the speed as a share of what the machine's matrix products, measured in
the same round, would allow if a step were nothing else. *Tensors* are the bytes of all tensors alive at once on a rank,
at most, after the first step, counted in runs of their own."""


def read(paths: Iterable[Path]) -> list[Record]:
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def by_case(records: list[Record], mode: str) -> dict[Case, dict[str, list[Record]]]:
    found: dict[Case, dict[str, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        if record["mode"] == mode and "failed" not in record:
            found[record["model"], record["processes"], record["threads"]][record["contestant"]].append(record)
    order = list(dict.fromkeys(contestant_model for c in CONTESTANTS for contestant_model in c.models))
    return dict(sorted(found.items(), key=lambda item: (order.index(item[0][0]), *item[0][1:])))


def median(runs: list[Record], key: str) -> float:
    return statistics.median(run[key] for run in runs)


def ratio(ours: list[Record], theirs: list[Record], key: str = "per_cpu_second") -> float:
    """Of rounds that both were in, the median of each round's: a machine that slows down does so for both."""
    rounds = {(run["session"], run["round"]): run[key] for run in ours}
    each = [rounds[at] / run[key] for run in theirs if (at := (run["session"], run["round"])) in rounds]
    return statistics.median(each) if each else median(ours, key) / median(theirs, key)


def title_of(case: Case) -> str:
    model, processes, threads = case
    return (
        f"{model}, {processes} process{'es' if processes > 1 else ''} of {threads} thread{'s' if threads > 1 else ''}"
    )


def speed_rows(each: dict[str, list[Record]]) -> list[list[str]]:
    rows = []
    shown = {name: runs for name, runs in each.items() if name not in TURNED_OFF}
    for name, runs in sorted(shown.items(), key=lambda item: -median(item[1], "per_cpu_second")):
        speeds = [run["per_cpu_second"] for run in runs]
        limits = [run["per_cpu_second"] / run["limit"] for run in runs if run.get("limit")]
        rows.append(
            [
                name,
                f"{statistics.median(speeds):.0f}",
                f"{min(speeds):.0f} - {max(speeds):.0f}" + (f" ({len(runs)})" if len(runs) > 1 else " (1 run)"),
                f"{ratio(each[OURS], runs):.2f}" if OURS in each else "",
                f"{statistics.median(limits):.2f}" if limits else "",
                f"{median(runs, 'per_second'):.0f}",
                f"{median(runs, 'padding'):.1%}",
                f"{median(runs, 'peak_rss_mb'):.0f}",
                f"{median(runs, 'first_step'):.1f}",
            ]
        )
    return rows


SPEED_HEADINGS = ["", "real tokens / CPU s", "spread (runs)", "omnizoo / it", "of the matmul limit", "real tokens / s"]
SPEED_HEADINGS += ["padding", "RSS MB", "first step s"]
MEMORY_HEADINGS = ["", "tensors MB", "omnizoo / it", "RSS MB"]
OFF_HEADINGS = ["what is off", "case", "real tokens / CPU s", "on / off"]
GOAL_HEADINGS = ["goal", "case", "measured", "reached", "runs of ours / theirs"]


def memory_rows(each: dict[str, list[Record]]) -> list[list[str]]:
    rows = []
    for name, runs in sorted(each.items(), key=lambda item: median(item[1], "peak_tensors_mb")):
        peak = median(runs, "peak_tensors_mb")
        share = f"{median(each[OURS], 'peak_tensors_mb') / peak:.2f}" if OURS in each else ""
        rows.append([name, f"{peak:.0f}", share, f"{median(runs, 'peak_rss_mb'):.0f}"])
    return rows


def profile_rows(each: dict[str, list[Record]]) -> tuple[list[str], list[list[str]]]:
    """Milliseconds of CPU time for 1,000 real tokens. A profile has wall times: their shares are taken, of the CPU
    seconds that the run had for each token."""
    spent: dict[str, dict[str, float]] = {}
    for name, runs in each.items():
        run = runs[-1]
        parts = dict.fromkeys([*KINDS, REST], 0.0)
        for operator, seconds in run["operators"].items():
            kind = next((kind for kind, words in KINDS.items() if any(w in operator.lower() for w in words)), REST)
            parts[kind] += seconds
        parts[OUTSIDE] = max(0.0, run["profiled"] - sum(parts.values()))
        whole = sum(parts.values())
        spent[name] = {kind: 1e6 * part / whole / run["per_cpu_second"] for kind, part in parts.items()}
    names = sorted(spent, key=lambda name: sum(spent[name].values()))
    rows = [[kind, *(f"{spent[name][kind]:.0f}" for name in names)] for kind in [*KINDS, REST, OUTSIDE]]
    rows.append(["all", *(f"{sum(spent[name].values()):.0f}" for name in names)])
    return ["CPU ms for 1,000 real tokens", *names], rows


def off_rows(speeds: dict[Case, dict[str, list[Record]]]) -> list[list[str]]:
    rows = []
    for case, each in speeds.items():
        for name, what in TURNED_OFF.items():
            if name in each and OURS in each:
                speed = f"{median(each[name], 'per_cpu_second'):.0f}"
                rows.append([what, title_of(case), speed, f"{ratio(each[OURS], each[name]):.2f}"])
    return sorted(rows)


def goal_rows(records: list[Record]) -> list[list[str]]:
    """Each goal in each case that was run, against the best of those it names."""
    speeds, memory, rows = by_case(records, SPEED), by_case(records, MEMORY), []

    def say(goal: str, case: Case, value: float, of: tuple[list[Record], list[Record]], reached: bool) -> None:
        counts = " / ".join(str(len(runs)) for runs in of)
        rows.append([goal, title_of(case), f"{value:.2f}", "yes" if reached else "no", counts])

    for case, each in speeds.items():
        if OURS not in each:
            continue
        kind = case[0].partition("_")[0]
        peers = [name for name in PEERS if name in each]
        if kind == "dense" and "tuned" in each:
            faster = ratio(each[OURS], each["tuned"])
            say("at least 1.1 x the tuned loop", case, faster, (each[OURS], each["tuned"]), faster >= 1.1)
        goal = {"dense": 1.25, "moe": 1.6, "vlm": 1.6}.get(kind)
        if goal is not None and peers:
            best = max(peers, key=lambda name: median(each[name], "per_cpu_second"))
            faster = ratio(each[OURS], each[best])
            what = f"at least {goal} x the fastest trainer ({best})"
            say(what, case, faster, (each[OURS], each[best]), faster >= goal)
        one = speeds.get((case[0], 1, case[2]), {}).get(OURS)
        if case[1] == 2 and one:
            kept = median(each[OURS], "per_cpu_second") / median(one, "per_cpu_second")
            what = "two processes keep at least 0.92 of one's tokens per CPU second"
            say(what, case, kept, (each[OURS], one), kept >= 0.92)
    for case, each in memory.items():
        peers = [name for name in each if not name.startswith(OURS)]
        for own in (name for name in (OURS, LEANEST) if name in each and peers):
            best = min(peers, key=lambda name: median(each[name], "peak_tensors_mb"))
            share = median(each[own], "peak_tensors_mb") / median(each[best], "peak_tensors_mb")
            what = f"tensors of {own} at most 0.6 x the leanest of the others ({best})"
            say(what, case, share, (each[own], each[best]), share <= 0.6)
    return rows


def failures(records: list[Record]) -> list[str]:
    """Of those that never ran in a case."""
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
    """(title, headings, rows)"""
    speeds = by_case(records, SPEED)
    made = [(title_of(case), SPEED_HEADINGS, speed_rows(each)) for case, each in speeds.items()]
    for case, each in by_case(records, MEMORY).items():
        made.append((f"Memory: {title_of(case)}", MEMORY_HEADINGS, memory_rows(each)))
    for case, each in by_case(records, PROFILE).items():
        made.append(
            (f"Where the time goes (by wall times: of an idle machine only): {title_of(case)}", *profile_rows(each))
        )
    made.append(("Each of our own, on and off", OFF_HEADINGS, off_rows(speeds)))
    made.append(("Goals", GOAL_HEADINGS, goal_rows(records)))
    return [table for table in made if table[2]]


def show(records: list[Record]) -> None:
    console = Console(width=None if sys.stdout.isatty() else 160)
    for title, headings, rows in tables(records):
        table = Table(*headings, title=title)
        for row in rows:
            table.add_row(*row)
        console.print(table)


def page(records: list[Record], commands: list[str], drawing: str, note: str) -> str:
    """RESULTS.md."""
    versions = sorted({f"torch {record['torch']}, commit {record['commit']}" for record in records})
    days = sorted({record["when"][:10] for record in records})
    parts = [
        "# The standing benchmark",
        f"Made by `benchmarks/standing.py` on {' and '.join(days)} ({'; '.join(versions)}; fp32, CPUs), from runs of",
        "```\n" + "\n".join(commands) + "\n```",
        *([f"**{note}**"] if note else []),
        ABOUT,
        f"![real tokens per CPU second]({drawing})",
    ]
    for title, headings, rows in tables(records):
        head = ["| " + " | ".join(headings) + " |", "|---" * len(headings) + "|"]
        parts.append(
            f"## {title[0].upper()}{title[1:]}\n\n" + "\n".join(head + ["| " + " | ".join(row) + " |" for row in rows])
        )
    there = {(record["contestant"], record["model"]) for record in records}
    notes = {f"- {c.name}: {c.note}" for c in CONTESTANTS if c.note and any((c.name, m) in there for m in c.models)}
    parts.append("## Contestants\n\n" + "\n".join(sorted(notes)))
    if failed := failures(records):
        parts.append("## Did not run\n\n" + "\n".join(failed))
    return "\n\n".join(parts) + "\n"


def draw(records: list[Record]) -> str:
    """An SVG: bars for each case, real tokens per CPU second; the longest of a case is as wide as the drawing."""
    left, width, bar, gap = 210, 420, 16, 30
    lines: list[str] = []
    y = 10
    for case, each in by_case(records, SPEED).items():
        shown = {name: median(runs, "per_cpu_second") for name, runs in each.items() if name not in TURNED_OFF}
        lines.append(f'<text x="{left}" y="{y + 12}" font-weight="bold">{escape(title_of(case))}</text>')
        y += 20
        most = max(shown.values())
        key: Callable[[str], float] = shown.__getitem__
        for name in sorted(shown, key=key, reverse=True):
            long, color = width * shown[name] / most, "#2a6fbb" if name == OURS else "#a9b4c0"
            lines.append(f'<text x="{left - 8}" y="{y + 12}" text-anchor="end">{escape(name)}</text>')
            lines.append(f'<rect x="{left}" y="{y}" width="{long:.0f}" height="{bar - 3}" fill="{color}"/>')
            lines.append(f'<text x="{left + long + 6:.0f}" y="{y + 11}">{shown[name]:.0f}</text>')
            y += bar
        y += gap - bar
    size = f'width="{left + width + 60}" height="{y}" viewBox="0 0 {left + width + 60} {y}"'
    style = 'font-family="sans-serif" font-size="12" fill="#222"'
    page = '<rect width="100%" height="100%" fill="#fff"/>'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>', page, *lines, "</svg>", ""])
