"""Mixture-of-experts math on one device: order (token, choice) pairs by expert, run each expert on its rows, combine.

`grouped_matmul` picks the kernel; `matmul_per_expert` is the plain torch twin it is tested against, and what runs where
torch's own grouped matmul does not: float64, and widths that are not multiples of 16 bytes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class Factors:
    """What an adapter adds to the weights `[E, A, B]` of E experts, never multiplied out."""

    first: torch.Tensor  # [E, A, rank]
    second: torch.Tensor  # [E, rank, B]
    scaling: float


@dataclass(frozen=True)
class Experts:
    """The weights of E experts, applied as `rows @ up`, `activate`, `@ down`."""

    up: torch.Tensor  # [E, H, U]; U is twice I where a gate is fused in
    down: torch.Tensor  # [E, I, H]
    up_bias: torch.Tensor | None  # [E, U]
    down_bias: torch.Tensor | None  # [E, H]
    activate: Callable[[torch.Tensor], torch.Tensor]  # [N, U] -> [N, I]
    up_factors: Factors | None = None
    down_factors: Factors | None = None


@dataclass(frozen=True)
class Pairs:
    """The N = T x K (token, choice) pairs, ordered by expert; pairs of one expert stay in the order of the tokens."""

    order: torch.Tensor  # [N]: which pair is at a place
    place: torch.Tensor  # [N]: at which place a pair is
    counts: torch.Tensor  # [E]: pairs of each expert
    choices: int  # K


def sort_by_expert(index: torch.Tensor, experts: int) -> Pairs:
    """`index [T, K]`: the experts each token chose. No host sync."""
    chosen = index.flatten()
    order = chosen.argsort(stable=True)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    counts = order.new_zeros(experts).scatter_add_(0, chosen, torch.ones_like(chosen))
    return Pairs(order, place, counts, index.shape[1])


def gather(hidden: torch.Tensor, pairs: Pairs) -> torch.Tensor:
    """`hidden [T, H]` -> `[N, H]`: each token once per choice, in the order of experts."""
    rows: torch.Tensor = _Gather.apply(hidden, pairs.order, pairs.place, pairs.choices)  # type: ignore[no-untyped-call]
    return rows


def restore(rows: torch.Tensor, pairs: Pairs) -> torch.Tensor:
    """`rows [N, H]` from the order of experts to the order of tokens."""
    restored: torch.Tensor = _Restore.apply(rows, pairs.order, pairs.place)  # type: ignore[no-untyped-call]
    return restored


def combine(rows: torch.Tensor, weights: torch.Tensor, pairs: Pairs) -> torch.Tensor:
    """`rows [N, H]` in the order of experts -> `[T, H]`: each token's choices, weighted and added in a fixed order."""
    by_token = restore(rows, pairs).view(*weights.shape, rows.shape[1])
    return (by_token * weights.unsqueeze(-1)).sum(1).to(rows.dtype)


def run_experts(rows: torch.Tensor, counts: torch.Tensor, experts: Experts) -> torch.Tensor:
    """`rows [N, H]` ordered by expert, `counts [E]` of them for each; an expert without rows has zeros as gradient."""
    inner = _linear(rows.to(experts.up.dtype), counts, experts.up, experts.up_bias, experts.up_factors)
    return _linear(experts.activate(inner), counts, experts.down, experts.down_bias, experts.down_factors)


def _linear(
    rows: torch.Tensor,
    counts: torch.Tensor,
    weights: torch.Tensor,
    bias: torch.Tensor | None,
    factors: Factors | None,
) -> torch.Tensor:
    out = grouped_matmul(rows, counts, weights)
    if factors is not None:
        narrow = grouped_matmul(rows.to(factors.first.dtype), counts, factors.first)
        out = out + (grouped_matmul(narrow, counts, factors.second) * factors.scaling).to(out.dtype)
    return out if bias is None else out + bias.repeat_interleave(counts, 0, output_size=len(rows))


def grouped_matmul(rows: torch.Tensor, counts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """`rows [N, A]`, `weights [E, A, B]` -> `[N, B]`."""
    aligned = all(width * rows.element_size() % 16 == 0 for width in weights.shape[1:])
    if aligned and len(rows) and rows.dtype in (torch.float32, torch.bfloat16, torch.float16):
        return F.grouped_mm(rows, weights, offs=counts.cumsum(0, dtype=torch.int32))
    return matmul_per_expert(rows, counts, weights)


def matmul_per_expert(rows: torch.Tensor, counts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    # `unbind`, not `weights[e]`: its backward writes each gradient once, not E gradients of all experts.
    groups = rows.split(counts.tolist())
    return torch.cat([group @ weight for group, weight in zip(groups, weights.unbind(), strict=True)])


# Permutations know their inverse, so their backward is a gather too: no atomic additions (which would make the sum over
# choices depend on timing), and faster than the scatter autograd would do.


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, order: torch.Tensor, place: torch.Tensor, choices: int) -> torch.Tensor:
        ctx.save_for_backward(place)
        ctx.choices = choices
        return hidden.index_select(0, order // choices)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (place,) = ctx.saved_tensors
        by_pair = grad.index_select(0, place)
        by_token = by_pair if ctx.choices == 1 else by_pair.unflatten(0, (-1, ctx.choices)).sum(1)
        return by_token, None, None, None


class _Restore(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, order: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(order)
        return rows.index_select(0, place)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (order,) = ctx.saved_tensors
        return grad.index_select(0, order), None, None
