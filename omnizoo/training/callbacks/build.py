"""Build the callbacks of a run from the config and from the arguments of `train`."""

from collections.abc import Sequence
from inspect import iscoroutinefunction, signature

from omnizoo.config.errors import UserError, named_line
from omnizoo.config.plugins import check_call, nearest, resolve_class
from omnizoo.config.schema import Config
from omnizoo.training.callbacks.base import EVENTS, EXPECTED, Callback
from omnizoo.training.callbacks.best_checkpoint import BestCheckpoint
from omnizoo.training.callbacks.dispatcher import CallbackEntry
from omnizoo.training.callbacks.early_stop import EarlyStop


def user_callbacks(config: Config, given: Sequence[Callback]) -> list[CallbackEntry]:
    """Return the callbacks of `log.callbacks`, followed by those that were passed to `train`.

    Args:
        config: The config of the run.
        given: The callbacks that were passed to `train`.

    Raises:
        UserError: If a callback cannot be built, or its methods do not match those of `Callback`.
    """
    entries = []
    for index, part in enumerate(config.log.callbacks):
        key = f"log.callbacks.{index}"
        try:
            cls = resolve_class(part.kind, key, Callback, EXPECTED)
            check_call(cls, part.kind, f"{key}.options", [], part.options)
            entries.append(CallbackEntry(cls(**part.options), key, part.kind))
        except UserError:
            raise
        except (Exception, SystemExit) as error:  # user code may raise anything
            raise UserError(f"{key}: {part.kind} cannot be built: {named_line(error)}; expected {EXPECTED}") from error
    for index, callback in enumerate(given):
        key, cls = f"callbacks[{index}]", type(callback)
        if not isinstance(callback, Callback):
            shown = f"the class {callback.__qualname__}" if isinstance(callback, type) else f"a {cls.__qualname__}"
            raise UserError(f"{key} is {shown}; expected an instance of {EXPECTED}")
        entries.append(CallbackEntry(callback, key, f"{cls.__module__}:{cls.__qualname__}"))
    for entry in entries:
        _check(entry)
    return entries


def _check(entry: CallbackEntry) -> None:
    """Check names and arguments of the methods, so that a mistake is found at start-up and not at the end of a run."""
    cls, moments = type(entry.callback), []
    for name in dir(cls):
        if name.startswith("on_") and name not in EVENTS and callable(getattr(cls, name)):
            close = nearest(name, EVENTS) or f"; there are {', '.join(EVENTS)}"
            raise UserError(f"{entry}.{name} is no moment of a callback{close}")
        if name not in EVENTS or getattr(cls, name, None) is getattr(Callback, name):
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
        raise UserError(f"{entry} has none of {', '.join(EVENTS)}; expected {EXPECTED}")


def watchers(config: Config, run: str) -> list[CallbackEntry]:
    """Return the callbacks of `checkpoint.best` and `evaluation.early_stop`. `run` is the id of the run."""
    entries, early, best = [], config.evaluation.early_stop, config.checkpoint.best
    higher = config.evaluation.higher_is_better
    if best is not None:
        entries.append(CallbackEntry(BestCheckpoint(best, run, higher(best)), "checkpoint.best", ""))
    if early is not None:
        stop = EarlyStop(early.metric, early.patience, early.min_delta, higher(early.metric))
        entries.append(CallbackEntry(stop, "evaluation.early_stop", "", stored_key="train.early_stop"))
    return entries
