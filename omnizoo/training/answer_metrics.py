"""Metrics of answers: `exact_match`, or a function of the user's own, of one answer at a time; a mean over answers."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omnizoo.config.doors import check_call, resolve
from omnizoo.config.errors import UserError, named_line
from omnizoo.config.run_sections import MetricPart
from omnizoo.config.schema import Config

EXPECTED = "a function of an omnizoo.Answer that gives a number, or None to leave the answer out"


@dataclass(frozen=True)
class Answer:
    """What the model answered to a held-out row."""

    question: str  # as a reader sees it
    text: str
    expected: str | None  # the text of the row's own answer; None: it has none
    files: Sequence[Path] = ()  # items that were produced
    row: Mapping[str, Any] = field(default_factory=dict)
    where: str = ""  # the row's name in messages


def exact_match(answer: Answer) -> bool | None:
    """The whole text, but for white space around it."""
    return None if answer.expected is None else answer.text.strip() == answer.expected.strip()


@dataclass(frozen=True)
class Metric:
    part: MetricPart
    key: str
    function: Callable[..., Any]

    def of(self, answer: Answer) -> float | None:
        """UserError names the metric and the row."""
        who = f"{self.key}: {self.part.kind}"
        try:
            value = self.function(answer, **self.part.options)
        except (Exception, SystemExit) as error:
            raise UserError(f"{who} failed on {answer.where}: {named_line(error)}") from error
        if value is None:
            return None
        if not isinstance(value, bool | int | float) or not math.isfinite(value):
            raise UserError(f"{who} gave {value!r:.80} for {answer.where}; expected {EXPECTED}")
        return float(value)


def build_metrics(config: Config) -> list[Metric]:
    """Those of answers; refuses what cannot be, before anything is loaded."""
    metrics = []
    for i, part in enumerate(config.evaluation.metrics):
        key = f"evaluation.metrics.{i}"
        if part.is_of_answers:
            function = exact_match if part.kind == "exact_match" else resolve(part.kind, key, EXPECTED)
            if not callable(function):
                raise UserError(f"{key}: {part.kind} is a {type(function).__name__}; expected {EXPECTED}")
            check_call(function, part.kind, key, [None], part.options)
            metrics.append(Metric(part, key, function))
    return metrics


@dataclass(frozen=True)
class Measured:
    means: dict[str, float | None]  # by the name of the metric; None: of no answer, or it has failed
    scores: list[dict[str, float | None]]  # of each answer
    failures: list[str]  # one line each


def measure(metrics: Sequence[Metric], answers: Sequence[Answer]) -> Measured:
    """A metric that fails on a row is not asked again, and has no mean."""
    scores: list[dict[str, float | None]] = [{} for _ in answers]
    means: dict[str, float | None] = {}
    failures = []
    for metric in metrics:
        name = metric.part.label
        try:
            for answer, own in zip(answers, scores, strict=True):
                own[name] = metric.of(answer)
            values = [value for own in scores if (value := own[name]) is not None]
            means[name] = sum(values) / len(values) if values else None
        except UserError as error:
            means[name] = None
            failures.append(str(error))
    return Measured(means, scores, failures)
