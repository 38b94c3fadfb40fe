"""Muon: orthogonalized momentum (Keller Jordan), scaled as in "Muon is Scalable for LLM Training".

`torch.optim.Muon` (2.13) is not used, because it always computes in bf16, does not accept stacks of experts, and
gathers every sharded matrix on every rank in each of its matmuls.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from omnizoo.ops.orthogonalize import COEFFICIENTS, orthogonalize
from omnizoo.parallel.fsdp.matrices import on_full_matrices
from omnizoo.parallel.fsdp.sharded_tensors import local_shard


class Muon(torch.optim.Optimizer):
    """Muon for parameters `[..., m, n]`, sharded or not. Each matrix of the last two dims is updated separately.

    `adjust_lr_fn` has the same values as in torch: `match_rms_adamw` scales updates to the size of AdamW's, so that
    both can use the same learning rate and weight decay; `original` scales with the square root of rows / columns.
    `dtype` is the dtype of the orthogonalization (default: the dtype of the gradients). With `split_heads`,
    `num_heads` contains the parameters whose rows are divided into heads, which are updated as separate matrices. The
    config checks all options.
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
        split_heads: bool = False,
        num_heads: Mapping[torch.Tensor, int] | None = None,
    ) -> None:
        self._num_heads = num_heads if split_heads and num_heads else {}
        self._orthogonalize = partial(orthogonalize, steps=ns_steps, coefficients=tuple(ns_coefficients))
        self._dtype = dtype
        self._adjust = adjust_lr_fn
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters. Collective: all ranks must call it."""
        members = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        updates = []
        for p, group in members:
            state = self.state[p]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(p.grad)
            momentum = state["momentum_buffer"].lerp_(p.grad, 1 - group["momentum"])
            update = p.grad.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
            updates.append(update if self._dtype is None else update.to(self._dtype))
        # One call for all matrices balances the work over ranks and needs few collectives.
        num_heads = [self._num_heads.get(p, 1) for p, _ in members]
        orthogonal_updates = on_full_matrices(updates, self._orthogonalize, num_heads)
        for (p, group), heads, update in zip(members, num_heads, orthogonal_updates, strict=True):
            num_rows, num_columns = p.shape[-2] // heads, p.shape[-1]
            shard = local_shard(p)
            shard.mul_(1 - group["lr"] * group["weight_decay"])
            shard.add_(update, alpha=-group["lr"] * self._scale(num_rows, num_columns))

    def _scale(self, rows: int, columns: int) -> float:
        """Return the factor that scales the learning rate for matrices of this shape."""
        if self._adjust == "original":
            return math.sqrt(max(1, rows / columns))
        return 0.2 * math.sqrt(max(rows, columns))
