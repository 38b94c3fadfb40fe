"""`report.html`: one self-contained page about a run, drawn from its folder. No server, no network, no library.

What is plotted is discovered from `metrics.jsonl`: a new metric gets its chart without a change here. Other rooms add
pictures as `Section`s. It reads what is there, so it also works on a run that was interrupted or has barely begun.
`write_comparison` is the same of several runs, one colour each.
"""

import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from mimetypes import guess_type
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml

from omnizoo.training.charts import RESUMED, SKIPPED, Chart, Curve, draw, is_spread, percent, plain, si, with_trend
from omnizoo.training.history import History
from omnizoo.training.metrics import RunFolder, read_metrics, replace_file
from omnizoo.training.page_style import PAGE, SCRIPT, STYLE
from omnizoo.training.starts import read_starts

POINTS = 9000  # of all curves of the page together: about 200 KB however long the run
TABLE_ROWS = 100
SHOWN_FILES = (".png", ".jpg", ".wav", ".flac", ".mp4")
COLOURS = 8

KNOWN: dict[str, tuple[str, str, Callable[[float], str]]] = {  # key: group, title, how its values are written
    "grad_norm": ("Optimization", "Gradient norm", plain),
    "lr": ("Optimization", "Learning rate", plain),
    "tokens_per_sec": ("Speed and memory", "Tokens per second", si),
    "mfu": ("Speed and memory", "Model FLOPs utilization", percent),
    "memory_gb": ("Speed and memory", "Memory, GB", plain),
    "data_wait": ("Speed and memory", "Time spent waiting for data", percent),
    "fill": ("Data", "Pack fill", percent),
    "imbalance": ("Data", "Imbalance: most / mean work of a rank", plain),
    "tokens": ("Data", "Tokens per step", si),
    "epoch": ("Data", "Epoch", plain),
}
TERMS = {  # of the loss
    "text": "Text, cross entropy",
    "balance": "Balance of experts",
    "router_z": "Router z-loss",
    "dpo": "Preference (DPO)",
    "kto": "Preference (KTO)",
    "orpo": "Preference (ORPO)",
    "simpo": "Preference (SimPO)",
    "grpo": "Policy (GRPO)",
    "gspo": "Policy (GSPO)",
}
WORDS = {  # what is measured with them
    "rewards/chosen": "Reward of the chosen answer",
    "rewards/rejected": "Reward of the rejected answer",
    "margin": "Margin of rewards",
    "accuracy": "Chosen above rejected",
    "kl": "KL divergence",
}
TERM_KEYS = ("loss/", "eval/")  # the only term of a loss is the loss again
# By what stands before the slash of a key.
GROUPS = {"loss": "Loss terms", "eval": "Held-out evaluation", "imbalance": "Imbalance by part"}
# The first chart, the headline, and sums that only grow.
ELSEWHERE = ("loss", "eval/loss", "bad_steps", "skipped_rows", "tokens_seen")
COUNTS = {
    "skipped_rows": "rows skipped",
    "undecodable_rows": "rows with media that could not be decoded",
    "dropped_overlong": "samples dropped: longer than a pack",
    "split_overlong": "samples cut into pieces: longer than a pack",
    "truncated_overlong": "samples cut off: longer than a pack",
    "few_targets": "samples dropped: too few tokens with a loss",
    "beyond_positions": "samples longer than the model was made for",
}


@dataclass(frozen=True)
class Section:
    """A part of the page made elsewhere. `html` goes in as it is: whoever makes it escapes what comes from data."""

    title: str
    html: str


@dataclass(frozen=True)
class Run:
    """What the folder of a run says about it."""

    folder: RunFolder

    @property
    def name(self) -> str:
        return self.folder.root.resolve().name

    @cached_property
    def history(self) -> History:
        return History(read_metrics(self.folder.metrics))

    @cached_property
    def config(self) -> str:
        return self.folder.config.read_text(encoding="utf-8") if self.folder.config.exists() else ""

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Of its config, nested; the page is about the metrics, and a config that cannot be read is only shown."""
        try:
            settings = yaml.safe_load(self.config)
        except yaml.YAMLError:
            return {}
        return settings if isinstance(settings, dict) else {}

    @cached_property
    def starts(self) -> list[dict[str, Any]]:
        return read_starts(self.folder.starts)

    @cached_property
    def bad_steps(self) -> list[dict[str, Any]]:
        return _read_rows(self.folder.bad_steps)

    @cached_property
    def bad_rows(self) -> list[dict[str, Any]]:
        return _read_rows(self.folder.bad_rows)

    @property
    def marks(self) -> dict[str, frozenset[int]]:
        listed = {row["step"] for row in self.bad_steps if isinstance(row.get("step"), int)}
        return {
            SKIPPED: frozenset(self.history.bad_steps() | listed),
            RESUMED: frozenset(self.history.resumes(self.starts)),
        }

    @property
    def steps(self) -> int | None:
        """That it is to have."""
        train = self.settings.get("train")
        total = train.get("steps") if isinstance(train, dict) else None
        if total is None and self.starts:  # it has epochs, which were counted at its start
            total = self.starts[-1].get("steps")
        return total if isinstance(total, int) else None

    @property
    def origin(self) -> str:
        """What is trained, in a few words."""
        try:
            model = self.settings["model"]
            base = model.get("foundation") or model
            origin = base.get("path") or base.get("module") or base["config"]
            origin = origin["model_type"] if isinstance(origin, dict) else origin
            return " + ".join([str(origin), *(model.get("modalities") or {})])
        except (KeyError, TypeError, AttributeError):
            return ""


def write_report(run: RunFolder, sections: Sequence[Section] = (), out: Path | None = None) -> Path:
    """Write `report.html` into the run folder (or to `out`), whatever state the run is in, and return its path."""
    told = Run(run)
    body = [_header(told), _headline(told)]
    shown, constants = _charts(told)
    drawn, data = _draw_all(shown)
    first = 1 if shown and not shown[0][0] else 0  # the loss
    added = [f"<h2>{escape(section.title)}</h2>{section.html}" for section in sections]
    body += [*drawn[:first], *added, _samples(run, out or run.report), *drawn[first:]]
    body += [_facts(told), _pairs("The same at every step", constants), _counts(told)]
    body += [_table("Skipped steps", told.bad_steps), _table("Skipped rows", told.bad_rows)]
    if told.config:
        body.append(
            f"<h2>Configuration</h2><details><summary>config.yaml</summary><pre>{escape(told.config)}</pre></details>"
        )
    return _write(out or run.report, told.name, body, data)


def write_comparison(runs: Sequence[RunFolder], out: Path) -> Path:
    """Several runs in one page: their figures side by side, their curves in one chart each, where configs differ."""
    told = [Run(run) for run in runs]
    names = _names(told)
    body = [
        f"<header><h1>{escape(' · '.join(names))}</h1><p>{len(told)} runs<span>{_made()}</span></p></header>",
        _figures(told, names),
    ]
    keys = list(dict.fromkeys(key for run in told for key in _plotted(run.history)))
    groups: dict[str, list[Chart]] = {}
    seen = set()
    for key in ["loss", "eval/loss", *(key for key in keys if key not in ("loss", "eval/loss"))]:
        having = [(i, run) for i, run in enumerate(told) if run.history.finite(key)]
        values = [value for _, run in having for value in run.history.finite(key)]
        own = tuple((i, _drawn(run.history, key)) for i, run in having)
        if not values or min(values) == max(values) or (key.startswith(TERM_KEYS) and own in seen):
            continue
        seen.add(own)
        group, title, form = _words(key)
        log = is_spread(values) or (key == "grad_norm" and min(values) > 0)
        is_rare = key.startswith("eval/")
        curves = [
            curve
            for i, run in having
            for curve in (
                [Curve(names[i], run.history.steps, run.history.values(key), "dots line", i % COLOURS)]
                if is_rare
                else _named_trend(names[i], run.history, key, log, i % COLOURS)
            )
        ]
        top = key in ("loss", "eval/loss")
        title = {"loss": "Loss", "eval/loss": "Held-out loss"}.get(key, title)
        groups.setdefault("" if top else group, []).append(Chart(title, curves, form, log, wide=top))
    drawn, data = _draw_all(_ordered(groups))
    body += [*drawn, _differences(told, names)]
    return _write(out, " · ".join(names), body, data)


def _write(path: Path, title: str, body: Sequence[str], read_outs: list[dict[str, Any]]) -> Path:
    data = json.dumps(read_outs, separators=(",", ":")).replace("<", "\\u003c")  # no name may end the script element
    page = PAGE.format(title=escape(title), style=STYLE, body="\n".join(filter(None, body)), data=data, script=SCRIPT)
    replace_file(path, page)
    return path


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


# ---- which charts there are


def _plotted(history: History) -> list[str]:
    known = [*KNOWN, *(key for key in history.keys if key not in KNOWN)]
    return [key for key in known if key not in ELSEWHERE and key not in COUNTS and history.finite(key)]


def _words(key: str) -> tuple[str, str, Callable[[float], str]]:
    """(group, title, form) of a metric."""
    if key in KNOWN:
        return KNOWN[key]
    prefix, slash, rest = key.partition("/")
    form = percent if key.endswith(("accuracy", "exact_match")) else plain
    name = rest.removeprefix("loss/") if prefix == "eval" else rest
    terms = TERMS if key.removeprefix("eval/").startswith("loss/") else {}
    title = WORDS.get(key) or terms.get(name) or name.replace("_", " ") or key
    return GROUPS.get(prefix, prefix) if slash else "More", title, form


def _charts(run: Run) -> tuple[list[tuple[str, list[Chart]]], dict[str, str]]:
    """Groups of charts: the loss first, then what is known, then whatever else was measured; and what never changed.

    A curve that is another one again (the only term of the loss) is drawn once.
    """
    history, marks = run.history, run.marks
    groups: dict[str, list[Chart]] = {}
    if finite := history.finite("loss"):
        log = is_spread(finite)
        curves = with_trend("loss", history, "loss", log, "smoothed")
        if history.finite("eval/loss"):
            curves.append(Curve("held-out", history.steps, history.values("eval/loss"), "dots", 1))
        groups[""] = [Chart("Loss", curves, plain, log, marks, wide=True)]
    constants: dict[str, str] = {}
    seen = {_drawn(history, key) for key in ("loss", "eval/loss")}
    for key in _plotted(history):
        group, title, form = _words(key)
        finite, own = history.finite(key), _drawn(history, key)
        if min(finite) == max(finite) and len(finite) > 1:
            constants[title if key in KNOWN else f"{group}: {title}"] = form(finite[0])
            continue
        if key.startswith(TERM_KEYS) and own in seen:
            continue
        seen.add(own)
        log = is_spread(finite) or (key == "grad_norm" and min(finite) > 0)
        rare = [Curve(title, history.steps, history.values(key), "dots line", 1)]
        curves = rare if key.startswith("eval/") else with_trend(title, history, key, log)
        shown = marks if key == "grad_norm" else {RESUMED: marks[RESUMED]}
        groups.setdefault(group, []).append(Chart(title, curves, form, log, shown))
    return _ordered(groups), constants


def _drawn(history: History, key: str) -> tuple[tuple[int, str], ...]:
    """What a reader would see of it: two metrics that differ by rounding are one curve."""
    values = zip(history.steps, history.values(key), strict=True)
    return tuple((step, f"{value:.6g}") for step, value in values if math.isfinite(value))


def _named_trend(name: str, history: History, key: str, log: bool, colour: int) -> list[Curve]:
    """For a chart of several runs: the name belongs to the line that stands out."""
    curves = with_trend(name, history, key, log, name, colour)
    if len(curves) == 1:
        return curves
    return [Curve("", curves[0].steps, curves[0].values, "faint", colour), curves[1]]


def _ordered(groups: Mapping[str, list[Chart]]) -> list[tuple[str, list[Chart]]]:
    order = ["", *GROUPS.values(), *dict.fromkeys(group for group, _, _ in KNOWN.values())]
    return sorted(groups.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order))


def _draw_all(groups: Sequence[tuple[str, list[Chart]]]) -> tuple[list[str], list[dict[str, Any]]]:
    buckets = POINTS // (2 * max(1, sum(len(chart.curves) for _, charts in groups for chart in charts)))
    read_outs: list[dict[str, Any]] = []
    body = []
    for title, charts in groups:
        figures = "".join(draw(chart, max(20, buckets), read_outs) for chart in charts)
        body.append((f"<h2>{escape(title)}</h2>" if title else "") + f"<div class=grid>{figures}</div>")
    return body, read_outs


# ---- words and figures


def _made() -> str:
    return f"OmniZoo, {time.strftime('%Y-%m-%d %H:%M')}"


def _header(run: Run) -> str:
    last, total = run.history.steps[-1] if run.history.steps else 0, run.steps
    if total is None:
        status = f"<mark>step {last:,}</mark>"
    elif last >= total:
        status = "<mark class=done>finished</mark>"
    else:
        status = f"<mark class=open>step {last:,} of {total:,}</mark>"
    about = f"{escape(run.origin)}<span>{_made()}</span>"
    return f"<header><h1>{escape(run.name)}{status}</h1><p>{about}</p></header>"


def _cards(run: Run) -> list[tuple[str, str, str]]:
    """The run in a handful of figures: name, value, note; an empty value for what was not measured."""
    history = run.history
    loss, tokens, seconds = history.last("loss"), sum(history.finite("tokens")), history.seconds()
    losses, rate, fill, memory = map(history.finite, ("loss", "tokens_per_sec", "fill", "memory_gb"))
    held_out = zip(history.values("eval/loss"), history.steps, strict=True)
    best, at = min(((value, step) for value, step in held_out if math.isfinite(value)), default=(None, 0))
    skipped, bad = history.last("bad_steps") or len(run.bad_steps), history.last("skipped_rows") or len(run.bad_rows)
    return [
        ("Final loss", "" if loss is None else plain(loss), f"from {plain(losses[0])}" if losses else ""),
        ("Best held-out loss", "" if best is None else plain(best), f"at step {at:,}" if at else "not evaluated"),
        ("Steps", f"{len(history.steps):,}", f"skipped: {skipped:,.0f}"),
        ("Tokens", si(tokens) if tokens else "", f"rows skipped: {bad:,.0f}"),
        ("Training time", _duration(seconds) if seconds else "", "spent in steps"),
        ("Tokens per second", si(tokens / seconds) if seconds else "", f"at best {si(max(rate))}" if rate else ""),
        ("Pack fill", percent(statistics.fmean(fill)) if fill else "", "mean"),
        ("Memory", f"{max(memory):.3g} GB" if memory else "", "peak"),
    ]


def _headline(run: Run) -> str:
    shown = (f"<div><dt>{dt}</dt><dd>{dd or '&ndash;'}</dd><small>{note}</small></div>" for dt, dd, note in _cards(run))
    return f"<dl>{''.join(shown)}</dl>"


def _duration(seconds: float) -> str:
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours} h {m:02d} min" if hours else f"{m} min {s:02d} s" if m else f"{seconds:.3g} s"


def _facts(run: Run) -> str:
    """What the run is, by its last start; and all its starts, if there were several."""
    if not run.starts:
        return ""
    last = run.starts[-1]
    told: dict[str, str] = {}
    for name, value in {**_mapping(last.get("facts")), "command": last.get("command"), "git": last.get("git")}.items():
        if isinstance(value, str):
            told[str(name)] = value
    if seconds := _mapping(last.get("seconds")):
        each = ", ".join(f"{part} {value}" for part, value in seconds.items())
        told["start"] = f"{sum(seconds.values()):.3g} s to the end of the first step: {each}"
    told["versions"] = ", ".join(f"{name} {value}" for name, value in _mapping(last.get("versions")).items())
    html = _pairs("The run", told)
    if len(run.starts) > 1:
        columns = ("step", "time", "command", "git")
        html += _table("Starts", [{name: start.get(name) or "" for name in columns} for start in run.starts])
    return html


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _counts(run: Run) -> str:
    last = {words: run.history.last(key) for key, words in COUNTS.items()}
    return _pairs("Left out of the data", {words: f"{count:,.0f}" for words, count in last.items() if count})


def _pairs(title: str, pairs: Mapping[str, str]) -> str:
    if not pairs:
        return ""
    lines = "".join(f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in pairs.items())
    return f"<h2>{escape(title)}</h2><div class=scroll><table class=facts>{lines}</table></div>"


def _table(title: str, rows: list[dict[str, Any]]) -> str:
    if not rows:
        return ""
    columns = list(dict.fromkeys(key for row in rows[:TABLE_ROWS] for key in row))
    cells = [[_cell(row[column]) if column in row else "" for column in columns] for row in rows[:TABLE_ROWS]]
    lines = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in line)}</tr>" for line in cells)
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    more = f"<p>and {len(rows) - TABLE_ROWS:,} more</p>" if len(rows) > TABLE_ROWS else ""
    return f"<h2>{title}</h2><div class=scroll><table><tr>{head}</tr>{lines}</table></div>{more}"


def _item(run: RunFolder, page: Path, file: str) -> str:
    """What was produced, shown if a browser can without running anything; a file of the run folder only."""
    if Path(file).is_absolute() or ".." in Path(file).parts:
        return f"<br>{escape(file)}"
    address = "./" + quote(os.path.relpath(run.root / file, page.parent))
    link = f'<a href="{address}">{escape(file)}</a>'
    shown = f'<object data="{address}" type="{guess_type(file)[0]}">{link}</object>'
    return "<br>" + (shown if Path(file).suffix in SHOWN_FILES else link)


def _samples(run: RunFolder, page: Path) -> str:
    """What the model answered to held-out questions at the last evaluation (training/samples.py)."""
    records = [record for record in _read_rows(run.samples) if isinstance(record.get("step"), int)]
    if not records:
        return ""
    step = max(record["step"] for record in records)
    columns = ("question", "expected", "answer")
    lines = []
    for record in (record for record in records if record["step"] == step):
        cells = [escape(_cell(record.get(column) or "")) for column in columns]
        cells[-1] += escape(f"({record['error']})") if "error" in record else ""
        cells[-1] += "".join(_item(run, page, str(item.get("file"))) for item in record.get("items", ()))
        lines.append(f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    head = "".join(f"<th>{column}</th>" for column in columns)
    table = f"<div class=scroll><table><tr>{head}</tr>{''.join(lines)}</table></div>"
    return f"<h2>Answers to held-out questions, step {step:,}</h2>{table}"


def _cell(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 300 else text[:300] + " …"


# ---- several runs


def _names(runs: Sequence[Run]) -> list[str]:
    """Their folders, with as much of the path as tells them apart."""
    paths = [run.folder.root.resolve().parts for run in runs]
    for depth in range(1, max(map(len, paths)) + 1):
        names = ["/".join(parts[-depth:]) for parts in paths]
        if len(set(names)) == len(names):
            return names
    return ["/".join(parts) for parts in paths]


def _figures(runs: Sequence[Run], names: Sequence[str]) -> str:
    columns = [_cards(run) for run in runs]
    head = "".join(f"<th class=number>{escape(name)}</th>" for name in names)
    lines = []
    for row in zip(*columns, strict=True):
        values = "".join(f"<td class=number>{value or '&ndash;'}</td>" for _, value, _ in row)
        lines.append(f"<tr><td>{row[0][0]}</td>{values}</tr>")
    return f"<div class=scroll><table class=facts><tr><th></th>{head}</tr>{''.join(lines)}</table></div>"


def _differences(runs: Sequence[Run], names: Sequence[str]) -> str:
    flat = [dict(_leaves("", run.settings)) for run in runs]
    keys = [key for key in dict.fromkeys(key for each in flat for key in each) if key != "log.dir"]
    rows = []
    for key in keys:
        values = [json.dumps(each[key]) if key in each else "" for each in flat]
        if len(set(values)) > 1:
            rows.append({"key": key} | dict(zip(names, values, strict=True)))
    if not rows:
        return "<h2>Configuration</h2><p>The same, but for the run folder.</p>"
    return _table("Where the configurations differ", rows)


def _leaves(prefix: str, value: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, below in value.items():
            yield from _leaves(f"{prefix}.{key}" if prefix else str(key), below)
    else:
        yield prefix, value
