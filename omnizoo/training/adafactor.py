"""torch's Adafactor on sharded parameters: its row and column statistics are sharded as their parameters are."""

from collections.abc import Iterable
from typing import Any

import torch

from omnizoo.parallel.shard import zeros_reduced


class Adafactor(torch.optim.Adafactor):
    """torch (2.13) makes the statistics itself at the first step, but whole on every rank, and then gathers every
    gradient to them. Made here first, with the right shards, all but a few scalars and columns stays where it is."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        weight_decay: float = 0.0,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
    ) -> None:
        super().__init__(params, lr=lr, beta2_decay=beta2_decay, eps=eps, d=d, weight_decay=weight_decay)
        for group in self.param_groups:
            for p in group["params"]:
                state: dict[str, torch.Tensor] = {"step": torch.tensor(0.0)}
                if p.ndim > 1:
                    state |= {"row_var": zeros_reduced(p, -1), "col_var": zeros_reduced(p, -2)}
                else:
                    state["variance"] = torch.zeros_like(p)
                self.state[p] = state
