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


def user_callbacks(config: Config, callbacks: Sequence[Callback]) -> list[CallbackEntry]:
    """Return the callbacks of `log.callbacks`, followed by the callbacks that were passed to `train`.

    Args:
        config: The config of the run.
        callbacks: The callbacks that were passed to `train`.

    Raises:
        UserError: If a callback cannot be built, or its methods do not match the class `Callback`.
    """
    entries = []
    for index, settings in enumerate(config.log.callbacks):
        key = f"log.callbacks.{index}"
        kind = settings.kind
        try:
            cls = resolve_class(kind, key, Callback, EXPECTED)
            check_call(cls, kind, f"{key}.options", [], settings.options)
            entries.append(CallbackEntry(cls(**settings.options), key, kind))
        except UserError:
            raise
        except (Exception, SystemExit) as error:  # user code may raise any exception
            raise UserError(f"{key}: {kind} cannot be built: {named_line(error)}. Expected {EXPECTED}.") from error
    for index, callback in enumerate(callbacks):
        key = f"callbacks[{index}]"
        cls = type(callback)
        if isinstance(callback, type):
            raise UserError(f"{key}: {callback.__qualname__} is a class. Pass an instance of {EXPECTED}.")
        if not isinstance(callback, Callback):
            raise UserError(f"{key}: the value is a {cls.__qualname__}. Pass an instance of {EXPECTED}.")
        entries.append(CallbackEntry(callback, key, f"{cls.__module__}:{cls.__qualname__}"))
    for entry in entries:
        _check(entry)
    return entries


def _check(entry: CallbackEntry) -> None:
    """Check the names and arguments of the methods, so that mistakes raise an error at start-up, not hours later."""
    cls = type(entry.callback)
    methods = []
    for name in dir(cls):
        if name.startswith("on_") and name not in EVENTS and callable(getattr(cls, name)):
            suggestion = nearest(name, EVENTS) or f". Use one of {', '.join(EVENTS)}"
            raise UserError(f"{entry}.{name} is not a method of omnizoo.Callback{suggestion}")
        if name not in EVENTS or getattr(cls, name, None) is getattr(Callback, name):
            continue
        _check_method(entry, name)
        methods.append(name)
    if not methods:
        raise UserError(f"{entry} has none of {', '.join(EVENTS)}. Expected {EXPECTED}.")


def _check_method(entry: CallbackEntry, name: str) -> None:
    """Raise a `UserError` if the method `name` of a callback cannot be called with an event."""
    method = getattr(entry.callback, name)
    try:
        signature(method).bind(None)
    except TypeError as error:
        definition = f"{signature(method)}" if callable(method) else f" = {method!r:.40}"
        raise UserError(
            f"{entry}.{name}{definition} cannot be called with an event: {error}. Define it as {name}(self, event)."
        ) from error
    if iscoroutinefunction(method):
        raise UserError(f"{entry}.{name} is async. Define it as a plain {name}(self, event).")


def watchers(config: Config, run: str) -> list[CallbackEntry]:
    """Return the callbacks of `checkpoint.best` and `evaluation.early_stop`. `run` is the id of the run."""
    entries = []
    higher_is_better = config.evaluation.higher_is_better
    best = config.checkpoint.best
    if best is not None:
        keep_best = BestCheckpoint(best, run, higher_is_better(best))
        entries.append(CallbackEntry(keep_best, "checkpoint.best", ""))
    settings = config.evaluation.early_stop
    if settings is not None:
        early_stop = EarlyStop(
            metric=settings.metric,
            patience=settings.patience,
            min_delta=settings.min_delta,
            higher=higher_is_better(settings.metric),
        )
        entries.append(CallbackEntry(early_stop, "evaluation.early_stop", "", stored_key="train.early_stop"))
    return entries
