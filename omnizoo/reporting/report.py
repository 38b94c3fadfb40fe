"""Write `report.html`, a page about one run, and pages that compare several runs.

The pages are built from the files in the run folders. Missing files are skipped, so a page can be written for a run
that was interrupted or has just started. Callers can add content as `ReportSection`s.
"""

import json
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from mimetypes import guess_type
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml

from omnizoo.reporting.charts import COUNTS, buckets_per_curve, format_value, metric_charts, other_held_out_terms
from omnizoo.reporting.history import History
from omnizoo.reporting.launch_history import read_starts
from omnizoo.reporting.metrics_file import read_metrics
from omnizoo.reporting.pages import cell_text, render
from omnizoo.reporting.run_folder import RunFolder, read_rows, replace_file

ITEMS = ("question_items", "expected_items", "items")  # lists of media in a record
LONG_WAIT = 0.1  # fraction of a step; steps that wait longer for data are marked
# File types that a browser displays without running code.
SHOWN_FILES = (".png", ".jpg", ".gif", ".webp", ".wav", ".flac", ".ogg", ".mp3", ".mp4", ".webm")


@dataclass(frozen=True)
class ReportSection:
    """Additional content of a report.

    Args:
        title: Heading of the section.
        html: Content. It is inserted verbatim, so the caller must escape text that comes from data.
    """

    title: str
    html: str


@dataclass(frozen=True)
class RunData:
    """Content of a run folder. Each file is read when its property is first used."""

    folder: RunFolder

    @property
    def name(self) -> str:
        """Name of the run folder, without its path."""
        return self.folder.root.resolve().name

    @cached_property
    def history(self) -> History:
        """Metrics of all steps."""
        return History(read_metrics(self.folder.metrics))

    @cached_property
    def config(self) -> str:
        """Text of the config; empty if the file does not exist."""
        return self.folder.config.read_text(encoding="utf-8") if self.folder.config.exists() else ""

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The config as nested dicts; empty if the file is not valid YAML."""
        try:
            return _as_dict(yaml.safe_load(self.config))
        except yaml.YAMLError:
            return {}

    @cached_property
    def starts(self) -> list[dict[str, Any]]:
        """Records of all launches of the run."""
        return read_starts(self.folder.starts)

    @cached_property
    def bad_steps(self) -> list[dict[str, Any]]:
        """Records of the steps whose update was skipped."""
        return read_rows(self.folder.bad_steps)

    @cached_property
    def bad_rows(self) -> list[dict[str, Any]]:
        """Records of the rows that were skipped."""
        return read_rows(self.folder.bad_rows)

    @property
    def marks(self) -> dict[str, list[int]]:
        """Steps to mark in charts: skipped steps, steps that waited for data, and steps that the run resumed from."""
        first = max(1, self.history.steps[0]) if self.history.steps else 1
        recorded_bad_steps = {row["step"] for row in self.bad_steps if isinstance(row.get("step"), int)}
        start_steps = {start["step"] for start in self.starts}
        return {
            "skipped": sorted(self.history.bad_steps() | recorded_bad_steps),
            "waited": self.history.steps_above("data_wait", LONG_WAIT),
            "resumed": sorted(step for step in start_steps if step >= first),
        }

    @property
    def num_steps(self) -> int | None:
        """Number of steps of the whole run; None if unknown."""
        total = _as_dict(self.settings.get("train")).get("steps")
        if total is None and self.starts:  # with `train.epochs`, the number is computed at the start
            total = self.starts[-1].get("steps")
        return total if isinstance(total, int) else None

    @property
    def model(self) -> str:
        """Path or type of the model, followed by its modalities; empty if the config does not contain it."""
        try:
            section = self.settings["model"]
            base = section.get("foundation") or section
            source = base.get("path") or base.get("module") or base["config"]
            name = source["model_type"] if isinstance(source, dict) else source
            return " + ".join([str(name), *(section.get("modalities") or {})])
        except (KeyError, TypeError, AttributeError):
            return ""


def write_report(run: RunFolder, sections: Sequence[ReportSection] = (), out: Path | None = None) -> Path:
    """Write the report page of a run.

    Args:
        run: The folder of the run.
        sections: Additional content.
        out: HTML file; None writes `report.html` in the run folder.

    Returns:
        The path of the page.
    """
    data = RunData(run)
    path = out or run.report
    groups = metric_charts({data.name: data.history}, data.marks)
    counts = {text: data.history.last(key) for key, text in COUNTS.items()}
    page = render(
        "report.html",
        title=data.name,
        run=data,
        figures=_figures(data),
        groups=groups,
        buckets=buckets_per_curve(groups),
        sections=sections,
        samples=_last_samples(run, path),
        facts=_facts(data),
        counts={text: f"{count:,.0f}" for text, count in counts.items() if count},
    )
    replace_file(path, page)
    return path


def write_comparison(runs: Sequence[RunFolder], out: Path) -> Path:
    """Write a page that compares the statistics, curves and configs of several runs, and return its path."""
    runs_data = [RunData(run) for run in runs]
    names = _short_names(runs_data)
    groups = metric_charts({name: run.history for name, run in zip(names, runs_data, strict=True)}, {})
    page = render(
        "comparison.html",
        title=" · ".join(names),
        names=names,
        figures=list(zip(*map(_figures, runs_data), strict=True)),
        groups=groups,
        buckets=buckets_per_curve(groups),
        differences=_differences(runs_data, names),
    )
    replace_file(out, page)
    return out


# ---- one run


def _figures(run: RunData) -> list[tuple[str, str, str]]:
    """Return the name, value and note of each figure at the top of the page. Values that are not known are empty."""
    history = run.history
    finite = {key: history.finite(key) for key in ("loss", "tokens", "tokens_per_sec", "fill", "memory_gb")}
    first_loss = format_value(next(iter(finite["loss"]), None))
    best_loss, best_step = history.lowest("eval/loss")
    best_note = f"at step {best_step:,}" if best_step else "not evaluated"
    other_terms = other_held_out_terms(history)
    if other_terms:
        best_note += f"; terms: {', '.join(other_terms)}"
    tokens = sum(finite["tokens"])
    seconds = history.seconds()
    best_rate = format_value(max(finite["tokens_per_sec"], default=None), "si")
    mean_fill = statistics.fmean(finite["fill"]) if finite["fill"] else None
    memory = max(finite["memory_gb"], default=None)
    num_bad_steps = history.last("bad_steps") or len(run.bad_steps)
    num_bad_rows = history.last("skipped_rows") or len(run.bad_rows)
    return [
        ("Final loss", format_value(history.last("loss")), first_loss and f"from {first_loss}"),
        ("Best held-out loss", format_value(best_loss), best_note),
        ("Steps", f"{len(history.steps):,}", f"skipped: {num_bad_steps:,.0f}"),
        ("Tokens", format_value(tokens or None, "si"), f"rows skipped: {num_bad_rows:,.0f}"),
        ("Training time", _duration(seconds) if seconds else "", "spent in steps"),
        (
            "Tokens per second",
            format_value(tokens / seconds if seconds else None, "si"),
            best_rate and f"at best {best_rate}",
        ),
        ("Pack fill", format_value(mean_fill, "percent"), "mean"),
        ("Memory", f"{memory:.3g} GB" if memory is not None else "", "peak"),
    ]


def _duration(seconds: float) -> str:
    """Format a duration: `1 h 05 min`, `5 min 07 s` or `7.25 s`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minute:02d} min"
    return f"{minute} min {second:02d} s" if minute else f"{seconds:.3g} s"


def _facts(run: RunData) -> dict[str, str]:
    """Return the values that were recorded at the most recent launch of a run, as text, by name."""
    start = run.starts[-1] if run.starts else {}
    values = {**_as_dict(start.get("facts")), "command": start.get("command"), "git": start.get("git")}
    facts = {str(name): value for name, value in values.items() if isinstance(value, str)}
    seconds = _as_dict(start.get("seconds"))
    if seconds:
        parts = ", ".join(f"{part} {value}" for part, value in seconds.items())
        facts["start"] = f"{sum(seconds.values()):.3g} s to the end of the first step: {parts}"
    versions = _as_dict(start.get("versions"))
    if versions:
        facts["versions"] = ", ".join(f"{name} {value}" for name, value in versions.items())
    return facts


def _last_samples(run: RunFolder, page: Path) -> list[dict[str, Any]]:
    """Return the prompts and responses of the last evaluation, from `samples.jsonl`, as values for the template."""
    records = [record for record in read_rows(run.samples) if isinstance(record.get("step"), int)]
    last = max((record["step"] for record in records), default=0)
    samples = []
    for record in records:
        if record["step"] != last:
            continue
        sample: dict[str, Any] = {
            column: cell_text(record.get(column) or "") for column in ("question", "expected", "answer")
        }
        sample["error"] = cell_text(record.get("error") or "")
        sample["judgments"], sample["scores"] = _scores(record)
        files = {name: _describe_items(run, page, record.get(name)) for name in ITEMS}
        samples.append({"step": last, **files, **sample})
    return samples


def _describe_items(run: RunFolder, page: Path, items: Any) -> list[dict[str, Any]]:
    """Return the description of each media item of a record: its file, or its value as text if it has no file."""
    described = []
    for item in items if isinstance(items, list) else []:
        if isinstance(item, dict) and "file" in item:
            described.append(_describe_file(run, page, str(item["file"])))
        elif isinstance(item, dict):
            described.append({"name": cell_text(item.get("value") or ""), "address": None, "media_type": None})
    return described


def _scores(record: Mapping[str, Any]) -> tuple[dict[str, bool], dict[str, str]]:
    """Return the judgments and the scores of a response, by metric.

    A judgment states whether the response is right. A score is a formatted number. If no metric judges a response that
    equals the expected response, a judgment is added.
    """
    metrics = {name.removeprefix("eval/"): score for name, score in _as_dict(record.get("metrics")).items()}
    judgments = {name: score for name, score in metrics.items() if isinstance(score, bool)}
    scores = {
        name: format_value(score)
        for name, score in metrics.items()
        if isinstance(score, int | float) and not isinstance(score, bool)
    }
    expected = record.get("expected")
    is_text = isinstance(expected, str) and not record.get("items")
    if not judgments and is_text and str(record.get("answer")).strip() == str(expected).strip():
        judgments = {"equals the expected response": True}
    return judgments, scores


def _describe_file(run: RunFolder, page: Path, name: str) -> dict[str, Any]:
    """Return the name, address and media type of a generated file. Files outside the run folder have no address."""
    if Path(name).is_absolute() or ".." in Path(name).parts:
        return {"name": name, "address": None, "media_type": None}
    address = "./" + quote(os.path.relpath(run.root / name, page.parent))
    media_type = guess_type(name)[0] if Path(name).suffix in SHOWN_FILES else None
    return {"name": name, "address": address, "media_type": media_type}


# ---- several runs


def _short_names(runs: Sequence[RunData]) -> list[str]:
    """Return the folder names of runs, with as many parent folders as are needed to distinguish them."""
    paths = [run.folder.root.resolve().parts for run in runs]
    for depth in range(1, max(map(len, paths)) + 1):
        names = ["/".join(parts[-depth:]) for parts in paths]
        if len(set(names)) == len(names):
            return names
    return ["/".join(parts) for parts in paths]


def _differences(runs: Sequence[RunData], names: Sequence[str]) -> list[dict[str, str]]:
    """Return a table row for each config key that differs between runs, with the value of each run by its name."""
    configs = [dict(_leaves("", run.settings)) for run in runs]
    rows = []
    for key in dict.fromkeys(key for config in configs for key in config):
        values = [json.dumps(config[key]) if key in config else "" for config in configs]
        if key != "log.dir" and len(set(values)) > 1:
            rows.append({"key": key} | dict(zip(names, values, strict=True)))
    return rows


def _leaves(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and the value of each leaf of a nested dict. `prefix` is the key of the dict."""
    if isinstance(value, dict) and value:
        for key, child in value.items():
            yield from _leaves(f"{prefix}.{key}" if prefix else str(key), child)
    else:
        yield prefix, value


def _as_dict(value: Any) -> dict[str, Any]:
    """Return `value` if it is a dict, otherwise an empty dict. Files may contain other values."""
    return value if isinstance(value, dict) else {}
