"""Metrics on generated responses, built in or plugins: the mean score over responses, or one value for all of them."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from omnizoo.config.errors import UserError, named_line
from omnizoo.config.plugins import check_call, resolve
from omnizoo.config.schema import Config
from omnizoo.config.sections.evaluation import MetricSettings

EXPECTED = "a function of an omnizoo.Answer that returns a number, or None to exclude the response"
SCORE_ALL = "score_all"  # method of a class whose objects score all responses together
BUILT_IN = {
    "exact_match": "omnizoo.training.evaluation.answer_metrics:exact_match",
    "clip_score": "omnizoo.modalities.metrics.clip_score:ClipScore",
    "fid": "omnizoo.modalities.metrics.frechet:FrechetDistance",
}


@dataclass(frozen=True)
class Answer:
    """The response of the model to the prompt of a held-out row. Metric plugins receive it.

    Attributes:
        question: The prompt, in readable form.
        text: The text of the response.
        expected: The text of the expected response, as the chat template writes it. It contains reasoning, an empty
            think block or tool calls if the template adds them, but no special tokens. None if the row has no expected
            response.
        files: Files of generated media.
        row: The held-out row.
        where: Name of the row, for messages.
        has_expected_media: Whether the generated media equal the media of the expected response.
        expected_files: Files of the expected media, for models that generate media from a prompt.
    """

    question: str
    text: str
    expected: str | None
    files: Sequence[Path] = ()
    row: Mapping[str, Any] = field(default_factory=dict)
    where: str = ""
    has_expected_media: bool = True
    expected_files: Sequence[Path] = ()


def exact_match(answer: Answer) -> bool | None:
    """Whether the response equals the expected response, ignoring surrounding white space.

    Media are compared by content. None if there is no expected response.
    """
    if answer.expected is None:
        return None
    return answer.has_expected_media and answer.text.strip() == answer.expected.strip()


@dataclass(frozen=True)
class Metric:
    """A metric on responses, with its settings. Checks the return values of plugins."""

    settings: MetricSettings
    key: str  # config key, for messages
    function: Callable[..., Any]
    scores_all: bool = False  # whether the function receives all responses

    def score(self, answer: Answer) -> bool | float | None:
        """Return the score of a response.

        Returns:
            True or False if the metric judges whether the response is right, a number for other metrics, and None if
            the metric excludes the response from the mean.

        Raises:
            UserError: If the function fails or does not return a finite number. The message names the metric and the
                row.
        """
        return self._call(answer, answer.where, "Fix the metric or the row.")

    def score_all(self, answers: Sequence[Answer]) -> float | None:
        """Return the value of the metric for all responses together; None if there are too few."""
        return self._call(answers, f"{len(answers)} responses", "Fix the metric or the rows.")

    def _call(self, argument: Any, where: str, advice: str) -> bool | float | None:
        """Call the function, and check its value."""
        kind = self.settings.kind
        try:
            value = self.function(argument)
        except (Exception, SystemExit) as error:
            raise UserError(f"{self.key}: {kind} failed on {where}: {named_line(error)}. {advice}") from error
        if value is None:
            return None
        if not isinstance(value, bool | int | float) or not math.isfinite(value):
            raise UserError(f"{self.key}: {kind} returned {value!r:.80} for {where}. Expected {EXPECTED}.")
        return value if isinstance(value, bool) else float(value)


def build_metrics(config: Config) -> list[Metric]:
    """Build the response metrics in `evaluation.metrics`. This needs no model, so mistakes are found early.

    Raises:
        UserError: If a metric cannot be imported, or does not accept its options.
    """
    metrics = []
    for i, settings in enumerate(config.evaluation.metrics):
        if settings.is_of_answers:
            metrics.append(_build_metric(settings, f"evaluation.metrics.{i}"))
    return metrics


def _build_metric(settings: MetricSettings, key: str) -> Metric:
    """Return the metric: a function, or an object of a class that is built from the options."""
    kind, options = settings.kind, settings.options
    function = resolve(BUILT_IN.get(kind, kind), key, EXPECTED)
    if isinstance(function, type):
        check_call(function, kind, key, [], options)
        built = function(**options)
        if hasattr(built, SCORE_ALL):
            return Metric(settings, key, built.score_all, scores_all=True)
        function, options = built, {}
    if not callable(function):
        raise UserError(f"{key}: {kind} is a {type(function).__name__}. Expected {EXPECTED}.")
    check_call(function, kind, key, [None], options)
    return Metric(settings, key, partial(function, **options))


def measure(
    metrics: Sequence[Metric], answers: Sequence[tuple[Answer, dict[str, Any]]]
) -> tuple[dict[str, float | None], list[str]]:
    """Compute metrics on responses, and add the scores of each response to its record.

    A metric that fails on a row is not computed for later rows, and its mean is None.

    Args:
        metrics: The metrics.
        answers: Responses, each with its record.

    Returns:
        The mean of each metric, keyed by name (None if there are no scores), and one message for each failed metric.
    """
    means: dict[str, float | None] = {}
    failures = []
    for metric in metrics:
        name = metric.settings.label
        means[name] = None
        scores: list[float] = []
        try:
            if metric.scores_all:
                means[name] = metric.score_all([answer for answer, _ in answers])
                continue
            for answer, record in answers:
                score = metric.score(answer)
                record.setdefault("metrics", {})[name] = score
                if score is not None:
                    scores.append(score)
        except UserError as error:
            failures.append(str(error))
            continue
        if scores:
            means[name] = sum(scores) / len(scores)
    return means, failures
