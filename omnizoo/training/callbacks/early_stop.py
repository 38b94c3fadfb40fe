"""Callback that stops a run without improvement (`evaluation.early_stop`)."""

import math
from typing import Any

from omnizoo.training.callbacks.base import Callback, EvaluationEvent, Request, StartEvent
from omnizoo.training.callbacks.best_checkpoint import is_better


class EarlyStop(Callback):
    """Requests to stop after `patience` evaluations in a row without an improvement of more than `min_delta`."""

    def __init__(self, metric: str, patience: int, min_delta: float, higher: bool = False) -> None:
        self._metric, self._patience, self._min_delta, self._higher = metric, patience, min_delta, higher
        self._best: float | None = None
        self._waited = 0

    def on_start(self, event: StartEvent) -> Request:
        return self._verdict()

    def on_evaluation(self, event: EvaluationEvent) -> Request:
        value = event.metrics[self._metric]
        is_first = self._best is None
        bar = 0.0 if self._best is None else self._best + (self._min_delta if self._higher else -self._min_delta)
        if value is not None and math.isfinite(value) and (is_first or is_better(value, bar, self._higher)):
            self._best, self._waited = value, 0
        else:
            self._waited += 1
        return self._verdict()

    def _verdict(self) -> Request:
        return "stop" if self._waited >= self._patience else None

    def state_dict(self) -> dict[str, Any]:
        return {"metric": self._metric, "best": self._best, "waited": self._waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["metric"] == self._metric:
            self._best, self._waited = state["best"], state["waited"]
