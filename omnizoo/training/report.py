"""`report.html`: one self-contained page about a run, drawn from its folder. No server, no network, no library.

What is plotted is discovered from `metrics.jsonl`: a new metric gets its chart without a change here. Other rooms add
pictures as `Section`s. It reads what is there, so it also works on a run that was interrupted or has barely begun.
"""

import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import yaml

from omnizoo.training.metrics import RunFolder, read_metrics, replace_file

POINTS = 9000  # of all curves of the page together: about 200 KB however long the run
TABLE_ROWS = 100


@dataclass(frozen=True)
class Section:
    """A part of the page made elsewhere. `html` goes in as it is: whoever makes it escapes what comes from data."""

    title: str
    html: str


def write_report(run: RunFolder, sections: Sequence[Section] = ()) -> Path:
    """Write `report.html` into the run folder, whatever state the run is in, and return its path."""
    name = run.root.resolve().name
    history = History(read_metrics(run.metrics))
    config = run.config.read_text(encoding="utf-8") if run.config.exists() else ""
    bad_steps, bad_rows = _read_rows(run.bad_steps), _read_rows(run.bad_rows)
    listed = {row["step"] for row in bad_steps if isinstance(row.get("step"), int)}
    groups = _charts(history, frozenset(history.bad_steps() | listed))
    buckets = POINTS // (2 * max(1, sum(len(chart.curves) for _, charts in groups for chart in charts)))
    body = [_header(name, config, history), _headline(history, len(bad_steps), len(bad_rows))]
    read_outs: list[dict[str, Any]] = []
    for title, charts in groups:
        figures = "".join(_draw(chart, history.steps, buckets, read_outs) for chart in charts)
        body.append((f"<h2>{escape(title)}</h2>" if title else "") + f"<div class=grid>{figures}</div>")
    body += [f"<h2>{escape(section.title)}</h2>{section.html}" for section in sections]
    body += [_table("Skipped steps", bad_steps), _table("Skipped rows", bad_rows)]
    if config:
        body.append(
            f"<h2>Configuration</h2><details><summary>config.yaml</summary><pre>{escape(config)}</pre></details>"
        )
    data = json.dumps(read_outs, separators=(",", ":")).replace("<", "\\u003c")  # no name may end the script element
    page = PAGE.format(title=escape(name), style=STYLE, body="\n".join(body), data=data, script=SCRIPT)
    replace_file(run.report, page)
    return run.report


# ---- what was measured


class History:
    """The metrics by name, one value per step; NaN where a step has none."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.steps = [int(row["step"]) for row in rows]
        self.keys = [key for key in dict.fromkeys(key for row in rows for key in row) if key != "step"]
        self._rows = rows

    def values(self, key: str) -> list[float]:
        return [math.nan if row.get(key) is None else float(row[key]) for row in self._rows]

    def finite(self, key: str) -> list[float]:
        return [value for value in self.values(key) if math.isfinite(value)]

    def last(self, key: str) -> float | None:
        return next((float(row[key]) for row in reversed(self._rows) if row.get(key) is not None), None)

    def seconds(self) -> float:
        pairs = zip(self.values("tokens"), self.values("tokens_per_sec"), strict=True)
        return sum(tokens / rate for tokens, rate in pairs if rate > 0 and math.isfinite(tokens / rate))

    def bad_steps(self) -> set[int]:
        """Skipped steps: a loss or gradient that is not finite, or the count of them went up."""
        bad, before = set(), 0.0
        for step, row in zip(self.steps, self._rows, strict=True):
            count = row.get("bad_steps") or 0.0
            broken = any(row.get(key) is not None and not math.isfinite(row[key]) for key in ("loss", "grad_norm"))
            if broken or count > before:
                bad.add(step)
            before = count
        return bad


def _read_rows(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file; a line that is none (half written, say) is shown as it is."""
    rows: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []:
        try:
            row = json.loads(line)
        except ValueError:
            row = line
        rows.append(row if isinstance(row, dict) else {"line": row})
    return rows


def smooth(values: Sequence[float], window: float) -> list[float]:
    """Mean of the neighbours on both sides, their weights fading exponentially: no lag; NaN does not count."""
    fade = 1 - 1 / window

    def behind(ordered: Iterable[float]) -> list[tuple[float, float]]:
        total = weight = 0.0
        sums = []
        for value in ordered:
            sums.append((total, weight))  # before the value itself, which both directions would count
            if math.isfinite(value):
                total, weight = total + value, weight + 1
            total, weight = total * fade, weight * fade
        return sums

    means = []
    for value, (left, a), (right, b) in zip(values, behind(values), reversed(behind(reversed(values))), strict=True):
        own, c = (value, 1.0) if math.isfinite(value) else (0.0, 0.0)
        means.append((left + own + right) / (a + b + c) if a + b + c else math.nan)
    return means


def downsample(values: Sequence[float], buckets: int) -> list[int]:
    """Indices to draw: both ends, and of every bucket its lowest and highest value and one gap, if it has any."""
    count = len(values)
    if count <= 2 * buckets:
        return list(range(count))
    kept = {0, count - 1}
    for bucket in range(buckets):
        indices = range(bucket * count // buckets, (bucket + 1) * count // buckets)
        finite = [i for i in indices if math.isfinite(values[i])]
        if finite:
            kept |= {min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)}
        if len(finite) < len(indices):
            kept.add(next(i for i in indices if not math.isfinite(values[i])))
    return sorted(kept)


# ---- charts


@dataclass(frozen=True)
class Curve:
    name: str  # in legend and read-out; none: only drawn
    values: list[float]  # one per step, NaN for none
    look: str  # faint, line, dots or "dots line": classes of the style sheet


@dataclass(frozen=True)
class Chart:
    title: str
    curves: list[Curve]
    form: Callable[[float], str]
    log: bool = False
    marks: frozenset[int] = frozenset()  # skipped steps
    wide: bool = False


def _si(value: float) -> str:
    size = 0 if abs(value) < 999.5 else min(4, math.floor(math.log10(abs(value) * 1.0005) / 3))
    return f"{value / 1000**size:.4g}{('', ' k', ' M', ' G', ' T')[size]}"


def _plain(value: float) -> str:
    return f"{value:.4g}"


def _percent(value: float) -> str:
    return f"{100 * value:.4g}%"


KNOWN: dict[str, tuple[str, str, Callable[[float], str]]] = {  # key: group, title, how its values are written
    "grad_norm": ("Optimization", "Gradient norm", _plain),
    "lr": ("Optimization", "Learning rate", _plain),
    "tokens_per_sec": ("Speed and memory", "Tokens per second", _si),
    "mfu": ("Speed and memory", "Model FLOPs utilization", _percent),
    "memory_gb": ("Speed and memory", "Memory, GB", _plain),
    "data_wait": ("Speed and memory", "Time spent waiting for data", _percent),
    "fill": ("Data", "Pack fill", _percent),
    "imbalance": ("Data", "Imbalance: most / mean work of a rank", _plain),
    "tokens": ("Data", "Tokens per step", _si),
    "epoch": ("Data", "Epoch", _plain),
}
GROUPS = {"loss": "Loss terms", "eval": "Held-out evaluation"}  # by what stands before the slash of a key
ELSEWHERE = ("loss", "bad_steps", "skipped_rows")  # the first chart and the headline


def _charts(history: History, bad: frozenset[int]) -> list[tuple[str, list[Chart]]]:
    """Groups of charts: the loss first, then what is known, then whatever else was measured."""
    groups: dict[str, list[Chart]] = {}
    if finite := history.finite("loss"):
        log = _spread(finite)
        curves = _with_trend("loss", history.values("loss"), log, "smoothed")
        if history.finite("eval/loss"):
            curves.append(Curve("held-out", history.values("eval/loss"), "dots"))
        groups[""] = [Chart("Loss", curves, _plain, log, bad, wide=True)]
    for key in [*KNOWN, *(key for key in history.keys if key not in KNOWN and key not in ELSEWHERE)]:
        if not (finite := history.finite(key)):
            continue
        prefix, slash, rest = key.partition("/")
        group, title, form = KNOWN.get(key) or (GROUPS.get(prefix, prefix) if slash else "More", rest or key, _plain)
        log = _spread(finite) or (key == "grad_norm" and min(finite) > 0)
        values = history.values(key)
        curves = [Curve(title, values, "dots line")] if prefix == "eval" else _with_trend(title, values, log)
        groups.setdefault(group, []).append(Chart(title, curves, form, log, bad if key == "grad_norm" else frozenset()))
    order = ["", *GROUPS.values(), *dict.fromkeys(group for group, _, _ in KNOWN.values())]
    return sorted(groups.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order))


def _with_trend(name: str, values: list[float], log: bool, trend: str = "") -> list[Curve]:
    """The values; where they are many and jump about, faint, with their running mean on top."""
    finite = [value for value in values if math.isfinite(value)]
    way = sum(abs(b - a) for a, b in itertools.pairwise(finite))
    if len(finite) < 20 or way < 4 * (max(finite) - min(finite)):
        return [Curve(name, values, "line")]
    window = max(5, len(values) / 200)
    if log:
        mean = [math.exp(v) for v in smooth([math.log(v) if v > 0 else math.nan for v in values], window)]
    else:
        mean = smooth(values, window)
    return [Curve(name, values, "faint"), Curve(trend, mean, "line")]


def _spread(finite: list[float]) -> bool:
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


def _draw(chart: Chart, steps: list[int], buckets: int, read_outs: list[dict[str, Any]]) -> str:
    """One figure as static SVG; what the script needs to read it out goes to `read_outs`."""
    width, height = (1128, 300) if chart.wide else (552, 180)
    left, right, top, bottom = 56, width - 24, 10, height - 26
    finite = [value for curve in chart.curves for value in curve.values if math.isfinite(value)]
    low, high = min(finite), max(finite)
    if chart.log:
        low, high = low / 1.1, high * 1.1
        ticks = _log_ticks(low, high)
    else:
        margin = max((high - low) * 0.06, abs(high) * 0.005) or 1.0  # a narrower axis would repeat its labels
        low, high = low - margin, high + margin
        ticks = _ticks(low, high, 6 if chart.wide else 4)
    first, last = (steps[0], steps[-1]) if steps[-1] > steps[0] else (steps[0] - 1, steps[0] + 1)

    def x(step: float) -> float:
        return left + (right - left) * (step - first) / (last - first)

    def y(value: float) -> float:
        share = math.log(value / low) / math.log(high / low) if chart.log else (value - low) / (high - low)
        return bottom - (bottom - top) * share

    svg = [f'<svg role=img viewBox="0 0 {width} {height}" data-chart="{len(read_outs)}">']
    for tick in ticks:
        svg.append(f'<path class=rule d="M{left} {y(tick):.1f}H{right}"/>')
        svg.append(f'<text class=y x="{left - 8}" y="{y(tick) + 4:.1f}">{chart.form(tick)}</text>')
    for tick in _ticks(first, last, 9 if chart.wide else 5):
        if tick == round(tick):
            svg.append(f'<text class=x x="{x(tick):.1f}" y="{height - 7}">{tick:,.0f}</text>')
    marks = sorted(step for step in chart.marks if steps[0] <= step <= steps[-1])
    shown = marks[:: len(marks) // 500 + 1]
    svg.append(f'<path class=mark d="{"".join(f"M{x(step):.1f} {bottom}v-9" for step in shown)}"/>')
    read = []
    for curve in chart.curves:
        points = list(zip(steps, curve.values, strict=True))
        if "dots" in curve.look:  # measured now and then: what lies between is no gap
            points = [(step, value) for step, value in points if math.isfinite(value)]
        points = [points[i] for i in downsample([value for _, value in points], buckets)]
        svg.append(_path(curve.look, [(x(step), y(v)) if math.isfinite(v) else None for step, v in points]))
        known = [(step, float(f"{v:.5g}")) for step, v in points if math.isfinite(v)]
        if curve.name:
            read.append({"name": curve.name, "steps": [step for step, _ in known], "values": [v for _, v in known]})
    svg.append(f'<path class=cursor d="M0 {top}V{bottom}"/></svg>')
    read_outs.append(
        {"width": width, "x": [left, right], "step": [first, last], "percent": chart.form is _percent, "curves": read}
    )
    legend = [f'<i class="{curve.look}">{escape(curve.name)}</i>' for curve in chart.curves if chart.wide]
    legend += ["<i class=mark>skipped step</i>"] * bool(marks) + ["<i>log scale</i>"] * chart.log
    caption = f"<figcaption><b>{escape(chart.title)}</b>{''.join(legend)}<output></output></figcaption>"
    return f"<figure{' class=wide' if chart.wide else ''}>{caption}{''.join(svg)}</figure>"


def _path(look: str, points: list[tuple[float, float] | None]) -> str:
    """A line that breaks at gaps, in whole half-pixels to save bytes; a stroke of no length is a dot."""
    grid = [None if point is None else f"{2 * point[0]:.0f} {2 * point[1]:.0f}" for point in points]
    runs = [[str(point) for point in run] for known, run in itertools.groupby(grid, bool) if known]
    dots = "".join(f"M{point}h0" for point in grid if point)
    lone = "".join(f"M{run[0]}h0" for run in runs if len(run) == 1)
    line = "".join("M" + " ".join(run) for run in runs if len(run) > 1)
    layers = {"dots": [("dots", dots)], "dots line": [("dots line", line), ("dots", dots)]}
    drawn = layers.get(look, [(look, line), ("lone", lone)])
    return "".join(f'<path class="{name}" transform="scale(.5)" d="{d}"/>' for name, d in drawn if d)


# ---- words and figures


def _header(name: str, config: str, history: History) -> str:
    try:
        settings = yaml.safe_load(config)
        total, model = settings["train"]["steps"], settings["model"]
        base = model.get("foundation") or model
        origin = base.get("path") or base["config"]
        origin = origin["model_type"] if isinstance(origin, dict) else origin
        origin = " + ".join([str(origin), *(model.get("modalities") or {})])
    except (yaml.YAMLError, KeyError, TypeError, AttributeError):
        total, origin = None, ""  # the page is about the metrics; a config we cannot read is only shown
    last = history.steps[-1] if history.steps else 0
    if not isinstance(total, int):
        status = f"<mark>step {last:,}</mark>"
    elif last >= total:
        status = "<mark class=done>finished</mark>"
    else:
        status = f"<mark class=open>step {last:,} of {total:,}</mark>"
    about = f"{escape(str(origin))}<span>OmniZoo, {time.strftime('%Y-%m-%d %H:%M')}</span>"
    return f"<header><h1>{escape(name)}{status}</h1><p>{about}</p></header>"


def _headline(history: History, bad_steps: int, bad_rows: int) -> str:
    """The run in a handful of figures: name, value, note; a dash for what was not measured."""
    loss, tokens, seconds = history.last("loss"), sum(history.finite("tokens")), history.seconds()
    losses, rate, fill, memory = map(history.finite, ("loss", "tokens_per_sec", "fill", "memory_gb"))
    held_out = zip(history.values("eval/loss"), history.steps, strict=True)
    best, at = min(((value, step) for value, step in held_out if math.isfinite(value)), default=(None, 0))
    cards = [
        ("Final loss", "" if loss is None else _plain(loss), f"from {_plain(losses[0])}" if losses else ""),
        ("Best held-out loss", "" if best is None else _plain(best), f"at step {at:,}" if at else "not evaluated"),
        ("Steps", f"{len(history.steps):,}", f"skipped: {history.last('bad_steps') or bad_steps:,.0f}"),
        ("Tokens", _si(tokens) if tokens else "", f"rows skipped: {history.last('skipped_rows') or bad_rows:,.0f}"),
        ("Training time", _duration(seconds) if seconds else "", "spent in steps"),
        ("Tokens per second", _si(tokens / seconds) if seconds else "", f"at best {_si(max(rate))}" if rate else ""),
        ("Pack fill", _percent(statistics.fmean(fill)) if fill else "", "mean"),
        ("Memory", f"{max(memory):.3g} GB" if memory else "", "peak"),
    ]
    shown = (f"<div><dt>{dt}</dt><dd>{dd or '&ndash;'}</dd><small>{note}</small></div>" for dt, dd, note in cards)
    return f"<dl>{''.join(shown)}</dl>"


def _duration(seconds: float) -> str:
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours} h {m:02d} min" if hours else f"{m} min {s:02d} s" if m else f"{seconds:.3g} s"


def _table(title: str, rows: list[dict[str, Any]]) -> str:
    if not rows:
        return ""
    columns = list(dict.fromkeys(key for row in rows[:TABLE_ROWS] for key in row))
    cells = [[_cell(row[column]) if column in row else "" for column in columns] for row in rows[:TABLE_ROWS]]
    lines = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in line)}</tr>" for line in cells)
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    more = f"<p>and {len(rows) - TABLE_ROWS:,} more</p>" if len(rows) > TABLE_ROWS else ""
    return f"<h2>{title}</h2><div class=scroll><table><tr>{head}</tr>{lines}</table></div>{more}"


def _cell(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 300 else text[:300] + " …"


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">
<title>{title} · OmniZoo</title><style>{style}</style></head><body><main>
{body}
</main><script type="application/json" id="data">{data}</script><script>{script}</script></body></html>
"""

STYLE = """
:root{color-scheme:light dark;--page:#f6f7f9;--card:#fff;--ink:#16191f;--soft:#687182;--rule:#e6e9ee;--line:#2f6fed;
--dots:#e8710a;--bad:#d93025;--done:#137a3f;--open:#a05a00}
@media(prefers-color-scheme:dark){:root{--page:#0e1116;--card:#171b22;--ink:#e7eaf0;--soft:#8e98a8;--rule:#262c36;
--line:#6ea1ff;--dots:#ffa657;--bad:#ff6b60;--done:#56d38a;--open:#f0b35a}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1208px;margin:0 auto;padding:32px 24px 64px}
h1{margin:0;font-size:26px;letter-spacing:-.01em;overflow-wrap:anywhere}
h2{margin:36px 0 12px;font-size:17px}
header p{margin:4px 0 24px;color:var(--soft);display:flex;justify-content:space-between;gap:16px;flex-wrap:wrap}
mark{margin-left:12px;padding:3px 10px;border-radius:99px;background:var(--rule);color:var(--soft);font-size:13px;
font-weight:600;letter-spacing:0;vertical-align:4px;white-space:nowrap}
mark.done{color:var(--done)}mark.open{color:var(--open)}
dl{display:grid;grid-template-columns:repeat(4,1fr);gap:12px;margin:0 0 12px}
@media(max-width:800px){dl{grid-template-columns:repeat(2,1fr)}}
dl div,figure,details,.scroll{background:var(--card);border:1px solid var(--rule);border-radius:10px}
dl div{padding:12px 16px}
dt,small,figcaption,text{color:var(--soft);fill:var(--soft);font-size:13px}
dd{margin:0;font-size:22px;font-weight:600;font-variant-numeric:tabular-nums;white-space:nowrap}
.grid{margin-top:12px;display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,440px),1fr));gap:12px}
figure{margin:0;padding:12px 8px 4px 8px;min-width:0}
figure.wide{grid-column:1/-1}
figcaption{display:flex;gap:14px;align-items:center;padding:0 8px 4px;white-space:nowrap}
figcaption b{color:var(--ink);font-size:14px}
figcaption output{margin-left:auto;color:var(--ink);font-variant-numeric:tabular-nums;overflow:hidden}
figcaption i{font-style:normal;display:flex;align-items:center;gap:6px}
figcaption i[class]:before{content:"";width:14px;height:3px;border-radius:2px;background:var(--line)}
figcaption i.faint:before{opacity:.45}
figcaption i.dots:before{width:7px;height:7px;border-radius:9px;background:var(--dots)}
figcaption i.mark:before{width:2px;height:10px;background:var(--bad)}
svg{display:block;width:100%;height:auto;touch-action:pan-y}
text{font-size:11.5px;font-variant-numeric:tabular-nums}
text.y{text-anchor:end}text.x{text-anchor:middle}
path{fill:none;vector-effect:non-scaling-stroke;stroke-linecap:round;stroke-linejoin:round}
path.rule{stroke:var(--rule)}
path.line,path.faint{stroke:var(--line);stroke-width:1.8}
path.faint{opacity:.45;stroke-width:1.2}
path.dots{stroke:var(--dots);stroke-width:6}
path.lone{stroke:var(--line);stroke-width:5}
path.dots.line{stroke:var(--dots);stroke-width:1.5}
path.mark{stroke:var(--bad);stroke-width:2}
path.cursor{stroke:var(--soft);stroke-dasharray:2 3;visibility:hidden}
details{padding:12px 16px}summary{cursor:pointer;font-weight:600}
pre{margin:12px 0 0;overflow:auto;font:13px/1.5 ui-monospace,Menlo,Consolas,monospace}
.scroll{overflow:auto;max-height:420px}
table{border-collapse:collapse;width:100%;font-size:13px}
th,td{padding:7px 16px;text-align:left;border-bottom:1px solid var(--rule);vertical-align:top;min-width:6em;
overflow-wrap:break-word}
th{color:var(--soft);font-weight:600}
main img{max-width:100%}
"""

# Hovering one chart reads the same step out of all of them.
SCRIPT = """
const data = JSON.parse(document.getElementById('data').textContent);
const charts = [...document.querySelectorAll('svg[data-chart]')].map(svg => ({...data[svg.dataset.chart], svg,
  cursor: svg.querySelector('.cursor'), out: svg.parentNode.querySelector('output')}));
const nearest = (steps, at) => {
  let a = 0, b = steps.length - 1;
  while (b - a > 1) { const m = (a + b) >> 1; if (steps[m] < at) a = m; else b = m; }
  return at - steps[a] <= steps[b] - at ? a : b;
};
const text = (value, percent) =>
  (percent ? 100 * value : value).toLocaleString('en', {maximumSignificantDigits: 5}) + (percent ? '%' : '');
const show = at => charts.forEach(({x, step, percent, curves, cursor, out}) => {
  cursor.style.visibility = at === null ? 'hidden' : 'visible';
  if (at === null) { out.textContent = ''; return; }
  const s = curves[0].steps[nearest(curves[0].steps, at)];
  cursor.setAttribute('transform', `translate(${x[0] + (x[1] - x[0]) * (s - step[0]) / (step[1] - step[0])} 0)`);
  const name = c => curves.length > 1 ? c.name + ' ' : '';
  const values = curves.map(c => name(c) + text(c.values[nearest(c.steps, s)], percent));
  out.textContent = ['step ' + s.toLocaleString('en'), ...values].join('  ·  ');
});
charts.forEach(({svg, x, step, width}) => {
  svg.onpointermove = e => {
    const box = svg.getBoundingClientRect(), at = (e.clientX - box.left) / box.width * width;
    show(step[0] + (step[1] - step[0]) * Math.min(1, Math.max(0, (at - x[0]) / (x[1] - x[0]))));
  };
  svg.onpointerleave = () => show(null);
});
"""
