"""Adafactor: the second moment of a matrix is stored as the product of a column and a row vector, to save memory.

The formulas are those of `torch.optim.Adafactor`, which fails on sharded parameters (torch 2.13): it squares a norm in
place before the norm has been summed over ranks.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from omnizoo.ops.device import is_host
from omnizoo.parallel.fsdp.sharded_tensors import local_shard, sum_over_shards, zeros_reduced

PIECE, PIECE_ON_HOST = 2**22, 2**18  # elements per piece; on the CPU, a piece fits in its cache


class Adafactor(torch.optim.Optimizer):
    """Adafactor for parameters of any shape, sharded or not. Parameters `[..., m, n]` are stacks of matrices.

    The arguments are those of torch: `lr` is the largest relative step, `eps` has the lower bounds of the root of the
    second moment and of the scale of a parameter, and `d` is the clipping threshold of updates. The config checks their
    values.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        weight_decay: float = 0.0,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
    ) -> None:
        defaults = {"lr": lr, "weight_decay": weight_decay, "beta2_decay": beta2_decay, "eps": eps, "d": d}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters. Collective: all ranks must call it.

        Each all-reduce covers all parameters that are sharded over the same ranks. Updates overwrite
        the gradients, to save memory.
        """
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
    """A parameter during a step. Its methods return sums over the local shard, which the caller sums over ranks."""

    parameter: torch.Tensor
    group: dict[str, Any]
    state: dict[str, torch.Tensor]

    @property
    def gradient(self) -> torch.Tensor:
        assert self.parameter.grad is not None
        return local_shard(self.parameter.grad)

    @property
    def factored(self) -> bool:
        return self.parameter.ndim > 1

    @property
    def eps(self) -> float:
        """Lower bound of the root of the second moment."""
        eps: float | None = self.group["eps"][0]
        return torch.finfo(self.parameter.dtype).eps if eps is None else eps

    def row_sum(self) -> torch.Tensor:
        if not self.factored:
            return self._nothing()
        return torch.cat([some.square().sum(-1, keepdim=True) for some in _pieces(self.gradient)], -2)

    def column_sum(self) -> torch.Tensor:
        if not self.factored:
            return self._nothing()
        return torch.stack([some.square().sum(-2, keepdim=True) for some in _pieces(self.gradient)]).sum(0)

    def row_total(self) -> torch.Tensor:
        return local_shard(self.state["row_var"]).sum(-2, keepdim=True) if self.factored else self._nothing()

    def _nothing(self) -> torch.Tensor:
        return self.gradient.new_empty(0)

    def add(self, row: torch.Tensor, column: torch.Tensor) -> None:
        """Update the second moment, given the sums of squared gradients over all ranks."""
        self.state["step"] += 1
        share = float(self.state["step"]) ** self.group["beta2_decay"]
        if self.factored:
            m, n = self.parameter.shape[-2:]
            local_shard(self.state["row_var"]).lerp_(row / n, share)
            local_shard(self.state["col_var"]).lerp_(column / m, share)
        else:
            local_shard(self.state["variance"]).lerp_(self.gradient.square(), share)

    def update(self, row_total: torch.Tensor) -> torch.Tensor:
        """Divide the gradient by the root of the second moment, in place. Returns the squared norm of the result."""
        if not self.factored:
            variance = local_shard(self.state["variance"])
            return self.gradient.mul_(variance.clamp(min=self.eps**2).rsqrt_()).square().sum()
        mean = (row_total / self.parameter.shape[-2]).clamp(min=self.eps)
        columns, squares = local_shard(self.state["col_var"]), [self.gradient.new_zeros(())]
        for some, rows in zip(
            _pieces(self.gradient), _pieces(local_shard(self.state["row_var"]), self.gradient), strict=True
        ):
            variance = rows * columns / mean
            squares.append(some.mul_(variance.clamp_(min=self.eps**2).rsqrt_()).square().sum())
        return torch.stack(squares).sum()

    def move(self, length: torch.Tensor, size: torch.Tensor) -> None:
        """Apply weight decay and the update.

        Args:
            length: Squared norm of the full update.
            size: Squared norm of the full parameter.
        """
        lr, root = self.group["lr"], math.sqrt(self.parameter.numel())
        relative = min(lr, float(self.state["step"]) ** -0.5)
        scale = (size.sqrt() / root).clamp(min=self.group["eps"][1]) * relative
        here = local_shard(self.parameter)
        here.mul_(1 - lr * self.group["weight_decay"])
        here.sub_(self.gradient.mul_(scale / (length.sqrt() / (root * self.group["d"])).clamp(min=1.0)))


def _square(parameter: torch.Tensor) -> torch.Tensor:
    here = local_shard(parameter)
    pieces = _pieces(here) if here.ndim > 1 else (here,)
    return torch.stack([here.new_zeros(()), *(some.square().sum() for some in pieces)]).sum()


def _pieces(matrix: torch.Tensor, like: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
    """Split a matrix, or a stack of matrices, by rows. Temporary tensors of a piece are much smaller than the weight.

    The number of rows per piece is that of `like` (default: `matrix`), so that pieces of both tensors match.
    """
    like = matrix if like is None else like
    most, rows = PIECE_ON_HOST if is_host(like.device) else PIECE, like.shape[-2]
    return matrix.split(max(1, most * rows // max(1, like.numel())), -2) if rows else (matrix,)
