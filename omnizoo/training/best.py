"""What evaluations decide: which checkpoint is the best (`checkpoint.best`), and when to end (`train.early_stop`).

Both are callbacks as a user's own could be. Lower is better, unless `evaluation.metrics` says otherwise.
"""

import math
from collections.abc import Collection
from typing import Any

from omnizoo.checkpoint.folder import Best, folder_of, write_best
from omnizoo.config.errors import UserError
from omnizoo.config.schema import Config
from omnizoo.training.callbacks import Ask, Callback, Entry, Evaluation, Logger, Save, Start, Step


def check_metrics(config: Config, known: Collection[str]) -> None:
    """Refuse a metric that no evaluation of this run will have; `known` are those it will."""
    wanted = {"checkpoint.best": config.checkpoint.best}
    wanted |= {"train.early_stop.metric": config.train.early_stop.metric if config.train.early_stop else None}
    for key, metric in wanted.items():
        if metric is not None and metric not in known:
            raise UserError(f"{key} is {metric}, which evaluations of this run do not have: {', '.join(sorted(known))}")


class BestCheckpoint(Logger):
    """Asks for a checkpoint after each evaluation that is better than all before, and writes down which one it is.

    The best one before is safe until the next save: pruning goes by what is written down.
    """

    def __init__(self, metric: str, run: str, higher: bool = False) -> None:
        self._metric, self._run, self._higher = metric, run, higher
        self._saved: Best | None = None
        self._candidate: Best | None = None  # until its checkpoint is there, which may fail

    def on_start(self, event: Start) -> None:
        """In a new folder (a branch of another run, say), what lies elsewhere cannot be the best one here."""
        if self._saved is not None and folder_of(event.checkpoints, self._saved.step).is_dir():
            write_best(event.checkpoints, self._saved)  # the run may have been killed just before
        else:
            self._saved = None

    def on_step(self, event: Step) -> None:
        self._candidate = None  # it could not be saved

    def on_evaluation(self, event: Evaluation) -> Ask:
        value = event.metrics[self._metric]
        if value is None or not math.isfinite(value):
            return None
        if self._saved is not None and not is_better(value, self._saved.value, self._higher):
            return None
        self._candidate = Best(self._run, self._metric, value, event.step)
        return "save"

    def on_save(self, event: Save) -> None:
        self._saved, self._candidate = self._candidate or self._saved, None
        if self._saved is not None:
            write_best(event.path.parent, self._saved)

    def state_dict(self) -> dict[str, Any]:
        best = self._candidate or self._saved  # the checkpoint that is being written, if it is to be the best one
        return {} if best is None else {"metric": best.metric, "value": best.value, "step": best.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["metric"] == self._metric:
            self._saved = Best(self._run, self._metric, state["value"], state["step"])


class EarlyStop(Callback):
    """Asks to stop once `patience` evaluations in a row were not better than the best by more than `min_delta`."""

    def __init__(self, metric: str, patience: int, min_delta: float, higher: bool = False) -> None:
        self._metric, self._patience, self._min_delta, self._higher = metric, patience, min_delta, higher
        self._best: float | None = None
        self._waited = 0

    def on_start(self, event: Start) -> Ask:
        return self._verdict()

    def on_evaluation(self, event: Evaluation) -> Ask:
        value = event.metrics[self._metric]
        is_first = self._best is None
        bar = 0.0 if self._best is None else self._best + (self._min_delta if self._higher else -self._min_delta)
        if value is not None and math.isfinite(value) and (is_first or is_better(value, bar, self._higher)):
            self._best, self._waited = value, 0
        else:
            self._waited += 1
        return self._verdict()

    def _verdict(self) -> Ask:
        return "stop" if self._waited >= self._patience else None

    def state_dict(self) -> dict[str, Any]:
        return {"metric": self._metric, "best": self._best, "waited": self._waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["metric"] == self._metric:
            self._best, self._waited = state["best"], state["waited"]


def is_better(value: float, bar: float, higher: bool) -> bool:
    return value > bar if higher else value < bar


def watchers(config: Config, run: str) -> list[Entry]:
    """Those that the config asks for; `run` is the id of the run."""
    entries, early, best = [], config.train.early_stop, config.checkpoint.best
    higher = config.evaluation.higher_is_better
    if best is not None:
        entries.append(Entry(BestCheckpoint(best, run, higher(best)), "checkpoint.best", ""))
    if early is not None:
        stop = EarlyStop(early.metric, early.patience, early.min_delta, higher(early.metric))
        entries.append(Entry(stop, "train.early_stop", ""))
    return entries
