"""The learning rate as a pure function of the step: nothing to save, nothing to restore."""

import math

from omnizoo.config.schema import Train


def learning_rate(train: Train, step: int) -> float:
    """Learning rate of step `step` (1-based): linear warmup, then flat, a line, a cosine, or stable-then-decay."""
    if step <= train.warmup_steps:
        return train.lr * step / train.warmup_steps
    if train.schedule == "constant":
        return train.lr
    start = train.warmup_steps
    if train.schedule == "wsd":
        start = max(start, train.steps - (train.decay_steps or max(1, train.steps // 5)))
    progress = min(1.0, max(0.0, (step - start) / max(1, train.steps - start)))
    left = 0.5 * (1 + math.cos(math.pi * progress)) if train.schedule == "cosine" else 1 - progress
    return train.lr * (train.min_lr_ratio + (1 - train.min_lr_ratio) * left)
