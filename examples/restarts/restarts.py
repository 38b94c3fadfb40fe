"""A schedule of one's own: a cosine that begins anew four times in the run (SGDR, "warm restarts").

    PYTHONPATH=examples/restarts omnizoo train examples/text_tiny.yaml --train.schedule restarts:restarts

A schedule is a pure function of the step, so there is nothing to save and nothing to restore.
"""

import math

from omnizoo import TrainSection

CYCLES = 4


def restarts(train: TrainSection, step: int) -> float:
    """The learning rate of `step`, which counts from 1. Warmup is the schedule's own business, too."""
    cycle = max(1, train.steps // CYCLES)
    cosine = 0.5 * (1 + math.cos(math.pi * ((step - 1) % cycle) / cycle))
    return train.lr * min(1.0, step / max(1, train.warmup_steps)) * max(train.min_lr_ratio, cosine)
