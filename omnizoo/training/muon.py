"""Muon: momentum, made orthogonal matrix by matrix (Keller Jordan; scaled as in "Muon is Scalable for LLM Training").

Our own and not `torch.optim.Muon` (2.13): that one computes in bf16 whatever the run's precision, takes no stacks of
experts, and on shards gathers every matrix on every rank, again in each of its matmuls.
"""

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch

from omnizoo.ops.orthogonal import COEFFICIENTS, orthogonalize
from omnizoo.parallel.matrices import on_whole_matrices
from omnizoo.parallel.shard import local_of

ADJUST = ("match_rms_adamw", "original")


class Muon(torch.optim.Optimizer):
    """For parameters `[..., m, n]`: each matrix of the last two dims by itself, wherever its shards are.

    `adjust_lr_fn` is torch's: `match_rms_adamw` makes updates as large as AdamW's, so that one learning rate and weight
    decay fit both; `original` scales with the square root of rows / columns. `dtype`: of the orthogonalisation; None:
    that of the gradients.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        ns_coefficients: Sequence[float] = COEFFICIENTS,
        adjust_lr_fn: str = "match_rms_adamw",
        dtype: torch.dtype | None = None,
    ) -> None:
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum is {momentum}; expected a number from 0 to below 1")
        if not isinstance(ns_steps, int) or not 1 <= ns_steps < 100:
            raise ValueError(f"ns_steps is {ns_steps}; expected an integer from 1 to 99")
        if len(ns_coefficients) != 3:
            raise ValueError(f"ns_coefficients is {ns_coefficients}; expected three numbers")
        if adjust_lr_fn not in ADJUST:
            raise ValueError(f"adjust_lr_fn is {adjust_lr_fn!r}; expected {' or '.join(ADJUST)}")
        self._orthogonalize = partial(orthogonalize, steps=ns_steps, coefficients=tuple(ns_coefficients))
        self._dtype, self._adjust = dtype, adjust_lr_fn
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        members = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        updates = []
        for p, group in members:
            state = self.state[p]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(p.grad)
            momentum = state["momentum_buffer"].lerp_(p.grad, 1 - group["momentum"])
            update = p.grad.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
            updates.append(update if self._dtype is None else update.to(self._dtype))
        # All of them at once, so that the work is dealt out evenly and the exchanges are few.
        for (p, group), update in zip(members, on_whole_matrices(updates, self._orthogonalize), strict=True):
            here = local_of(p)
            here.mul_(1 - group["lr"] * group["weight_decay"])
            here.add_(update, alpha=-group["lr"] * self._scale(*p.shape[-2:]))

    def _scale(self, rows: int, columns: int) -> float:
        if self._adjust == "original":
            return math.sqrt(max(1, rows / columns))
        return 0.2 * math.sqrt(max(rows, columns))
