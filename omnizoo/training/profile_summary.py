"""What was recorded on all ranks, per step: by kind, by module, by operator, by rank; as JSON, and as five lines."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from omnizoo.training.profile_trace import APART, KINDS, OVERHEAD, PHASES

OPERATORS = 20  # that are listed
CONTRIBUTORS = 8  # to the overhead
WORDS = {
    "forward": "forward",
    "recompute": "recompute",
    "backward": "backward",
    "communication": "exposed communication",
    "optimizer": "optimizer",
    "data": "data",
    "overhead": "our own overhead",
    "idle": "device idle",
    "evaluation": "evaluation",
    "checkpoint": "checkpoint",
}


def summarise(ranks: Sequence[Mapping[str, Any]], layout: str) -> dict[str, Any]:
    """Seconds per step. The first of `ranks` is told of in full, the others by their kinds."""
    first = ranks[0]
    count = max(1, len(first["steps"]))
    step = sum(first["steps"].values()) / count
    kinds = {kind: first["kinds"].get(kind, 0.0) / count for kind in KINDS if first["kinds"].get(kind)}
    waits = [{"rank": rank["rank"], **wait} for rank in ranks for wait in rank["waits"]]
    operators = sorted(first["operators"].items(), key=lambda each: -each[1][1])[:OPERATORS]
    overhead = sorted(first["overhead"].items(), key=lambda each: -each[1])[:CONTRIBUTORS]
    return {
        "layout": layout,
        "world": len(ranks),
        "steps": sorted(map(int, first["steps"])),
        "device": first["device"],
        "seconds": step,
        "kinds": {
            kind: {
                "seconds": seconds,
                "share": seconds / step if step else 0.0,
                "python": first["between"].get(kind, 0.0) / count,
            }
            for kind, seconds in kinds.items()
        },
        "phases": {
            name: {clock: value / count for clock, value in spent.items()} for name, spent in first["phases"].items()
        },
        "overhead_cpu": overhead_cpu(first["phases"]),
        "cpu": {name: value / count for name, value in first["clocks"].items()},
        "modules": [
            {"module": name, **{kind: value / count for kind, value in times.items()}}
            for name, times in merged(first["modules"]).items()
        ],
        "operators": [
            {"operator": name, "calls": calls / count, "seconds": seconds / count}
            for name, (calls, seconds) in operators
        ],
        "overhead": [{"what": what, "seconds": seconds / count} for what, seconds in overhead],
        "waits": sorted(waits, key=lambda wait: -wait["seconds"])[:10],
        "ranks": spread(ranks),
    }


def overhead_cpu(phases: Mapping[str, Mapping[str, float]]) -> float:
    """Our own overhead as a share of the process's CPU time: steadier than the clock where cores are shared."""
    whole = sum(spent["cpu"] for name, spent in phases.items() if name not in APART)
    ours = sum(spent["cpu"] for name, spent in phases.items() if name not in (*PHASES, *APART))
    return ours / whole if whole else 0.0


def merged(modules: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Own times by name, with the numbers of layers and experts as `*`; and those of all modules above, in `total`.
    A module comes before what is in it."""
    found: dict[str, dict[str, float]] = {}
    for name, times in modules.items():
        own = re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name)
        parts = own.split(".") if own and not own.startswith("(") else []
        above = [] if own.startswith("(") else [".".join(parts[:depth]) for depth in range(len(parts) + 1)]
        for path in above or [own]:
            found.setdefault(path, {})
        for kind, seconds in times.items():
            found[own][kind] = found[own].get(kind, 0.0) + seconds
            for path in above or [own]:
                key = f"total {kind}"
                found[path][key] = found[path].get(key, 0.0) + seconds
                found[path]["total"] = found[path].get("total", 0.0) + seconds
    return dict(_in_tree(found))


def _in_tree(found: dict[str, dict[str, float]]) -> Iterable[tuple[str, dict[str, float]]]:
    """A module, then what is in it, that with most time first."""

    def below(path: str) -> Iterable[tuple[str, dict[str, float]]]:
        yield path, found[path]
        depth = path.count(".") + 1 if path else 0
        inside = [
            name
            for name in found
            if name
            and not name.startswith("(")
            and name.count(".") == depth
            and (not path or name.startswith(path + "."))
        ]
        for name in sorted(inside, key=lambda name: -found[name]["total"]):
            yield from below(name)

    if "" in found:
        yield from below("")
    apart = [name for name in found if name.startswith("(")]
    for name in sorted(apart, key=lambda name: -found[name]["total"]):
        yield name, found[name]


def spread(ranks: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Of each kind and of the whole step: the mean over ranks, the slowest, and which it is."""
    table = {"step": [sum(rank["steps"].values()) / max(1, len(rank["steps"])) for rank in ranks]}
    for kind in KINDS:
        values = [rank["kinds"].get(kind, 0.0) / max(1, len(rank["steps"])) for rank in ranks]
        if any(values):
            table[kind] = values
    found = {}
    for name, values in table.items():
        mean, most = sum(values) / len(values), max(values)
        slowest = ranks[values.index(most)]["rank"]
        found[name] = {"mean": mean, "most": most, "rank": slowest, "ratio": most / mean if mean else 1.0}
    return found


def tell(summary: Mapping[str, Any], page: Path) -> list[str]:
    steps, kinds, cpu = summary["steps"], summary["kinds"], summary["cpu"]
    recorded = f"steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}"
    shares = ", ".join(f"{WORDS[kind]} {100 * of['share']:.1f} %" for kind, of in kinds.items())
    named = [each for each in summary["modules"] if each["module"] and own_time(each)]
    top = sorted(named, key=own_time, reverse=True)[:4]
    share = 100 / summary["seconds"] if summary["seconds"] else 0.0
    modules = ", ".join(f"{each['module']} {share * own_time(each):.1f} %" for each in top)
    ours = ", ".join(f"{each['what']} {1e3 * each['seconds']:.1f} ms" for each in summary["overhead"][:3])
    wait = summary["waits"][0] if summary["waits"] else None
    longest = f"longest wait {describe(wait)}" if wait else "no wait"
    slowest = summary["ranks"]["step"]
    return [
        f"profile of {recorded}: {summary['seconds']:.3g} s a step; {page}",
        f"  by kind: {shares}",
        f"  by module: {modules}",
        f"  {WORDS[OVERHEAD]}, {100 * summary['overhead_cpu']:.2f} % of the CPU time: {ours or 'none'}",
        f"  {longest}; slowest rank {slowest['ratio']:.2f} x the mean; CPU {cpu['process']:.3g} s a step on rank 0 "
        f"(main thread {cpu['main']:.3g}, data thread {cpu['data']:.3g}) and {cpu['workers']:.3g} s of loader workers",
    ]


def own_time(module: Mapping[str, Any]) -> float:
    return float(sum(module.get(kind, 0.0) for kind in ("forward", "recompute", "backward", "communication")))


def describe(wait: Mapping[str, Any]) -> str:
    of = f" of {wait['module']}" if wait["module"] else ""
    size = f", {wait['bytes'] / 1e6:.3g} MB" if wait["bytes"] else ""
    return f"{1e3 * wait['seconds']:,.1f} ms for {wait['what']}{of}{size} (rank {wait['rank']}, step {wait['step']})"
