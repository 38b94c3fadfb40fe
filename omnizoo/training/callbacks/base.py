"""Callback base classes and the events that callbacks receive.

Callbacks run on rank 0 at five events of a run. They receive plain data. A callback may request to stop the run or save
a checkpoint. Rank 0 shares requests and failures with all ranks: immediately after an evaluation, and otherwise with
the stop flag of the next step (`train_step(stop=...)`). The flag needs no additional collective.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from omnizoo.reporting.run_folder import Metrics

Request = Literal["stop", "save"] | None
EXPECTED = (
    "a subclass of omnizoo.Callback with on_start, on_step, on_evaluation, on_save or on_end (docs/how-to/callbacks.md)"
)
REQUESTS: dict[str, tuple[Any, ...]] = {  # allowed return values of each method
    "on_start": (None, "stop"),
    "on_step": (None, "stop"),
    "on_evaluation": (None, "stop", "save"),
    "on_save": (None, "stop"),
    "on_end": (None,),
}
EVENTS = tuple(REQUESTS)


@dataclass(frozen=True)
class StartEvent:
    """The run is about to train step `step + 1`."""

    run: Path  # run folder (`log.dir`)
    checkpoints: Path  # checkpoint folder
    config: Mapping[str, Any]  # copy of the complete config, as plain values
    step: int  # step of the checkpoint that the run resumes from; 0 for a new run
    steps: int  # total number of steps in the run
    world: int  # world size


@dataclass(frozen=True)
class StepEvent:
    """A step is finished.

    The metrics are the same as in `metrics.jsonl`. If an evaluation follows this step, they include its metrics.
    """

    step: int
    metrics: Metrics  # a value is None if it is unknown


@dataclass(frozen=True)
class EvaluationEvent:
    """An evaluation is finished. This event follows the `StepEvent` of the same step."""

    step: int
    metrics: Metrics  # `eval/loss`, `eval/loss/<term>` and the metrics on responses


@dataclass(frozen=True)
class SaveEvent:
    """The checkpoint of `step` is complete."""

    step: int
    path: Path


@dataclass(frozen=True)
class EndEvent:
    """The run ends. This is its last event."""

    step: int  # last finished step
    outcome: Literal["done", "stopped", "failed"]
    error: str | None  # one-line message if the run failed, otherwise None


class Callback:
    """Base class of callbacks. Override the methods that you need.

    - `on_start`: before the first step of this process.
    - `on_step`: after each step.
    - `on_evaluation`: after each evaluation.
    - `on_save`: after each checkpoint, once it is complete.
    - `on_end`: when the run ends, even if it failed. It returns nothing.

    Return "stop" to end the run after the current step has been finished and saved. `on_evaluation` may also return
    "save" to save a checkpoint of the evaluated step. An exception in a callback ends the run on all ranks.

    Example:
        >>> class StopAtLoss(omnizoo.Callback):
        ...     def on_step(self, event):
        ...         return "stop" if event.metrics["loss"] < 0.1 else None
    """

    def on_start(self, event: StartEvent) -> Request:
        """Called before the first step of this process.

        Args:
            event: Folders, config and step of the run.

        Returns:
            None, or "stop".
        """
        return None

    def on_step(self, event: StepEvent) -> Request:
        """Called after each step.

        Args:
            event: The step and its metrics.

        Returns:
            None, or "stop".
        """
        return None

    def on_evaluation(self, event: EvaluationEvent) -> Request:
        """Called after each evaluation.

        Args:
            event: The step and the metrics of the evaluation.

        Returns:
            None, "stop", or "save" to save a checkpoint of this step.
        """
        return None

    def on_save(self, event: SaveEvent) -> Request:
        """Called after each checkpoint, once it is complete.

        Args:
            event: The step and the path of the checkpoint.

        Returns:
            None, or "stop".
        """
        return None

    def on_end(self, event: EndEvent) -> None:
        """Called when the run ends, even if it failed.

        Args:
            event: The last step, and the outcome of the run.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the state to store in checkpoints, so that a resumed run behaves like an uninterrupted one.

        Returns:
            A dict that can be written as JSON. An empty dict is not stored.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state when a run resumes from a checkpoint. Called before `on_start`.

        Args:
            state: The dict that `state_dict` returned when the checkpoint was saved.
        """


class Logger(Callback):
    """A callback that only records the run.

    An `OSError` in a logger (full disk, unreachable server) is printed once as a warning and does not end the run.
    In `on_start`, it raises a `UserError` instead.
    """
