"""The callback that stops a run when a metric no longer improves (`evaluation.early_stop`)."""

import math
from typing import Any

from omnizoo.training.callbacks.base import Callback, EvaluationEvent, Request, StartEvent
from omnizoo.training.callbacks.best_checkpoint import computed_value, is_better


class EarlyStop(Callback):
    """Requests to stop after `patience` evaluations in a row without an improvement of more than `min_delta`."""

    def __init__(self, metric: str, patience: int, min_delta: float, higher: bool = False) -> None:
        """Prepare the callback.

        Args:
            metric: Name of an evaluation metric.
            patience: Number of evaluations without improvement after which the run stops.
            min_delta: Minimum change that counts as an improvement.
            higher: Whether higher values are better.
        """
        self._metric = metric
        self._patience = patience
        self._min_delta = min_delta
        self._higher = higher
        self._best: float | None = None
        self._waited = 0  # evaluations since the last improvement

    def on_start(self, event: StartEvent) -> Request:
        return self._request()

    def on_evaluation(self, event: EvaluationEvent) -> Request:
        is_first = self._best is None and not self._waited
        value = computed_value(event, self._metric, "evaluation.early_stop.metric", is_first)
        if value is not None and self._is_improvement(value):
            self._best = value
            self._waited = 0
        else:
            self._waited += 1
        return self._request()

    def _is_improvement(self, value: float) -> bool:
        """Whether `value` is finite and improves on the best value by more than `min_delta`, or is the first value."""
        if not math.isfinite(value):
            return False
        if self._best is None:
            return True
        delta = self._min_delta if self._higher else -self._min_delta
        return is_better(value, self._best + delta, self._higher)

    def _request(self) -> Request:
        return "stop" if self._waited >= self._patience else None

    def state_dict(self) -> dict[str, Any]:
        return {"metric": self._metric, "best": self._best, "waited": self._waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["metric"] == self._metric:
            self._best = state["best"]
            self._waited = state["waited"]
