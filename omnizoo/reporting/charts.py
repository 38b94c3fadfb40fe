"""Charts of one or several runs. templates/charts.js draws their curves from JSON.

Every metric in `metrics.jsonl` gets a chart. A new metric needs no change in this file.
"""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from omnizoo.reporting.history import History, downsample, smooth

NUM_COLORS = 8  # number of colors for curves in the style sheet
MAX_POINTS = 9000  # maximum number of points on a page: about 200 KB, however long the run is
MAX_MARKS = 500  # maximum number of marks of each kind in a chart


class ChartMetric(NamedTuple):
    """Group, title and number format of a metric."""

    group: str
    title: str
    format: str = "plain"


KNOWN = {
    "loss": ChartMetric("", "Loss"),
    "eval/loss": ChartMetric("", "Held-out loss"),
    "grad_norm": ChartMetric("Optimization", "Gradient norm"),
    "lr": ChartMetric("Optimization", "Learning rate"),
    "tokens_per_sec": ChartMetric("Speed and memory", "Tokens per second", "si"),
    "mfu": ChartMetric("Speed and memory", "Model FLOPs utilization", "percent"),
    "memory_gb": ChartMetric("Speed and memory", "Memory, GB"),
    "data_wait": ChartMetric("Speed and memory", "Time spent waiting for data", "percent"),
    "fill": ChartMetric("Data", "Pack fill", "percent"),
    "imbalance": ChartMetric("Data", "Imbalance: maximum / mean work of a rank"),
    "tokens": ChartMetric("Data", "Tokens per step", "si"),
    "epoch": ChartMetric("Data", "Epoch"),
}
LOSS_TERMS = {
    "text": "Text, cross entropy",
    "balance": "Expert load balance",
    "router_z": "Router z-loss",
    "dpo": "Preference (DPO)",
    "kto": "Preference (KTO)",
    "orpo": "Preference (ORPO)",
    "simpo": "Preference (SimPO)",
    "grpo": "Policy (GRPO)",
    "gspo": "Policy (GSPO)",
}
TITLES = {
    "rewards/chosen": "Reward of the chosen response",
    "rewards/rejected": "Reward of the rejected response",
    "margin": "Reward margin",
    "accuracy": "Chosen above rejected",
    "kl": "KL divergence",
}
# Titles of chart groups, by prefix of the metric.
GROUPS = {"loss": "Loss terms", "eval": "Held-out evaluation", "imbalance": "Imbalance by part"}
COUNTS = {  # counters and their descriptions; the report shows the last value of each in a table
    "skipped_rows": "rows skipped",
    "undecodable_rows": "rows with media that could not be decoded",
    "dropped_overlong": "samples dropped: longer than a pack",
    "split_overlong": "samples split: longer than a pack",
    "truncated_overlong": "samples truncated: longer than a pack",
    "few_targets": "samples dropped: too few targets",
    "beyond_positions": "samples longer than the positions of the model",
}
TOP = ("loss", "eval/loss")  # metrics with wide charts at the top of the page
# Kinds of marks that only the charts of some metrics show: kind -> metrics. All charts show the other kinds.
MARKED_METRICS = {"skipped": ("loss", "grad_norm"), "waited": ("loss", "tokens_per_sec", "data_wait")}
NOT_PLOTTED = (*COUNTS, "bad_steps", "tokens_seen")


def format_value(value: float | None, form: str = "plain") -> str:
    """Format a number as `plain` (0.1234), `si` (12.3 k) or `percent` (12.3%). Return an empty string for None."""
    if value is None:
        return ""
    if form == "percent":
        return f"{100 * value:.4g}%"
    if form == "plain" or abs(value) < 999.5:
        return f"{value:.4g}"
    size = min(4, math.floor(math.log10(abs(value) * 1.0005) / 3))
    return f"{value / 1000**size:.4g} {'kMGT'[size - 1]}"


@dataclass(frozen=True)
class Curve:
    """A curve of values over steps."""

    name: str  # name in the legend and the tooltip; a curve with an empty name is not listed there
    steps: Sequence[int]
    values: Sequence[float]  # [steps], NaN for a gap
    look: str  # CSS classes: line, faint, dots, "dots line" or area
    color: int = 0  # index of the color in the style sheet

    def data(self, buckets: int) -> dict[str, Any]:
        """Return the curve as input for templates/charts.js.

        Args:
            buckets: Number of sections that a long curve is divided into (see `downsample`).
        """
        points = list(zip(self.steps, self.values, strict=True))
        if "dots" in self.look:  # measured in some steps only: connect the values without gaps
            points = [(step, value) for step, value in points if math.isfinite(value)]
        kept = [points[i] for i in downsample([value for _, value in points], buckets)]
        return {
            "name": self.name,
            "look": self.look,
            "color": self.color,
            "steps": [step for step, _ in kept],
            "values": [float(f"{value:.5g}") if math.isfinite(value) else None for _, value in kept],
        }


@dataclass(frozen=True)
class Chart:
    """A chart on a page."""

    title: str
    curves: list[Curve]
    format: str = "plain"  # format of values (see `format_value`)
    log: bool = False  # whether the vertical axis is logarithmic
    marks: Mapping[str, Sequence[int]] = field(default_factory=dict)  # marked steps, by CSS class of the mark
    wide: bool = False  # whether the chart spans the width of the page
    phases: Sequence[tuple[int, str]] = ()  # (start, name) of sections that label the horizontal axis instead of steps
    limit: float | None = None  # value of a horizontal line; if it is set, the vertical axis starts at 0
    constant: str = ""  # text of the value if all steps have the same value, otherwise empty

    def data(self, buckets: int) -> dict[str, Any]:
        """Return the chart as input for templates/charts.js. `buckets` limits the number of points of each curve."""
        return {
            "format": self.format,
            "log": self.log,
            "curves": [curve.data(buckets) for curve in self.curves],
            "marks": {look: steps[:: len(steps) // MAX_MARKS + 1] for look, steps in self.marks.items()},
            "phases": self.phases,
            "limit": self.limit,
        }


ChartGroups = list[tuple[str, list[Chart]]]  # (title, charts)


def buckets_per_curve(groups: ChartGroups) -> int:
    """Return a number of buckets per curve that limits all charts to about `MAX_POINTS` points."""
    num_curves = sum(len(chart.curves) for _, charts in groups for chart in charts)
    return max(20, MAX_POINTS // (2 * max(1, num_curves)))


def metric_charts(histories: Mapping[str, History], marks: Mapping[str, Sequence[int]]) -> ChartGroups:
    """Return the charts of one or several runs.

    There is one chart per metric, with one color per run. The caption of a metric that never changes states its
    value. A loss term with the same points as another one, such as the only term of the loss, is omitted. For a single
    run, the chart of the loss also shows the held-out loss, if both have the same terms.

    Args:
        histories: The metrics of each run, by its name.
        marks: Steps to mark, by CSS class of the mark.
    """
    groups: dict[str, list[Chart]] = {}
    drawn_losses = set()
    keys = [key for history in histories.values() for key in _plotted_keys(history)]
    for key in dict.fromkeys([*TOP, *keys]):
        metric = describe_metric(key)
        finite = [value for history in histories.values() for value in history.finite(key)]
        points = tuple(_drawn_points(history, key) for history in histories.values())
        is_loss_term = "/loss/" in f"/{key}" or key.endswith("/loss")
        if not finite or (is_loss_term and points in drawn_losses):
            continue
        drawn_losses.add(points)
        chart = _metric_chart(histories, key, metric, marks)
        if key == "eval/loss" and "" in groups and _is_comparable(histories):
            groups[""][0].curves.extend(replace(curve, name="held-out", look="dots") for curve in chart.curves)
        else:
            groups.setdefault(metric.group, []).append(chart)
    order = ["", *GROUPS.values(), *(metric.group for metric in KNOWN.values())]
    return sorted(groups.items(), key=lambda item: [*order, item[0]].index(item[0]))


def _is_comparable(histories: Mapping[str, History]) -> bool:
    """Whether the training and held-out losses of a single run have the same terms and can share an axis."""
    return len(histories) == 1 and all(other_held_out_terms(history) is None for history in histories.values())


def other_held_out_terms(history: History) -> list[str] | None:
    """Return the terms of the held-out loss if they differ from the terms of the training loss, otherwise None."""
    terms = [key.removeprefix("loss/") for key in history.keys if key.startswith("loss/")]
    held_out_terms = [key.removeprefix("eval/loss/") for key in history.keys if key.startswith("eval/loss/")]
    if not held_out_terms or set(held_out_terms) == set(terms):
        return None
    return held_out_terms


def _metric_chart(
    histories: Mapping[str, History], key: str, metric: ChartMetric, marks: Mapping[str, Sequence[int]]
) -> Chart:
    """Return the chart of one metric, with a curve for each run that has values."""
    is_log = _is_log(key, [value for history in histories.values() for value in history.finite(key)])
    is_single = len(histories) == 1
    curves: list[Curve] = []
    for number, (run, history) in enumerate(histories.items()):
        if not history.finite(key):
            continue
        name, trend_name = (metric.title, "smoothed") if is_single else ("", run)
        color = number % NUM_COLORS
        if key.startswith("eval/"):
            evaluated = Curve(name or run, history.steps, history.values(key), "dots line", 1 if is_single else color)
            curves.append(evaluated)
        else:
            curves += _curves_with_trend(history, key, is_log, name, trend_name, color)
    shown_marks = {}
    for look, steps in marks.items():
        if key in MARKED_METRICS.get(look, (key,)):
            shown_marks[look] = steps
    finite = [value for history in histories.values() for value in history.finite(key)]
    is_constant = len(finite) > 1 and min(finite) == max(finite)
    constant = format_value(finite[0], metric.format) if is_constant else ""
    return Chart(metric.title, curves, metric.format, is_log, shown_marks, wide=key in TOP, constant=constant)


def describe_metric(key: str) -> ChartMetric:
    """Return the group, title and format of a metric. For unknown metrics, they are derived from the name."""
    if key in KNOWN:
        return KNOWN[key]
    prefix, slash, rest = key.partition("/")
    name = rest.removeprefix("loss/") if prefix == "eval" else rest
    terms = LOSS_TERMS if key.removeprefix("eval/").startswith("loss/") else {}
    title = TITLES.get(key) or terms.get(name) or name.replace("_", " ") or key
    is_share = key.endswith(("accuracy", "exact_match"))
    return ChartMetric(GROUPS.get(prefix, prefix) if slash else "More", title, "percent" if is_share else "plain")


def _plotted_keys(history: History) -> list[str]:
    """Return the metrics of a run that get a chart, in the order of the charts."""
    keys = dict.fromkeys([*KNOWN, *history.keys])
    return [key for key in keys if key not in NOT_PLOTTED and history.finite(key)]


def _is_log(key: str, finite: Sequence[float]) -> bool:
    """Whether the axis should be logarithmic, because a linear axis would only show a spike and a flat line."""
    is_positive = min(finite) > 0
    return is_positive and (key == "grad_norm" or max(finite) > 30 * statistics.median(finite))


def _drawn_points(history: History, key: str) -> tuple[tuple[int, str], ...]:
    """Return the rounded points of a curve. Metrics that differ only by rounding errors have equal points."""
    values = zip(history.steps, history.values(key), strict=True)
    return tuple((step, f"{value:.6g}") for step, value in values if math.isfinite(value))


def _curves_with_trend(history: History, key: str, log: bool, name: str, trend_name: str, color: int) -> list[Curve]:
    """Return the curve of a metric, or two curves if it is long and noisy: faint values and their running mean."""
    values = history.values(key)
    finite = history.finite(key)
    length = sum(abs(b - a) for a, b in itertools.pairwise(finite))
    if len(finite) < 20 or length < 4 * (max(finite) - min(finite)):
        return [Curve(name or trend_name, history.steps, values, "line", color)]
    window = max(5, len(values) / 200)
    if log:
        logarithms = [math.log(value) if value > 0 else math.nan for value in values]
        mean = [math.exp(value) for value in smooth(logarithms, window)]
    else:
        mean = smooth(values, window)
    return [
        Curve(name, history.steps, values, "faint", color),
        Curve(trend_name, history.steps, mean, "line", color),
    ]
