"""A callback of one's own: ends the run, with a checkpoint, before the time that a queue gives it is over.

    PYTHONPATH=examples/time_budget omnizoo train examples/text_tiny.yaml \\
        --log.callbacks '[{kind: "time_budget:TimeBudget", options: {minutes: 230}}]'

The same command goes on from there. Callbacks live on the first rank; what they ask for holds for all ranks.
"""

import time

from omnizoo import Callback, Request, StartEvent, StepEvent


class TimeBudget(Callback):
    def __init__(self, minutes: float) -> None:
        if minutes <= 0:
            raise ValueError(f"minutes is {minutes}; expected a number > 0")
        self.seconds = 60 * minutes

    def on_start(self, event: StartEvent) -> None:
        self.until = time.monotonic() + self.seconds

    def on_step(self, event: StepEvent) -> Request:
        return "stop" if time.monotonic() >= self.until else None
