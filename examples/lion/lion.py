"""A custom optimizer, Lion ("Symbolic Discovery of Optimization Algorithms"), and a custom schedule.

    PYTHONPATH=examples/lion omnizoo train examples/text_tiny.yaml --optimizer.kind lion:Lion \\
        --optimizer.options.betas "[0.9, 0.98]" --train.lr 1e-4 --train.schedule lion:inverse_root

Parameters are DTensors: plain torch operations on them are correct on every layout. All state between steps is in
`self.state[parameter]`, as tensors with the shape of the parameter or scalars. Checkpoints contain this state.
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
        """Update the parameters by the sign of the interpolated momentum."""
        for group in self.param_groups:
            update_beta, momentum_beta = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                update = state["momentum"].lerp(p.grad, 1 - update_beta).sign()
                p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])
                state["momentum"].lerp_(p.grad, 1 - momentum_beta)


def inverse_root(train: TrainSection, step: int) -> float:
    """Return the learning rate of `step`, which counts from 1: linear warmup, then 1 / sqrt(step)."""
    warmup = max(1, train.warmup_steps)
    return train.lr * min(step / warmup, (warmup / step) ** 0.5)
