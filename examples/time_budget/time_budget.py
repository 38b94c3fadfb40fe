"""A custom callback that stops the run with a checkpoint before its time limit in a queue ends.

    PYTHONPATH=examples/time_budget omnizoo train examples/text_tiny.yaml \\
        --log.callbacks '[{kind: "time_budget:TimeBudget", options: {minutes: 230}}]'

The same command resumes the run. Callbacks run on rank 0; their requests apply to all ranks.
"""

import time

from omnizoo import Callback, Request, StartEvent, StepEvent


class TimeBudget(Callback):
    """Requests a stop when the run has taken `minutes`."""

    def __init__(self, minutes: float) -> None:
        if minutes <= 0:
            raise ValueError(f"minutes is {minutes}; expected a number > 0")
        self.seconds = 60 * minutes

    def on_start(self, event: StartEvent) -> None:
        self.deadline = time.monotonic() + self.seconds

    def on_step(self, event: StepEvent) -> Request:
        return "stop" if time.monotonic() >= self.deadline else None
