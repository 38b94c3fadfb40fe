"""Callbacks of a user's own, good and bad, for tests: named in `log.callbacks`, or given to `train`."""

import json
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from omnizoo import Callback, Logger
from omnizoo.config.errors import UserError


class Diary(Callback):
    """Writes down every moment."""

    def __init__(self, name: str = "diary.jsonl") -> None:
        self.name = name

    def on_start(self, event: Any) -> None:
        self.path = Path(event.run) / self.name
        self.note("start", event.step, steps=event.steps, world=event.world, seed=event.config["train"]["seed"])

    def on_step(self, event: Any) -> None:
        self.note("step", event.step, metrics=dict(event.metrics))

    def on_evaluation(self, event: Any) -> None:
        self.note("evaluation", event.step, metrics=dict(event.metrics))

    def on_save(self, event: Any) -> None:
        self.note("save", event.step, path=str(event.path), complete=(event.path / "manifest.json").is_file())

    def on_end(self, event: Any) -> None:
        self.note("end", event.step, outcome=event.outcome, error=event.error)

    def note(self, moment: str, step: int, **more: Any) -> None:
        with open(self.path, "a") as file:
            file.write(json.dumps({"moment": moment, "step": step} | more) + "\n")


class Fails(Callback):
    """Raises `error` at `moment`, from step `at` on."""

    def __init__(self, moment: str, at: int = 0, error: str = "value") -> None:
        self.moment, self.at = moment, at
        self.error = {
            "value": ValueError("a bad day\nand more"),
            "exit": SystemExit(0),
            "disk": OSError(28, "full"),
            "user": UserError("an error as OmniZoo raises it"),
        }[error]

    def _do(self, moment: str, event: Any) -> None:
        if moment == self.moment and event.step >= self.at:
            raise self.error

    def on_start(self, event: Any) -> None:
        self._do("on_start", event)

    def on_step(self, event: Any) -> None:
        self._do("on_step", event)

    def on_evaluation(self, event: Any) -> None:
        self._do("on_evaluation", event)

    def on_save(self, event: Any) -> None:
        self._do("on_save", event)

    def on_end(self, event: Any) -> None:
        self._do("on_end", event)


class FailingLogger(Fails, Logger):
    """The same, of a kind whose OSErrors are no reason to end a run."""


class StopsAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, event: Any) -> Any:
        return "stop" if event.step == self.step else None


class Counts(Callback):
    """Has a state: the losses it has seen, and how often it was started."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.starts = 0

    def on_start(self, event: Any) -> None:
        self.starts += 1

    def on_step(self, event: Any) -> None:
        self.losses.append(event.metrics["loss"])

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.losses, "starts": self.starts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses, self.starts = state["losses"], state["starts"]


class Meddles(Callback):
    """Does what should not matter: draws from and seeds every generator, and tries to change what it is given."""

    def on_step(self, event: Any) -> None:
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        torch.rand(3)
        try:
            event.metrics["loss"] = 0.0
        except TypeError:
            return
        raise AssertionError("metrics can be changed")


class Answers(Callback):
    def on_step(self, event: Any) -> Any:
        return event.step > 0  # True is nothing one can ask for


class BadState(Callback):
    def on_step(self, event: Any) -> None:
        self.now = time.time

    def state_dict(self) -> dict[str, Any]:
        return {"now": self.now}


class WrongArguments(Callback):
    def on_step(self, step: int, metrics: Any) -> None:
        pass


class Misspelled(Callback):
    def on_steps(self, event: Any) -> None:
        pass


class Empty(Callback):
    pass


class Async(Callback):
    async def on_end(self, event: Any) -> None:
        pass


class NotBuilt(Callback):
    def __init__(self) -> None:
        raise KeyError("API_KEY")

    def on_step(self, event: Any) -> None:
        pass


class NotOne:
    def on_step(self, event: Any) -> None:
        pass


def no_class() -> None:
    pass
