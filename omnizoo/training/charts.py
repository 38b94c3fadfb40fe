"""Charts as HTML without a library: a line of SVG that stretches to any width, and labels that keep their size."""

import itertools
import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from html import escape
from typing import Any

from omnizoo.training.history import History, downsample, smooth

RESUMED, SKIPPED = "resumed", "skipped step"  # what marks stand for
UNITS = 1000  # of the drawing, both ways; the page stretches it


@dataclass(frozen=True)
class Curve:
    name: str  # in legend and read-out; none: only drawn
    steps: list[int]
    values: list[float]  # one per step, NaN for none
    look: str  # faint, line, dots or "dots line": classes of the style sheet
    colour: int = 0


@dataclass(frozen=True)
class Chart:
    title: str
    curves: list[Curve]
    form: Callable[[float], str]
    log: bool = False
    marks: Mapping[str, frozenset[int]] = field(default_factory=dict)  # by what happened there: steps
    wide: bool = False


def si(value: float) -> str:
    size = 0 if abs(value) < 999.5 else min(4, math.floor(math.log10(abs(value) * 1.0005) / 3))
    return f"{value / 1000**size:.4g}{('', ' k', ' M', ' G', ' T')[size]}"


def plain(value: float) -> str:
    return f"{value:.4g}"


def percent(value: float) -> str:
    return f"{100 * value:.4g}%"


def with_trend(name: str, history: History, key: str, log: bool, trend: str = "", colour: int = 0) -> list[Curve]:
    """The values; where they are many and jump about, faint, with their running mean on top."""
    values, steps = history.values(key), history.steps
    finite = [value for value in values if math.isfinite(value)]
    way = sum(abs(b - a) for a, b in itertools.pairwise(finite))
    if len(finite) < 20 or way < 4 * (max(finite) - min(finite)):
        return [Curve(name, steps, values, "line", colour)]
    window = max(5, len(values) / 200)
    if log:
        mean = [math.exp(v) for v in smooth([math.log(v) if v > 0 else math.nan for v in values], window)]
    else:
        mean = smooth(values, window)
    return [Curve(name, steps, values, "faint", colour), Curve(trend, steps, mean, "line", colour)]


def is_spread(finite: list[float]) -> bool:
    """Whether a linear axis would show one spike and a flat line."""
    return min(finite) > 0 and max(finite) > 30 * statistics.median(finite)


def _ticks(low: float, high: float, count: int) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten) between low and high, as near to `count` of them as can be."""
    power = 10.0 ** math.floor(math.log10((high - low) / count))
    steps = (power * m for m in (1, 2, 5, 10))
    best = min(steps, key=lambda step: abs(math.floor(high / step) - math.ceil(low / step) + 1 - count))
    return [i * best for i in range(math.ceil(low / best), math.floor(high / best) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    for leading in ((1,), (1, 3), (1, 2, 5)):
        decades = range(math.floor(math.log10(low)), math.floor(math.log10(high)) + 1)
        ticks = [m * 10.0**d for d in decades for m in leading if low <= m * 10.0**d <= high]
        if len(ticks) >= 3:
            return ticks[:: math.ceil(len(ticks) / 6)]
    return _ticks(low, high, 4)


def draw(chart: Chart, buckets: int, read_outs: list[dict[str, Any]]) -> str:
    """One figure; what the script needs to read it out goes to `read_outs`."""
    finite = [value for curve in chart.curves for value in curve.values if math.isfinite(value)]
    low, high = min(finite), max(finite)
    if chart.log:
        low, high = low / 1.1, high * 1.1
        ticks = _log_ticks(low, high)
    else:
        margin = max((high - low) * 0.06, abs(high) * 0.005) or 1.0  # a narrower axis would repeat its labels
        low, high = low - margin, high + margin
        ticks = _ticks(low, high, 6 if chart.wide else 4)
    first, last = min(curve.steps[0] for curve in chart.curves), max(curve.steps[-1] for curve in chart.curves)
    first, last = (first, last) if last > first else (first - 1, first + 1)

    def x(step: float) -> float:
        return UNITS * (step - first) / (last - first)

    def y(value: float) -> float:
        share = math.log(value / low) / math.log(high / low) if chart.log else (value - low) / (high - low)
        return UNITS * (1 - share)

    rules = "".join(f"M0 {y(tick):.0f}H{UNITS}" for tick in ticks)
    svg = [f'<svg viewBox="0 0 {UNITS} {UNITS}" preserveAspectRatio="none"><path class=rule d="{rules}"/>']
    labels = [f'<s class=y style="top:{y(tick) / 10:.2f}%">{chart.form(tick)}</s>' for tick in ticks]
    whole = [tick for tick in _ticks(first, last, 9 if chart.wide else 5) if tick == round(tick)]
    labels += [f'<s class=x style="left:{x(tick) / 10:.2f}%">{tick:,.0f}</s>' for tick in whole]
    legend = [
        f'<i class="{curve.look} c{curve.colour}">{escape(curve.name)}</i>'
        for curve in chart.curves
        if curve.name and (chart.wide or len(chart.curves) > 2)
    ]
    for kind, happened in chart.marks.items():
        marks = sorted(step for step in happened if first <= step <= last)
        if marks:
            height = f"{UNITS}V0" if kind == RESUMED else f"{UNITS}v-60"
            shown = marks[:: len(marks) // 500 + 1]
            look = "resumed" if kind == RESUMED else "mark"
            svg.append(f'<path class={look} d="{"".join(f"M{x(step):.1f} {height}" for step in shown)}"/>')
            if chart.wide:  # what a mark means, is said once
                legend.append(f"<i class={look}>{escape(kind)}</i>")
    read = []
    for curve in chart.curves:
        points = list(zip(curve.steps, curve.values, strict=True))
        if "dots" in curve.look:  # measured now and then: what lies between is no gap
            points = [(step, value) for step, value in points if math.isfinite(value)]
        points = [points[i] for i in downsample([value for _, value in points], buckets)]
        svg.append(_path(curve, [(x(step), y(v)) if math.isfinite(v) else None for step, v in points]))
        known = [(step, float(f"{v:.5g}")) for step, v in points if math.isfinite(v)]
        if curve.name:
            read.append({"name": curve.name, "steps": [step for step, _ in known], "values": [v for _, v in known]})
    svg.append(f'<path class=cursor d="M0 0V{UNITS}"/></svg>')
    number = len(read_outs)
    read_outs.append({"step": [first, last], "percent": chart.form is percent, "curves": read})
    legend += ["<i>log scale</i>"] * chart.log
    caption = f"<figcaption><b>{escape(chart.title)}</b>{''.join(legend)}<output></output></figcaption>"
    plot = f'<div class=plot data-chart="{number}">{"".join(svg)}{"".join(labels)}</div>'
    return f"<figure{' class=wide' if chart.wide else ''}>{caption}{plot}</figure>"


def _path(curve: Curve, points: list[tuple[float, float] | None]) -> str:
    """A line that breaks at gaps; a stroke of no length is a dot."""
    grid = [None if point is None else f"{point[0]:.1f} {point[1]:.0f}" for point in points]
    runs = [[str(point) for point in run] for known, run in itertools.groupby(grid, bool) if known]
    dots = "".join(f"M{point}h0" for point in grid if point)
    lone = "".join(f"M{run[0]}h0" for run in runs if len(run) == 1)
    line = "".join("M" + " ".join(run) for run in runs if len(run) > 1)
    layers = {"dots": [("dots", dots)], "dots line": [("dots line", line), ("dots", dots)]}
    drawn = layers.get(curve.look, [(curve.look, line), ("lone", lone)])
    return "".join(f'<path class="{name} c{curve.colour}" d="{d}"/>' for name, d in drawn if d)
