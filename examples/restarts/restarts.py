"""A custom schedule: four cosine cycles per run (SGDR, "warm restarts").

    PYTHONPATH=examples/restarts omnizoo train examples/text_tiny.yaml --train.schedule restarts:restarts

A schedule is a pure function of the step, so it has no state to save or restore.
"""

import math

from omnizoo import TrainSection

CYCLES = 4


def restarts(train: TrainSection, step: int) -> float:
    """Return the learning rate of `step`, which counts from 1. The schedule also applies the warmup."""
    cycle = max(1, train.steps // CYCLES)
    cosine = 0.5 * (1 + math.cos(math.pi * ((step - 1) % cycle) / cycle))
    warmup = min(1.0, step / max(1, train.warmup_steps))
    return train.lr * warmup * max(train.min_lr_ratio, cosine)
