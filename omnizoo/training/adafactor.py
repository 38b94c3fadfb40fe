"""Adafactor: the second moment as the product of a row and a column, so that a matrix needs no state of its own size.

The formulas are those of `torch.optim.Adafactor`, which (2.13) fails on sharded parameters: it squares a norm in place
that is not summed over ranks yet.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from omnizoo.ops.device import is_host
from omnizoo.parallel.shard import local_of, sum_over_shards, zeros_reduced

PIECE, PIECE_ON_HOST = 2**22, 2**18  # numbers that are worked on at a time; on the host, those that its cache holds


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
        """Sums over ranks are made for all parameters at once. Gradients are used up: updates take their place."""
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
        squares = [m.update(total) for m, total in zip(members, totals, strict=True)]
        lengths = sum_over_shards(squares, parameters, [None] * len(members))
        for m, length, size in zip(members, lengths, sizes, strict=True):
            m.move(length, size)

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
        if not self.factored:
            return self._nothing()
        return torch.cat([some.square().sum(-1, keepdim=True) for some in _pieces(self.gradient)], -2)

    def column_sum(self) -> torch.Tensor:
        if not self.factored:
            return self._nothing()
        return torch.stack([some.square().sum(-2, keepdim=True) for some in _pieces(self.gradient)]).sum(0)

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
        """The gradient becomes the update: itself over the root of its second moment. Its squared norm."""
        if not self.factored:
            variance = local_of(self.state["variance"])
            return self.gradient.mul_(variance.clamp(min=self.eps**2).rsqrt_()).square().sum()
        mean = (row_total / self.parameter.shape[-2]).clamp(min=self.eps)
        columns, squares = local_of(self.state["col_var"]), [self.gradient.new_zeros(())]
        for some, rows in zip(
            _pieces(self.gradient), _pieces(local_of(self.state["row_var"]), self.gradient), strict=True
        ):
            variance = rows * columns / mean
            squares.append(some.mul_(variance.clamp_(min=self.eps**2).rsqrt_()).square().sum())
        return torch.stack(squares).sum()

    def move(self, length: torch.Tensor, size: torch.Tensor) -> None:
        """`length` and `size` are the squared norms of the whole update and the whole parameter."""
        lr, root = self.group["lr"], math.sqrt(self.parameter.numel())
        relative = min(lr, float(self.state["step"]) ** -0.5)
        scale = (size.sqrt() / root).clamp(min=self.group["eps"][1]) * relative
        here = local_of(self.parameter)
        here.mul_(1 - lr * self.group["weight_decay"])
        here.sub_(self.gradient.mul_(scale / (length.sqrt() / (root * self.group["d"])).clamp(min=1.0)))


def _square(parameter: torch.Tensor) -> torch.Tensor:
    here = local_of(parameter)
    pieces = _pieces(here) if here.ndim > 1 else (here,)
    return torch.stack([here.new_zeros(()), *(some.square().sum() for some in pieces)]).sum()


def _pieces(matrix: torch.Tensor, like: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
    """Some rows at a time of a matrix, or of each of several: as many as in `like` (default: itself) are a
    piece. What is made of a piece is gone before the next one: no copy of a large weight is ever whole.
    """
    like = matrix if like is None else like
    most, rows = PIECE_ON_HOST if is_host(like.device) else PIECE, like.shape[-2]
    return matrix.split(max(1, most * rows // max(1, like.numel())), -2) if rows else (matrix,)
