"""A plan as one page: memory over the step, stacked by part, and the tables. No script, no server."""

from collections.abc import Iterable, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from omnizoo.config.errors import UserError
from omnizoo.planning.ledger import PARTS, Timeline
from omnizoo.training.page_style import STYLE

GIB = 2**30
POINTS = 600  # of the timeline that are drawn
WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 1120, 380, 56, 12, 28
COLOURS = ("#5b6b82", "#d1495b", "#8d6bb8", "#2f6fed", "#2a9d8f", "#e8a33d", "#9bb53c", "#b9bfca")

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">
<title>{title} · plan · OmniZoo</title><style>{style}
figcaption{{flex-wrap:wrap}}figcaption i span{{width:10px;height:10px;border-radius:2px;display:inline-block}}
path.area{{stroke:none}}path.limit{{stroke:var(--bad);stroke-dasharray:5 4;stroke-width:1.5}}
</style></head><body><main>
{body}
</main></body></html>
"""


def write_page(path: Path, name: str, found: dict[str, Any], timeline: Timeline) -> None:
    """`found` is what `--json` prints."""
    verdict = ("done", "fits") if found["fits"] else ("open", "does not fit")
    at = found["peak_at"]
    facts = {
        "peak": f"{found['peak_memory_gb']:,.1f} GiB",
        "device": f"{found['device_memory_gb']:g} GiB",
        "tokens per step": f"{found['tokens_per_step']:,}",
        "FLOPs per step": f"{found['flops_per_step']:.3g}",
    }
    if (expected := found["expected"]) is not None:
        facts["tokens/s per device, a prediction"] = f"{expected['tokens_per_second_per_device']:,.0f}"
    body = [
        f"<header><h1>{escape(name)}<mark class={verdict[0]}>{verdict[1]}</mark></h1>",
        f"<p>rank {found['rank']} of {found['world']} ({escape(found['layout'])}); {escape(found['data'])}</p>",
        "</header>",
        f"<dl>{''.join(f'<div><dt>{key}</dt><dd>{value}</dd></div>' for key, value in facts.items())}</dl>",
        _chart(timeline, found["device_memory_gb"] * (1 - found["margin"])),
        f"<p>The peak is in the {at['phase']} of {escape(at['module'])}.</p>",
        _table("Memory at the peak", ("part", "GiB"), ((k, f"{v:,.3f}") for k, v in found["memory"].items())),
        _table(
            "Activations at the peak", ("module", "GiB"), ((k, f"{v:,.3f}") for k, v in found["activations"].items())
        ),
        _table(
            "What this rank sends in a step",
            ("collective", "axis", "calls", "MiB", "reach"),
            (
                (c["op"], c["axis"], f"{c['count']:,}", f"{c['bytes'] / 2**20:,.2f}", _reach(c))
                for c in found["collectives"]
            ),
        ),
        _table(
            "Where the host waits for the device",
            ("where", "for", "times a step"),
            ((s["where"], f"{s['kind']}: {s['operator']}", f"{s['count']:,}") for s in found["host_syncs"]),
        ),
    ]
    if expected is not None:
        rows = ((part, f"{seconds:,.3f}") for part, seconds in expected["seconds"].items())
        title = f"Expected seconds of a step: a prediction, {expected['prediction']}"
        body.append(_table(title, ("part", "seconds"), rows))
    if found["advice"]:
        rows = ((str(each["change"]), f"{each['peak_memory_gb']:,.1f}") for each in found["advice"])
        body.append(_table("What helps", ("change", "peak, GiB"), rows))
    try:
        path.write_text(PAGE.format(title=escape(name), style=STYLE, body="\n".join(body)), encoding="utf-8")
    except OSError as error:
        raise UserError(f"--html: cannot write {path}: {error.strerror}") from error


def _reach(collective: dict[str, Any]) -> str:
    return "inside a node" if collective["inside_node"] else "across nodes"


def _chart(timeline: Timeline, allowed: float) -> str:
    """Of every stretch of the step, the moment when most was held."""
    levels = timeline.bytes / GIB
    columns = _moments(levels.sum(0))
    tops = levels[:, columns].cumsum(0)
    high = max(float(tops[-1].max()), allowed) * 1.05
    x = LEFT + (WIDTH - LEFT) * np.arange(len(columns)) / max(1, len(columns) - 1)

    def y(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - values / high)

    areas = []
    below = np.zeros(len(columns))
    for top, colour, part in zip(tops, COLOURS, PARTS, strict=True):
        points = [*zip(x, y(top), strict=True), *zip(x[::-1], y(below)[::-1], strict=True)]
        path = "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in points) + "Z"
        areas.append(f'<path class=area d="{path}" style="fill:{colour}"><title>{part}</title></path>')
        below = top
    limit = float(y(np.array([allowed]))[0])
    areas.append(f'<path class=limit d="M{LEFT} {limit:.1f}H{WIDTH}"/>')
    for value in np.linspace(0, high, 5):
        at = float(y(np.array([value]))[0])
        areas.append(f'<text class=y x="{LEFT - 6}" y="{at + 4:.1f}">{value:,.1f}</text>')
    for event, phase in timeline.phases:
        at = float(x[min(int(np.searchsorted(columns, event)), len(x) - 1)])
        areas.append(f'<text x="{at:.1f}" y="{HEIGHT - 8}">{phase}</text>')
    legend = "".join(
        f'<i><span style="background:{colour}"></span>{part}</i>' for colour, part in zip(COLOURS, PARTS, strict=True)
    )
    return (
        f"<figure class=wide><figcaption><b>memory over the step, GiB</b>{legend}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}">{"".join(areas)}</svg></figure>'
    )


def _moments(total: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    if len(total) <= POINTS:
        return np.arange(len(total))
    edges = np.linspace(0, len(total), POINTS + 1).astype(int)
    return np.array([a + int(total[a:b].argmax()) for a, b in pairwise(edges)])


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{column}</th>" for column in columns)
    lines = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<h2>{title}</h2><div class=scroll><table><tr>{head}</tr>{lines}</table></div>"
