"""Call the callbacks of a run, and collect their requests and failures."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from traceback import extract_tb
from types import MappingProxyType
from typing import Any, Literal

from omnizoo.config.errors import TrainingError, UserError, named_line
from omnizoo.parallel.mesh import Mesh
from omnizoo.reporting.run_folder import Metrics
from omnizoo.training.callbacks.base import (
    REQUESTS,
    Callback,
    EndEvent,
    EvaluationEvent,
    Logger,
    SaveEvent,
    StartEvent,
    StepEvent,
)


@dataclass
class CallbackEntry:
    """A callback with its name in the config and in checkpoints."""

    callback: Callback
    key: str  # config key, or argument of `train`
    name: str  # class name, as in the config; empty for built-in callbacks
    failed: bool = False  # if True, the callback is not called again
    stored_key: str = ""  # key of the state in checkpoints, if it differs from the config key

    def __str__(self) -> str:
        return f"{self.key}: {self.name}" if self.name else self.key


@dataclass(frozen=True)
class Requests:
    """Requests of callbacks since the last synchronization; identical on all ranks after `Callbacks.sync_requests`."""

    stop: bool = False
    save: bool = False
    failure: str | None = None


def raise_failure(requests: Requests, suffix: str = "") -> None:
    """Raise on every rank if a callback failed. `suffix` is added to the message."""
    if requests.failure is not None:
        raise TrainingError(requests.failure + suffix)


class Callbacks:
    """All callbacks of a run, in the order in which they are called. Only rank 0 has any."""

    def __init__(self, entries: Sequence[CallbackEntry], active: bool) -> None:
        """Store the callbacks.

        Args:
            entries: The callbacks, in the order in which they are called.
            active: Whether this is rank 0.
        """
        self._entries = list(entries)
        self.active = active
        self.warn: Callable[[str, OSError], None] | None = None  # reports a logger that cannot write
        self.stopped_by: str | None = None  # name of the first callback that requested to stop
        self.failure: str | None = None  # message about the first callback that failed
        self._save = False  # whether a callback requested a checkpoint
        self._ended = False
        self._step = 0  # last finished step

    @property
    def wants_to_stop(self) -> bool:
        """Whether a callback requested to stop, or failed. `train_step` shares the flag with all ranks."""
        return self.stopped_by is not None or self.failure is not None

    def sync_requests(self, mesh: Mesh) -> Requests:
        """Broadcast the requests since the last call from rank 0. Collective: all ranks must call it."""
        requests: Requests = mesh.from_first(Requests(self.wants_to_stop, self._save, self.failure))
        self._save = False
        return requests

    def start(self, event: StartEvent) -> None:
        """Call `on_start` of all callbacks. Raises a `UserError` if a logger cannot write."""
        self._step = event.step
        self._call("on_start", event)

    def step(self, step: int, metrics: Metrics) -> None:
        """Call `on_step` of all callbacks."""
        self._step = step
        self._call("on_step", StepEvent(step, MappingProxyType(dict(metrics))))

    def evaluation(self, step: int, metrics: Metrics) -> None:
        """Call `on_evaluation` of all callbacks."""
        self._call("on_evaluation", EvaluationEvent(step, MappingProxyType(dict(metrics))))

    def save(self, step: int, path: Path) -> None:
        """Call `on_save` of all callbacks."""
        self._call("on_save", SaveEvent(step, path))

    def end(self, outcome: Literal["done", "stopped", "failed"], error: str | None = None) -> None:
        """Call `on_end` of all callbacks once. Later calls, such as by error handling, have no effect."""
        if not self._ended:
            self._ended = True
            self._call("on_end", EndEvent(self._step, outcome, error))

    def state_dict(self) -> dict[str, Any]:
        """Return the non-empty states of the callbacks, keyed by callback name.

        If `state_dict` of a callback fails, the run ends. The checkpoint then lacks only the state of this callback.
        """
        states: dict[str, Any] = {}
        for entry, name in self._named():
            with self._storing_failure(entry, "state_dict"):
                state = entry.callback.state_dict()
                if not isinstance(state, dict):
                    raise TypeError(f"returned {state!r:.80} instead of a dict")
                json.dumps(state)
                if state:
                    states[name] = state
        return states

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Restore the states of callbacks from a checkpoint. Callbacks without a saved state start from scratch."""
        for entry, name in self._named():
            if name in states:
                with self._storing_failure(entry, "load_state_dict"):
                    entry.callback.load_state_dict(states[name])

    def _named(self) -> Iterator[tuple[CallbackEntry, str]]:
        """Yield each callback with a name that does not depend on its position. Repeated names get a number."""
        counts: dict[str, int] = {}
        for entry in self._entries:
            name = entry.name or entry.stored_key or entry.key
            counts[name] = counts.get(name, 0) + 1
            if counts[name] > 1:
                name = f"{name}#{counts[name]}"
            yield entry, name

    def _call(self, method: str, event: Any) -> None:
        """Call a method of all callbacks that have not failed, and store their requests."""
        for entry in self._entries:
            if entry.failed:
                continue
            write_error: OSError | None = None
            with self._storing_failure(entry, method):
                try:
                    request = getattr(entry.callback, method)(event)
                except OSError as error:
                    if not isinstance(entry.callback, Logger):
                        raise
                    request = None
                    write_error = error
                if not any(request is allowed or request == allowed for allowed in REQUESTS[method]):
                    expected = " or ".join(repr(allowed) for allowed in REQUESTS[method])
                    raise TypeError(f"returned {request!r:.80} instead of {expected}")
                self._save |= request == "save"
                if request == "stop" and self.stopped_by is None:
                    self.stopped_by = str(entry)
            if write_error is not None and method == "on_start":
                raise UserError(f"{entry}.{method}: {named_line(write_error)}") from write_error
            if write_error is not None and self.warn is not None:
                self.warn(str(entry), write_error)

    @contextmanager
    def _storing_failure(self, entry: CallbackEntry, method: str) -> Iterator[None]:
        """Context manager that records an error of a callback. The run ends after all other callbacks were called."""
        try:
            yield
        except (Exception, SystemExit) as error:  # noqa: BLE001 - user code may raise anything
            entry.failed = True
            self.failure = self.failure or _failure(entry, method, error)


def _failure(entry: CallbackEntry, method: str, error: BaseException) -> str:
    """Return the message about a failed callback. A built-in callback raises `UserError` for the user's mistake."""
    if isinstance(error, UserError) and not entry.name:
        return str(error)
    frames = [frame for frame in extract_tb(error.__traceback__) if frame.filename != __file__]
    location = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{entry}.{method} failed: {named_line(error)}{location}"
