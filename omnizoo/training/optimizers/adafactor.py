"""Adafactor. It stores the second moment of a matrix as the product of a column and a row vector, to save memory.

The formulas are the same as in `torch.optim.Adafactor`. That class fails on sharded parameters (torch 2.13), because it
squares a norm in place before the norm has been summed over ranks.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from omnizoo.ops.device import is_host
from omnizoo.parallel.fsdp.sharded_tensors import local_shard, sum_over_shards, zeros_reduced

PIECE = 2**22  # elements per piece
PIECE_ON_HOST = 2**18  # fits in the cache of a CPU


class Adafactor(torch.optim.Optimizer):
    """Adafactor for parameters of any shape, sharded or not. Parameters `[..., m, n]` are stacks of matrices.

    The arguments are the same as in torch. `lr` is the largest relative step. `eps` contains two lower bounds, for the
    root of the second moment and for the scale of a parameter. `d` is the clipping threshold of updates. The config
    checks their values.
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
        members = []
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    members.append(_Member(p, group, self._state(p)))
        parameters = [member.parameter for member in members]
        count = len(members)

        row_sums = [member.row_sum() for member in members]
        column_sums = [member.column_sum() for member in members]
        squares = [_square(p) for p in parameters]
        sums = sum_over_shards(
            [*row_sums, *column_sums, *squares],
            [*parameters, *parameters, *parameters],
            [*([(-1,)] * count), *([(-2,)] * count), *([None] * count)],
        )
        row_sums = sums[:count]
        column_sums = sums[count : 2 * count]
        squared_norms = sums[2 * count :]
        for member, row_sum, column_sum in zip(members, row_sums, column_sums, strict=True):
            member.update_moment(row_sum, column_sum)

        row_totals = sum_over_shards([member.row_total() for member in members], parameters, [(-2,)] * count)
        update_squares = []
        for member, row_total in zip(members, row_totals, strict=True):
            update_squares.append(member.normalize_gradient(row_total))
        update_norms = sum_over_shards(update_squares, parameters, [None] * count)
        for member, update_norm, squared_norm in zip(members, update_norms, squared_norms, strict=True):
            member.apply_update(update_norm, squared_norm)

    def _state(self, p: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the state of a parameter. The state is created in the first step."""
        state: dict[str, torch.Tensor] = self.state[p]
        if not state:
            state["step"] = torch.tensor(0.0)
            if p.ndim > 1:
                state["row_var"] = zeros_reduced(p, -1)
                state["col_var"] = zeros_reduced(p, -2)
            else:
                state["variance"] = torch.zeros_like(p)
        return state


@dataclass(frozen=True)
class _Member:
    """A parameter that the current step updates.

    Its methods return sums over the local shard. The caller sums them over ranks."""

    parameter: torch.Tensor
    group: dict[str, Any]
    state: dict[str, torch.Tensor]

    @property
    def gradient(self) -> torch.Tensor:
        """The local shard of the gradient. `normalize_gradient` turns it into the update."""
        assert self.parameter.grad is not None
        return local_shard(self.parameter.grad)

    @property
    def is_factored(self) -> bool:
        """Whether the second moment is stored as a product of a column and a row vector."""
        return self.parameter.ndim > 1

    @property
    def eps(self) -> float:
        """Lower bound of the root of the second moment."""
        eps: float | None = self.group["eps"][0]
        return torch.finfo(self.parameter.dtype).eps if eps is None else eps

    def row_sum(self) -> torch.Tensor:
        """Return the sum of squared gradients of each row; empty if the moment is not factored."""
        if not self.is_factored:
            return self._empty()
        sums = [piece.square().sum(-1, keepdim=True) for piece in _pieces(self.gradient)]
        return torch.cat(sums, -2)

    def column_sum(self) -> torch.Tensor:
        """Return the sum of squared gradients of each column; empty if the moment is not factored."""
        if not self.is_factored:
            return self._empty()
        sums = [piece.square().sum(-2, keepdim=True) for piece in _pieces(self.gradient)]
        return torch.stack(sums).sum(0)

    def row_total(self) -> torch.Tensor:
        """Return the sum of the row vector of the second moment; empty if the moment is not factored."""
        if not self.is_factored:
            return self._empty()
        return local_shard(self.state["row_var"]).sum(-2, keepdim=True)

    def _empty(self) -> torch.Tensor:
        return self.gradient.new_empty(0)

    def update_moment(self, row_sum: torch.Tensor, column_sum: torch.Tensor) -> None:
        """Update the second moment, given the sums of squared gradients over all ranks."""
        self.state["step"] += 1
        new_weight = float(self.state["step"]) ** self.group["beta2_decay"]
        if self.is_factored:
            num_rows, num_columns = self.parameter.shape[-2:]
            local_shard(self.state["row_var"]).lerp_(row_sum / num_columns, new_weight)
            local_shard(self.state["col_var"]).lerp_(column_sum / num_rows, new_weight)
        else:
            local_shard(self.state["variance"]).lerp_(self.gradient.square(), new_weight)

    def normalize_gradient(self, row_total: torch.Tensor) -> torch.Tensor:
        """Divide the gradient by the root of the second moment, in place. Returns the squared norm of the result."""
        if not self.is_factored:
            variance = local_shard(self.state["variance"])
            return self.gradient.mul_(variance.clamp(min=self.eps**2).rsqrt_()).square().sum()
        mean = (row_total / self.parameter.shape[-2]).clamp(min=self.eps)
        columns = local_shard(self.state["col_var"])
        gradient_pieces = _pieces(self.gradient)
        row_pieces = _pieces(local_shard(self.state["row_var"]), self.gradient)
        squares = [self.gradient.new_zeros(())]
        for piece, rows in zip(gradient_pieces, row_pieces, strict=True):
            variance = rows * columns / mean
            inverse_root = variance.clamp_(min=self.eps**2).rsqrt_()
            squares.append(piece.mul_(inverse_root).square().sum())
        return torch.stack(squares).sum()

    def apply_update(self, update_norm: torch.Tensor, parameter_norm: torch.Tensor) -> None:
        """Apply weight decay and the update.

        Args:
            update_norm: Squared norm of the full update.
            parameter_norm: Squared norm of the full parameter.
        """
        lr = self.group["lr"]
        root = math.sqrt(self.parameter.numel())
        relative_step = min(lr, float(self.state["step"]) ** -0.5)
        scale = (parameter_norm.sqrt() / root).clamp(min=self.group["eps"][1]) * relative_step
        clipping = (update_norm.sqrt() / (root * self.group["d"])).clamp(min=1.0)
        shard = local_shard(self.parameter)
        shard.mul_(1 - lr * self.group["weight_decay"])
        shard.sub_(self.gradient.mul_(scale / clipping))


def _square(parameter: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares of the local shard."""
    shard = local_shard(parameter)
    pieces = _pieces(shard) if shard.ndim > 1 else (shard,)
    return torch.stack([shard.new_zeros(()), *(piece.square().sum() for piece in pieces)]).sum()


def _pieces(matrix: torch.Tensor, like: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
    """Split a matrix, or a stack of matrices, by rows. Temporary tensors of a piece are much smaller than the weight.

    The pieces have as many rows as the pieces of `like` (default: `matrix`), so that the pieces of both tensors match.
    """
    like = matrix if like is None else like
    num_rows = like.shape[-2]
    if not num_rows:
        return (matrix,)
    num_elements = PIECE_ON_HOST if is_host(like.device) else PIECE
    piece_rows = max(1, num_elements * num_rows // max(1, like.numel()))
    pieces: tuple[torch.Tensor, ...] = matrix.split(piece_rows, -2)
    return pieces
