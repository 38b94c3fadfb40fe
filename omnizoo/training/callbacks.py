"""Callbacks: a user's own code at five fixed moments of a run. They see plain data, and can ask for two things only.

They run on the first rank. What one of them asks for, and that one has failed, is agreed on by all ranks: at an
evaluation at once, after a step with the flag that signals use (`train_step(stop=...)`), at no cost in communication.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import iscoroutinefunction, signature
from pathlib import Path
from traceback import extract_tb
from types import MappingProxyType
from typing import Any, Literal

from omnizoo.config.doors import check_call, nearest, resolve_class
from omnizoo.config.errors import UserError, named_line
from omnizoo.config.schema import Config
from omnizoo.training.metrics import Metrics

Ask = Literal["stop", "save"] | None
MOMENTS = ("on_start", "on_step", "on_evaluation", "on_save", "on_end")
EXPECTED = "a subclass of omnizoo.Callback with on_start, on_step, on_evaluation, on_save or on_end (docs/callbacks.md)"
ASKS: dict[str, tuple[Any, ...]] = {  # what may be returned
    "on_start": (None, "stop"),
    "on_step": (None, "stop"),
    "on_evaluation": (None, "stop", "save"),
    "on_save": (None, "stop"),
    "on_end": (None,),
}


@dataclass(frozen=True)
class Start:
    """The run is about to train step `step + 1`."""

    run: Path  # `log.dir`
    checkpoints: Path
    config: Mapping[str, Any]  # complete, as plain values; a copy
    step: int  # of the checkpoint that the run goes on from; 0: from the start
    steps: int  # of the whole run
    world: int  # ranks


@dataclass(frozen=True)
class Step:
    """A step is over: what `metrics.jsonl` gets. None: not known. An evaluation's figures are in it, too."""

    step: int
    metrics: Metrics


@dataclass(frozen=True)
class Evaluation:
    """The held-out loss after `step`: `eval/loss` and one of each term. Comes after the step's own moment."""

    step: int
    metrics: Metrics


@dataclass(frozen=True)
class Save:
    """The checkpoint of `step` is complete."""

    step: int
    path: Path


@dataclass(frozen=True)
class End:
    """Nothing comes after it. `step` is the last one that was finished."""

    step: int
    outcome: Literal["done", "stopped", "failed"]
    error: str | None  # of a run that failed, in one line


class Callback:
    """Override the moments you need. Return "stop" to end the run: the step under way is finished and saved. From
    `on_evaluation`, "save" saves a checkpoint of this very step. What a moment raises ends the run on all ranks.
    """

    def on_start(self, event: Start) -> Ask:
        return None

    def on_step(self, event: Step) -> Ask:
        return None

    def on_evaluation(self, event: Evaluation) -> Ask:
        return None

    def on_save(self, event: Save) -> Ask:
        return None

    def on_end(self, event: End) -> None:
        return None

    def state_dict(self) -> dict[str, Any]:
        """What to keep in checkpoints, as JSON has it: for a run that goes on as if it had never been interrupted."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Before `on_start` of a run that goes on from a checkpoint: what `state_dict` gave then."""


class Logger(Callback):
    """A callback that only writes about the run: an OSError (disk full, server away) is said once, and no more."""


class CallbackError(RuntimeError):
    """A callback has failed: its key, its class, the moment and the error, in one line."""


@dataclass
class Entry:
    callback: Callback
    key: str  # of the config, or the argument of `train`
    name: str  # of the class, as the user wrote it
    failed: bool = False  # it is not called again

    def __str__(self) -> str:
        return f"{self.key}: {self.name}" if self.name else self.key


@dataclass(frozen=True)
class Asked:
    """What callbacks have asked for since the last time; the same on all ranks once it is agreed on."""

    stop: bool = False
    save: bool = False
    failure: str | None = None


class Callbacks:
    """All callbacks of a run in their order; none on ranks other than the first."""

    def __init__(self, entries: Sequence[Entry], active: bool) -> None:
        self._entries, self.active = list(entries), active
        self.warn: Callable[[str, OSError], None] | None = None  # of a logger that cannot write
        self.stopped_by: str | None = None
        self.failure: str | None = None
        self._save, self._ended, self._step = False, False, 0

    @property
    def wants_to_stop(self) -> bool:
        """For `train_step`, which agrees on it over ranks."""
        return self.stopped_by is not None or self.failure is not None

    def asked(self) -> Asked:
        asked = Asked(self.wants_to_stop, self._save, self.failure)
        self._save = False
        return asked

    def start(self, event: Start) -> None:
        """A logger that cannot even begin is a mistake of the config."""
        self._step = event.step
        self._tell("on_start", event, begins=True)

    def step(self, step: int, metrics: Metrics) -> None:
        self._step = step
        self._tell("on_step", Step(step, MappingProxyType(dict(metrics))))

    def evaluation(self, step: int, metrics: Metrics) -> None:
        self._tell("on_evaluation", Evaluation(step, MappingProxyType(dict(metrics))))

    def save(self, step: int, path: Path) -> None:
        self._tell("on_save", Save(step, path))

    def end(self, outcome: Literal["done", "stopped", "failed"], error: str | None = None) -> None:
        """Once, however often it is called: by the loop, or by whoever sees the loop fail."""
        if not self._ended:
            self._ended = True
            self._tell("on_end", End(self._step, outcome, error))

    def state_dict(self) -> dict[str, Any]:
        """Of those that have one, by name. One that fails ends the run, and costs the checkpoint its own state only."""
        states: dict[str, Any] = {}
        for entry, name in self._named():
            with self._noting_failure(entry, "state_dict"):
                state = entry.callback.state_dict()
                if not isinstance(state, dict):
                    raise TypeError(f"returned {state!r:.80}; expected a dict")
                json.dumps(state)
                if state:
                    states[name] = state
        return states

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        for entry, name in self._named():
            if name in states:
                with self._noting_failure(entry, "load_state_dict"):
                    entry.callback.load_state_dict(states[name])

    def _named(self) -> Iterator[tuple[Entry, str]]:
        """Names that do not depend on the place in the list; of two with the same, the second has a number."""
        seen: dict[str, int] = {}
        for entry in self._entries:
            name = entry.name or entry.key
            seen[name] = seen.get(name, 0) + 1
            yield entry, name if seen[name] == 1 else f"{name}#{seen[name]}"

    def _tell(self, moment: str, event: Any, begins: bool = False) -> None:
        for entry in self._entries:
            if entry.failed:
                continue
            unwritten: OSError | None = None
            with self._noting_failure(entry, moment):
                try:
                    asked = getattr(entry.callback, moment)(event)
                except OSError as error:
                    if not isinstance(entry.callback, Logger):
                        raise
                    asked, unwritten = None, error
                if not any(asked is known or asked == known for known in ASKS[moment]):
                    raise TypeError(f"returned {asked!r:.80}; expected {' or '.join(map(repr, ASKS[moment]))}")
                self._save |= asked == "save"
                if asked == "stop" and self.stopped_by is None:
                    self.stopped_by = str(entry)
            if unwritten is not None and begins:
                raise UserError(f"{entry}.{moment}: {named_line(unwritten)}") from unwritten
            if unwritten is not None and self.warn is not None:
                self.warn(str(entry), unwritten)

    @contextmanager
    def _noting_failure(self, entry: Entry, moment: str) -> Iterator[None]:
        """The first failure ends the run, in good order: the others are told of what still comes."""
        try:
            with _callback_errors(entry, moment):
                yield
        except CallbackError as error:
            entry.failed = True
            self.failure = self.failure or str(error)


@contextmanager
def _callback_errors(entry: Entry, moment: str) -> Iterator[None]:
    try:
        yield
    except (Exception, SystemExit) as error:
        frames = [frame for frame in extract_tb(error.__traceback__) if frame.filename != __file__]
        where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
        raise CallbackError(f"{entry}.{moment} failed: {named_line(error)}{where}") from error


def user_callbacks(config: Config, given: Sequence[Callback]) -> list[Entry]:
    """Those of `log.callbacks`, and then those that `train` was given. A UserError names the key, class and mistake."""
    entries = []
    for index, part in enumerate(config.log.callbacks):
        key = f"log.callbacks.{index}"
        with _mistakes(key, part.kind):
            cls = resolve_class(part.kind, key, Callback, EXPECTED)
            check_call(cls, part.kind, f"{key}.options", [], part.options)
            entries.append(Entry(cls(**part.options), key, part.kind))
    for index, callback in enumerate(given):
        key, cls = f"callbacks[{index}]", type(callback)
        if not isinstance(callback, Callback):
            shown = f"the class {callback.__qualname__}" if isinstance(callback, type) else f"a {cls.__qualname__}"
            raise UserError(f"{key} is {shown}; expected an instance of {EXPECTED}")
        entries.append(Entry(callback, key, f"{cls.__module__}:{cls.__qualname__}"))
    for entry in entries:
        _check(entry)
    return entries


@contextmanager
def _mistakes(key: str, spec: str) -> Iterator[None]:
    """Importing and building a class of the user's own may raise anything."""
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"{key}: {spec} cannot be built: {named_line(error)}; expected {EXPECTED}") from error


def _check(entry: Entry) -> None:
    """Methods with the names and the arguments of a callback's: a slip must not be found at the end of a long run."""
    cls, moments = type(entry.callback), []
    for name in dir(cls):
        if name.startswith("on_") and name not in MOMENTS and callable(getattr(cls, name)):
            close = nearest(name, MOMENTS) or f"; there are {', '.join(MOMENTS)}"
            raise UserError(f"{entry}.{name} is no moment of a callback{close}")
        if name not in MOMENTS or getattr(cls, name, None) is getattr(Callback, name):
            continue
        method = getattr(entry.callback, name)
        try:
            signature(method).bind(None)
            moments.append(name)
        except TypeError as error:
            takes = f"{signature(method)}" if callable(method) else f" = {method!r:.40}"
            raise UserError(f"{entry}.{name}{takes} is not as expected, {name}(self, event): {error}") from error
        if iscoroutinefunction(method):
            raise UserError(f"{entry}.{name} is async; expected a plain {name}(self, event)")
    if not moments:
        raise UserError(f"{entry} has none of {', '.join(MOMENTS)}; expected {EXPECTED}")
