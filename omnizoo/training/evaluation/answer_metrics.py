"""Metrics on generated responses: `exact_match`, or a plugin that scores one response; the result is a mean."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omnizoo.config.errors import UserError, named_line
from omnizoo.config.plugins import check_call, resolve
from omnizoo.config.schema import Config
from omnizoo.config.sections.evaluation import MetricSettings

EXPECTED = "a function of an omnizoo.Answer that gives a number, or None to leave the answer out"


@dataclass(frozen=True)
class Answer:
    """The response of the model to the prompt of a held-out row. Metric plugins receive it.

    Attributes:
        question: The prompt, in readable form.
        text: The text of the response.
        expected: The text of the expected response; None if the row has none.
        files: Files of generated media.
        row: The held-out row.
        where: Name of the row, for messages.
    """

    question: str
    text: str
    expected: str | None
    files: Sequence[Path] = ()
    row: Mapping[str, Any] = field(default_factory=dict)
    where: str = ""


def exact_match(answer: Answer) -> bool | None:
    """Whether the response equals the expected one, ignoring white space around it. None without an expected one."""
    return None if answer.expected is None else answer.text.strip() == answer.expected.strip()


@dataclass(frozen=True)
class Metric:
    part: MetricSettings
    key: str
    function: Callable[..., Any]

    def of(self, answer: Answer) -> float | None:
        """Return the score of a response; None if the metric leaves it out.

        Raises:
            UserError: If the function fails or does not return a finite number. The message names metric and row.
        """
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
    """Build the metrics on responses of `evaluation.metrics`. Needs no model, so mistakes are found early.

    Raises:
        UserError: If a metric cannot be imported, or does not accept its options.
    """
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


def measure(
    metrics: Sequence[Metric], answers: Sequence[tuple[Answer, dict[str, Any]]]
) -> tuple[dict[str, float | None], list[str]]:
    """Compute metrics on responses, and add the scores of each response to its record.

    A metric that fails on a row is not computed for later rows, and its mean is None.

    Args:
        metrics: The metrics.
        answers: Responses, each with its record.

    Returns:
        The mean of each metric by name, None without scores; and one message for each metric that failed.
    """
    means: dict[str, float | None] = {}
    failures = []
    for metric in metrics:
        name = metric.part.label
        means[name] = None
        scores = []
        try:
            for answer, record in answers:
                score = metric.of(answer)
                record.setdefault("metrics", {})[name] = score
                if score is not None:
                    scores.append(score)
        except UserError as error:
            failures.append(str(error))
            continue
        if scores:
            means[name] = sum(scores) / len(scores)
    return means, failures
