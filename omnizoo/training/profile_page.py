"""`profile.html`: where the time of a step goes, as one page for a person. No server, no script, no library."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from omnizoo.training.metrics import replace_file
from omnizoo.training.page_style import STYLE
from omnizoo.training.profile_summary import WORDS, own_time

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">
<title>{title} · profile · OmniZoo</title><style>{style}
.bar{{display:flex;height:34px;border-radius:6px;overflow:hidden;margin:4px 8px 10px}}
.bar span,figcaption i span,td.share span{{background:var(--own)}}
figcaption i span{{width:10px;height:10px;border-radius:2px;display:inline-block}}
td.share{{min-width:110px;width:22%}}td.share span{{display:block;height:9px;border-radius:3px;margin-top:6px}}
td.module{{white-space:pre;font-family:ui-monospace,Menlo,Consolas,monospace;font-size:12.5px}}
.c8{{--own:#9c6b4e}}.c9{{--own:#4d5563}}.scroll.tall{{max-height:760px}}p.note{{color:var(--soft);font-size:13px}}
@media(max-width:640px){{td.share{{min-width:56px}}th,td{{min-width:0}}}}
</style></head><body><main>
{body}
</main></body></html>
"""
# Colours of page_style and two more; the same kind has the same one on every page.
COLOURS = {kind: number for number, kind in enumerate(("forward", "communication", "backward", "overhead", "optimizer",
           "data", "recompute", "idle", "evaluation", "checkpoint"))}  # fmt: skip
MOST_MODULES = 400


def write_page(path: Path, name: str, summary: Mapping[str, Any]) -> Path:
    """`summary` is what `summarise` gives."""
    steps, world = summary["steps"], summary["world"]
    recorded = f"steps {steps[0]:,} to {steps[-1]:,}" if len(steps) > 1 else f"step {steps[0]:,}"
    ranks = f"{world} rank{'s' if world > 1 else ''} ({escape(summary['layout'])})"
    body = [
        f"<header><h1>{escape(name)}<mark>profile</mark></h1>",
        f"<p>{recorded}, {ranks}; rank 0 unless said otherwise<span>seconds are per step</span></p></header>",
        _cards(summary),
        _kinds(summary),
        _table(
            "The longest waits",
            ("", "waited for", "of", "MB", "ms", "rank", "step", "during"),
            (
                [
                    str(number),
                    wait["what"],
                    wait["module"] or "-",
                    f"{wait['bytes'] / 1e6:,.3g}" if wait["bytes"] else "-",
                    f"{1e3 * wait['seconds']:,.2f}",
                    str(wait["rank"]),
                    f"{wait['step']:,}",
                    wait["during"],
                ]
                for number, wait in enumerate(summary["waits"], start=1)
            ),
            numbers=(3, 4, 5, 6),
        ),
        _modules(summary),
        _operators(summary),
        _table(
            "Our own overhead, by what it was spent on",
            ("what", "ms", "share of the step"),
            (
                [each["what"], f"{1e3 * each['seconds']:,.2f}", _percent(each["seconds"], summary)]
                for each in summary["overhead"]
            ),
            numbers=(1, 2),
        ),
        _table(
            "Wall and CPU time by phase",
            ("phase", "wall, s", "CPU of the process, s", "of which the main thread, s"),
            (
                [phase, *(f"{spent[clock]:.3f}" for clock in ("wall", "cpu", "thread"))]
                for phase, spent in sorted(summary["phases"].items(), key=lambda each: -each[1]["wall"])
            ),
            numbers=(1, 2, 3),
        ),
        _table(
            "CPU time by thread, seconds per step",
            ("main thread", "data thread", "other threads", "loader workers"),
            [[f"{seconds:.3f}" for seconds in _threads(summary["cpu"]).values()]],
            numbers=(0, 1, 2, 3),
        ),
        _table(
            "Ranks",
            ("kind", "mean, s", "slowest, s", "slowest rank", "slowest / mean"),
            (
                [WORDS.get(kind, kind), f"{of['mean']:.3f}", f"{of['most']:.3f}", str(of["rank"]), f"{of['ratio']:.2f}"]
                for kind, of in summary["ranks"].items()
            ),
            numbers=(1, 2, 3, 4),
        )
        if world > 1
        else "",
        "<p class=note>What the words mean: docs/profiling.md. Open trace.rank0.json.gz in ui.perfetto.dev or "
        "chrome://tracing for every single event.</p>",
    ]
    replace_file(path, PAGE.format(title=escape(name), style=STYLE, body="\n".join(filter(None, body))))
    return path


def _threads(cpu: Mapping[str, float]) -> dict[str, float]:
    others = max(0.0, cpu["process"] - cpu["main"] - cpu["data"])
    return {"main": cpu["main"], "data": cpu["data"], "others": others, "workers": cpu["workers"]}


def _percent(seconds: float, summary: Mapping[str, Any]) -> str:
    return f"{100 * seconds / summary['seconds']:.2f}%" if summary["seconds"] else "-"


def _cards(summary: Mapping[str, Any]) -> str:
    kinds, wait, slowest = summary["kinds"], summary["waits"][:1], summary["ranks"]["step"]

    def share(*names: str) -> str:
        part = 100 * sum(kinds[name]["share"] for name in names if name in kinds)
        return f"{part:.1f}%" if part >= 1 else f"{part:.2f}%"

    cards = [
        ("A step", f"{summary['seconds']:.3g} s", "recording included"),
        ("Computing the model", share("forward", "recompute", "backward"), "forward, recompute, backward"),
        ("Exposed communication", share("communication"), "nothing is computed meanwhile"),
        ("Our own overhead", share("overhead"), f"{100 * summary['overhead_cpu']:.2f}% of the CPU time"),
        ("Optimizer", share("optimizer"), "norm, clip, update"),
        ("Data", share("data"), "waited for by the step"),
        (
            "Longest wait",
            f"{1e3 * wait[0]['seconds']:,.1f} ms" if wait else "-",
            escape(wait[0]["what"]) if wait else "",
        ),
        ("Slowest rank / mean", f"{slowest['ratio']:.2f}", f"rank {slowest['rank']}"),
    ]
    return (
        f"<dl>{''.join(f'<div><dt>{dt}</dt><dd>{dd}</dd><small>{note}</small></div>' for dt, dd, note in cards)}</dl>"
    )


def _kinds(summary: Mapping[str, Any]) -> str:
    kinds = summary["kinds"]
    bar = "".join(
        f'<span class=c{COLOURS[kind]} style="width:{100 * of["share"]:.3f}%" title="{WORDS[kind]}"></span>'
        for kind, of in kinds.items()
    )
    legend = "".join(f"<i><span class=c{COLOURS[kind]}></span>{WORDS[kind]}</i>" for kind in kinds)
    rows = "".join(
        f"<tr><td>{WORDS[kind]}</td><td class=number>{of['seconds']:.4f}</td>"
        f"<td class=number>{100 * of['share']:.2f}%</td><td class=number>{of['python']:.4f}</td></tr>"
        for kind, of in kinds.items()
    )
    head = (
        "<tr><th>kind</th><th class=number>seconds</th><th class=number>share</th>"
        "<th class=number>outside of operators, s</th></tr>"
    )
    timeline = "the device" if summary["device"] else "the main thread"
    return (
        f"<figure class=wide><figcaption><b>a step by kind, on {timeline}</b>{legend}</figcaption>"
        f"<div class=bar>{bar}</div></figure><h2>By kind</h2><div class=scroll><table>{head}{rows}</table></div>"
    )


def _modules(summary: Mapping[str, Any]) -> str:
    """The tree, layers of the same kind together."""
    most = max((each.get("total", 0.0) for each in summary["modules"]), default=0.0) or 1.0
    rows = []
    for each in summary["modules"][:MOST_MODULES]:
        path = each["module"]
        depth = path.count(".") + 1 if path and not path.startswith("(") else 0
        name = "&nbsp;&nbsp;" * depth + escape(path.rpartition(".")[2] if depth else path or "the model")
        cells = "".join(
            f"<td class=number>{1e3 * each.get(key, 0.0):,.1f}</td>"
            for key in ("total forward", "total recompute", "total backward", "total communication")
        )
        whole = "".join(f"<td class=number>{1e3 * ms:,.1f}</td>" for ms in (each.get("total", 0.0), own_time(each)))
        bar = f'<span class=c0 style="width:{100 * each.get("total", 0.0) / most:.1f}%"></span>'
        rows.append(
            f"<tr><td class=module title='{escape(path)}'>{name}</td><td class=share>{bar}</td>{whole}{cells}</tr>"
        )
    heads = ("total", "own", "forward", "recompute", "backward", "communication")
    head = "<tr><th>module</th><th></th>" + "".join(f"<th class=number>{name}, ms</th>" for name in heads) + "</tr>"
    left = len(summary["modules"]) - MOST_MODULES
    more = f"<p class=note>and {left:,} more in summary.json</p>" if left > 0 else ""
    note = "<p class=note>With all that is inside of each; <i>own</i> is without. <i>*</i>: all layers together.</p>"
    return f"<h2>By module</h2>{note}<div class='scroll tall'><table>{head}{''.join(rows)}</table></div>{more}"


def _operators(summary: Mapping[str, Any]) -> str:
    most = max((each["seconds"] for each in summary["operators"]), default=0.0) or 1.0
    rows = "".join(
        f"<tr><td class=module>{escape(each['operator'])}</td>"
        f'<td class=share><span class=c0 style="width:{100 * each["seconds"] / most:.1f}%"></span></td>'
        f"<td class=number>{each['calls']:,.4g}</td><td class=number>{1e3 * each['seconds']:,.2f}</td>"
        f"<td class=number>{_percent(each['seconds'], summary)}</td></tr>"
        for each in summary["operators"]
    )
    head = (
        "<tr><th>operator</th><th></th><th class=number>calls</th><th class=number>own time, ms</th>"
        "<th class=number>share</th></tr>"
    )
    return f"<h2>By operator</h2><div class=scroll><table>{head}{rows}</table></div>"


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        made = (
            f"<{tag}{' class=number' if place in numbers else ''}>{escape(cell)}</{tag}>"
            for place, cell in enumerate(cells)
        )
        return f"<tr>{''.join(made)}</tr>"

    lines = "".join(row(cells, "td") for cells in rows)
    shown = f"<div class=scroll><table>{row(columns, 'th')}{lines}</table></div>" if lines else "<p>none</p>"
    return f"<h2>{escape(title)}</h2>{shown}"
