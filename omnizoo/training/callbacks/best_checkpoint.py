"""The callback that keeps the best checkpoint (`checkpoint.best`), and the function that compares metric values.

Lower values are better, unless `evaluation.metrics` specifies the opposite.
"""

import math
from collections.abc import Collection
from typing import Any

from omnizoo.checkpoint.folder import folder_of
from omnizoo.checkpoint.retention import Best, write_best
from omnizoo.config.errors import UserError
from omnizoo.config.schema import Config
from omnizoo.training.callbacks.base import EvaluationEvent, Logger, Request, SaveEvent, StartEvent, StepEvent


def check_metrics(config: Config, known: Collection[str]) -> None:
    """Check that evaluations compute the metrics of `checkpoint.best` and `evaluation.early_stop`.

    Args:
        config: The config of the run.
        known: Names of the metrics that evaluations of this run compute.

    Raises:
        UserError: If a metric is not in `known`.
    """
    early_stop = config.evaluation.early_stop
    metrics = {"checkpoint.best": config.checkpoint.best}
    if early_stop is not None:
        metrics["evaluation.early_stop.metric"] = early_stop.metric
    for key, metric in metrics.items():
        if metric is not None and metric not in known:
            raise UserError(
                f"{key}: {metric} is not a metric of this run's evaluations. Use one of {', '.join(sorted(known))}."
            )


def computed_value(event: EvaluationEvent, metric: str, key: str, is_first: bool) -> float | None:
    """Return the value of a metric that a callback needs. None if this evaluation did not compute it.

    Args:
        event: The evaluation.
        metric: Name of the metric.
        key: The config key that names the metric, for messages.
        is_first: Whether no evaluation has computed the metric before.

    Raises:
        UserError: If neither this evaluation nor an earlier one computed the metric.
    """
    value = event.metrics.get(metric)
    if value is None and is_first:
        computed = [name for name, other in event.metrics.items() if other is not None]
        raise UserError(
            f"{key}: the evaluation of step {event.step} did not compute {metric}. It computed "
            f"{', '.join(sorted(computed)) or 'no metric'}. Use one of these, or fix the rows that it is computed from "
            "(samples.jsonl contains the reasons)."
        )
    return value


class BestCheckpoint(Logger):
    """Requests a checkpoint after each evaluation that beats all earlier evaluations, and records the best checkpoint.

    The record is updated only after the new checkpoint is complete. Pruning reads the record, so the previous best
    checkpoint is kept until then.
    """

    def __init__(self, metric: str, run: str, higher: bool = False) -> None:
        """Prepare the callback.

        Args:
            metric: Name of an evaluation metric.
            run: Id of the run.
            higher: Whether higher values are better.
        """
        self._metric = metric
        self._run = run
        self._higher = higher
        self._is_computed = False  # whether an evaluation has computed the metric
        self._saved: Best | None = None
        self._candidate: Best | None = None  # best evaluation whose checkpoint is not complete yet; saving may fail

    def on_start(self, event: StartEvent) -> None:
        """Restore the record, unless the best checkpoint is in the folder of a run that this run was branched from."""
        if self._saved is not None and folder_of(event.checkpoints, self._saved.step).is_dir():
            write_best(event.checkpoints, self._saved)  # the run may have been killed before it wrote the record
        else:
            self._saved = None

    def on_step(self, event: StepEvent) -> None:
        self._candidate = None  # still set only if the checkpoint of the candidate could not be saved

    def on_evaluation(self, event: EvaluationEvent) -> Request:
        value = computed_value(event, self._metric, "checkpoint.best", not self._is_computed)
        self._is_computed |= value is not None
        if value is None or not math.isfinite(value):
            return None
        if self._saved is not None and not is_better(value, self._saved.value, self._higher):
            return None
        self._candidate = Best(self._run, self._metric, value, event.step)
        return "save"

    def on_save(self, event: SaveEvent) -> None:
        self._saved = self._candidate or self._saved
        self._candidate = None
        if self._saved is not None:
            write_best(event.path.parent, self._saved)

    def state_dict(self) -> dict[str, Any]:
        best = self._candidate or self._saved  # this state is part of the candidate's checkpoint
        return {} if best is None else {"metric": best.metric, "value": best.value, "step": best.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["metric"] == self._metric:
            self._is_computed = True
            self._saved = Best(self._run, self._metric, state["value"], state["step"])


def is_better(value: float, threshold: float, higher: bool) -> bool:
    """Whether `value` is better than `threshold`: greater if `higher`, otherwise less."""
    return value > threshold if higher else value < threshold
