"""An optimizer of one's own: Lion ("Symbolic Discovery of Optimization Algorithms"), and a schedule to go with it.

    PYTHONPATH=examples/lion omnizoo train examples/text_tiny.yaml --optimizer.kind lion:Lion \\
        --optimizer.options.betas "[0.9, 0.98]" --train.lr 1e-4 --train.schedule lion:inverse_root

Parameters are sharded tensors (DTensor): plain torch on them is right on every layout. All that lasts from one step to
the next lives in `self.state[parameter]`, as tensors like the parameter or of no dimension; checkpoints keep that.
"""

from collections.abc import Iterable
from typing import Any

import torch

from omnizoo import TrainSection


class Lion(torch.optim.Optimizer):
    def __init__(
        self, params: Iterable[Any], lr: float, weight_decay: float = 0.0, betas: tuple[float, float] = (0.9, 0.99)
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": betas})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            now, later = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                update = state["momentum"].lerp(p.grad, 1 - now).sign()
                p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])
                state["momentum"].lerp_(p.grad, 1 - later)


def inverse_root(train: TrainSection, step: int) -> float:
    """Linear warmup, then falling with the root of the step; `step` counts from 1."""
    warmup = max(1, train.warmup_steps)
    return train.lr * min(step / warmup, (warmup / step) ** 0.5)
