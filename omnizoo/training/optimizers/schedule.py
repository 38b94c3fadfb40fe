"""The learning rate as a pure function of the step. Checkpoints need no scheduler state."""

import math

from omnizoo.config.errors import UserError, named_line
from omnizoo.config.plugins import CODE_ERRORS, check_call, resolve
from omnizoo.config.sections.train import SCHEDULES, TrainSection

EXPECTED = "a function (train config, step) -> learning rate, the step counted from 1"


def learning_rate(train: TrainSection, step: int) -> float:
    """Return the learning rate of a step.

    The built-in schedules begin with a linear warmup, followed by a constant rate, a linear or cosine decay, or a
    constant rate that ends in a linear decay (`wsd`). A plugin determines the complete schedule, including the warmup.

    Args:
        train: The section `train` of the config.
        step: Number of the step, counted from 1.

    Raises:
        UserError: If the plugin fails, or does not return a finite, non-negative number.
    """
    if train.schedule not in SCHEDULES:
        return _plugin_rate(train, step)
    if step <= train.warmup:
        return train.lr * step / train.warmup
    if train.schedule == "constant":
        return train.lr
    start = train.warmup
    if train.schedule == "wsd":
        start = max(start, train.steps - (train.decay_steps or max(1, train.steps // 5)))
    progress = min(1.0, max(0.0, (step - start) / max(1, train.steps - start)))
    remaining = 1 - progress
    if train.schedule == "cosine":
        remaining = 0.5 * (1 + math.cos(math.pi * progress))
    return train.lr * (train.min_lr_ratio + (1 - train.min_lr_ratio) * remaining)


def _plugin_rate(train: TrainSection, step: int) -> float:
    """Return the learning rate of a schedule plugin, and check it."""
    spec = train.schedule
    function = resolve(spec, "train.schedule", EXPECTED)
    if not callable(function):
        raise UserError(f"train.schedule: {spec} is a {type(function).__name__}. Expected {EXPECTED}.")
    check_call(function, spec, "train.schedule", [train, step], {})
    try:
        rate = function(train, step)
    except CODE_ERRORS as error:
        raise UserError(
            f"train.schedule: {spec} failed at step {step}: {named_line(error)}. Fix the function."
        ) from error
    if not isinstance(rate, int | float) or not 0 <= rate < math.inf:
        raise UserError(
            f"train.schedule: {spec} returned {rate!r} at step {step}. Expected a finite number, at least 0."
        )
    return float(rate)
