"""Adafactor: the second moment as the product of a row and a column, so that a matrix needs no state of its own size.

The formulas are those of `torch.optim.Adafactor`, which (2.13) fails on sharded parameters: it squares a norm in place
that is not summed over ranks yet.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from omnizoo.parallel.shard import local_of, sum_over_shards, zeros_reduced


class Adafactor(torch.optim.Optimizer):
    """For parameters of any shape, sharded or not; `[..., m, n]` are stacks of matrices. Arguments are torch's: `lr` is
    the largest relative step, `eps` are (of the second moment, of the parameter's scale), `d` clips updates."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        weight_decay: float = 0.0,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
    ) -> None:
        if not beta2_decay <= 0:
            raise ValueError(f"beta2_decay is {beta2_decay}; expected a number of at most 0")
        if len(eps) != 2 or not all(value is None or value >= 0 for value in eps) or eps[1] is None:
            raise ValueError(f"eps is {eps}; expected two numbers of at least 0, the first may be null")
        if not d >= 1:
            raise ValueError(f"d is {d}; expected a number of at least 1")
        defaults = {"lr": lr, "weight_decay": weight_decay, "beta2_decay": beta2_decay, "eps": eps, "d": d}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Sums over ranks are made for all parameters at once. Updates are computed twice rather than kept in between:
        who takes Adafactor is short of memory."""
        members = [
            _Member(p, group, self._state(p))
            for group in self.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        parameters = [m.parameter for m in members]
        sums = sum_over_shards(
            [*(m.row_sum() for m in members), *(m.column_sum() for m in members), *(_square(p) for p in parameters)],
            [*parameters, *parameters, *parameters],
            [*([(-1,)] * len(members)), *([(-2,)] * len(members)), *([None] * len(members))],
        )
        rows, columns, sizes = (sums[i * len(members) : (i + 1) * len(members)] for i in range(3))
        for m, row, column in zip(members, rows, columns, strict=True):
            m.add(row, column)
        totals = sum_over_shards([m.row_total() for m in members], parameters, [(-2,)] * len(members))
        squares = [m.update(total).square().sum() for m, total in zip(members, totals, strict=True)]
        lengths = sum_over_shards(squares, parameters, [None] * len(members))
        for m, total, length, size in zip(members, totals, lengths, sizes, strict=True):
            m.move(m.update(total), length, size)

    def _state(self, p: torch.Tensor) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = self.state[p]
        if not state:
            state["step"] = torch.tensor(0.0)
            if p.ndim > 1:
                state["row_var"], state["col_var"] = zeros_reduced(p, -1), zeros_reduced(p, -2)
            else:
                state["variance"] = torch.zeros_like(p)
        return state


@dataclass(frozen=True)
class _Member:
    """One parameter in a step. Sums are of this rank's part, until they are added up over ranks."""

    parameter: torch.Tensor
    group: dict[str, Any]
    state: dict[str, torch.Tensor]

    @property
    def gradient(self) -> torch.Tensor:
        assert self.parameter.grad is not None
        return local_of(self.parameter.grad)

    @property
    def factored(self) -> bool:
        return self.parameter.ndim > 1

    @property
    def eps(self) -> float:
        """The smallest second moment's root."""
        given: float | None = self.group["eps"][0]
        return torch.finfo(self.parameter.dtype).eps if given is None else given

    def row_sum(self) -> torch.Tensor:
        return self.gradient.square().sum(-1, keepdim=True) if self.factored else self._nothing()

    def column_sum(self) -> torch.Tensor:
        return self.gradient.square().sum(-2, keepdim=True) if self.factored else self._nothing()

    def row_total(self) -> torch.Tensor:
        return local_of(self.state["row_var"]).sum(-2, keepdim=True) if self.factored else self._nothing()

    def _nothing(self) -> torch.Tensor:
        return self.gradient.new_empty(0)

    def add(self, row: torch.Tensor, column: torch.Tensor) -> None:
        """Let the gradient enter the second moment."""
        self.state["step"] += 1
        share = float(self.state["step"]) ** self.group["beta2_decay"]
        if self.factored:
            m, n = self.parameter.shape[-2:]
            local_of(self.state["row_var"]).lerp_(row / n, share)
            local_of(self.state["col_var"]).lerp_(column / m, share)
        else:
            local_of(self.state["variance"]).lerp_(self.gradient.square(), share)

    def update(self, row_total: torch.Tensor) -> torch.Tensor:
        """The gradient over the root of its second moment."""
        if self.factored:
            mean = (row_total / self.parameter.shape[-2]).clamp(min=self.eps)
            variance = local_of(self.state["row_var"]) * local_of(self.state["col_var"]) / mean
        else:
            variance = local_of(self.state["variance"])
        return variance.clamp(min=self.eps**2).rsqrt_().mul_(self.gradient)

    def move(self, update: torch.Tensor, length: torch.Tensor, size: torch.Tensor) -> None:
        """`length` and `size` are the squared norms of the whole update and the whole parameter."""
        lr, root = self.group["lr"], math.sqrt(self.parameter.numel())
        relative = min(lr, float(self.state["step"]) ** -0.5)
        scale = (size.sqrt() / root).clamp(min=self.group["eps"][1]) * relative
        here = local_of(self.parameter)
        here.mul_(1 - lr * self.group["weight_decay"])
        here.sub_(update * (scale / (length.sqrt() / (root * self.group["d"])).clamp(min=1.0)))


def _square(parameter: torch.Tensor) -> torch.Tensor:
    return local_of(parameter).square().sum()
