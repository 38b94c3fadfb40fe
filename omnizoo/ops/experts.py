"""Mixture-of-experts math on one device: order (token, choice) pairs by expert, run each expert on its rows, combine.

`grouped_matmul` picks the kernel; `matmul_per_expert` is the plain torch twin it is tested against, and what runs where
torch's own grouped matmul does not: float64, and widths that are not multiples of 16 bytes.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from omnizoo.ops.quantised import Packed, multiply

PARTS = 8


@dataclass(frozen=True)
class Factors:
    """What an adapter adds to the weights `[E, A, B]` of E experts, never multiplied out."""

    first: torch.Tensor  # [E, A, rank]
    second: torch.Tensor  # [E, rank, B]
    scaling: float


@dataclass(frozen=True)
class Experts:
    """The weights of E experts, applied as `rows @ up`, `activate`, `@ down`."""

    up: torch.Tensor | Packed  # [E, H, U]; U is twice I where a gate is fused in
    down: torch.Tensor | Packed  # [E, I, H]
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
    rows: torch.Tensor = _Gather.apply(hidden, pairs)  # type: ignore[no-untyped-call]
    return rows


def restore(rows: torch.Tensor, pairs: Pairs) -> torch.Tensor:
    """`rows [N, H]` from the order of experts to the order of tokens."""
    restored: torch.Tensor = _Restore.apply(rows, pairs)  # type: ignore[no-untyped-call]
    return restored


def by_expert(weights: torch.Tensor, pairs: Pairs) -> torch.Tensor:
    """`weights [T, K]` -> `[N, 1]`, in the order of experts."""
    return gather(weights.reshape(-1, 1), replace(pairs, choices=1))


def weigh(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """`rows [N, C]` times `weights [N, 1]`, in the precision of the rows; gradients of weights are summed in fp32."""
    weighed: torch.Tensor = _Weigh.apply(rows, weights)  # type: ignore[no-untyped-call]
    return weighed


def combine(rows: torch.Tensor, pairs: Pairs) -> torch.Tensor:
    """`rows [N, H]` in the order of experts -> `[T, H]`: each token's choices, added in a fixed order."""
    combined: torch.Tensor = _Combine.apply(rows, pairs)  # type: ignore[no-untyped-call]
    return combined


def run_experts(
    rows: torch.Tensor, counts: torch.Tensor, experts: Experts, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """`rows [N, H]` ordered by expert, `counts [E]` of them for each; an expert without rows has zeros as gradient.

    What comes is times `weights [N, 1]` if given: they enter before the second matmul, where rows are narrower. So
    backward needs nothing of what it gives, and recomputation does not come as far as there.
    """
    inner = _linear(rows.to(experts.up.dtype), counts, experts.up, experts.up_bias, experts.up_factors)
    inner = experts.activate(inner)
    if weights is None:
        return _linear(inner, counts, experts.down, experts.down_bias, experts.down_factors)
    out = _linear(weigh(inner, weights), counts, experts.down, None, experts.down_factors)
    return out if experts.down_bias is None else out + weigh(_of_rows(experts.down_bias, counts, len(rows)), weights)


def _linear(
    rows: torch.Tensor,
    counts: torch.Tensor,
    weights: torch.Tensor | Packed,
    bias: torch.Tensor | None,
    factors: Factors | None,
) -> torch.Tensor:
    if isinstance(weights, Packed):
        out = multiply(rows, weights, lambda each, whole: grouped_matmul(each, counts, whole))
    else:
        out = grouped_matmul(rows, counts, weights)
    if factors is not None:
        narrow = grouped_matmul(rows.to(factors.first.dtype), counts, factors.first)
        out = out + (grouped_matmul(narrow, counts, factors.second) * factors.scaling).to(out.dtype)
    return out if bias is None else out + _of_rows(bias, counts, len(rows))


def _of_rows(bias: torch.Tensor, counts: torch.Tensor, rows: int) -> torch.Tensor:
    """`bias [E, H]` -> `[N, H]`."""
    return bias.repeat_interleave(counts, 0, output_size=rows)


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


def add_choices(rows: torch.Tensor, pairs: Pairs) -> torch.Tensor:
    """`rows [N, H]` -> `[T, H]`: of each token the rows of its choices, added one after the other in at least fp32.
    Without autograd."""
    if pairs.choices == 1:
        return rows.index_select(0, pairs.place)
    places = pairs.place.view(-1, pairs.choices)
    if not len(rows):
        return rows.new_zeros(len(places), rows.shape[1])
    # One kernel for all of it. Without weights, torch (2.13, on CPUs) would add bf16 up in bf16.
    ones = None if rows.dtype == _exact(rows) else torch.ones_like(places, dtype=rows.dtype)
    return F.embedding_bag(places, rows, mode="sum", per_sample_weights=ones)


def repeat_by_choice(tokens: torch.Tensor, pairs: Pairs) -> torch.Tensor:
    """`[T, H]` -> `[N, H]`, in the order of experts. Without autograd."""
    return tokens.index_select(0, pairs.order // pairs.choices)


def _exact(rows: torch.Tensor) -> torch.dtype:
    return torch.promote_types(rows.dtype, torch.float32)


# Permutations know their inverse, so their backward is a gather too: no atomic additions (which would make the sum over
# choices depend on timing), and faster than the scatter autograd would do. Pairs are not saved by `save_for_backward`:
# whatever is, recomputation has to come as far as there.


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, pairs: Pairs) -> torch.Tensor:
        ctx.pairs = pairs
        return repeat_by_choice(hidden, pairs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return add_choices(grad, ctx.pairs), None


class _Restore(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, pairs: Pairs) -> torch.Tensor:
        ctx.pairs = pairs
        return rows.index_select(0, pairs.place)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad.index_select(0, ctx.pairs.order), None


class _Weigh(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows, weights)
        return torch.mul(rows, weights, out=torch.empty_like(rows))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        rows, weights = ctx.saved_tensors
        grad_weights = None
        if ctx.needs_input_grad[1]:  # a part of the rows at a time: products in fp32 are twice as large as they are
            parts = zip(rows.chunk(PARTS), grad.chunk(PARTS), strict=True)
            products = [(part.to(_exact(rows)) * g).sum(1, keepdim=True) for part, g in parts]
            grad_weights = torch.cat(products).to(weights.dtype)
        return torch.mul(grad, weights, out=torch.empty_like(rows)), grad_weights


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, pairs: Pairs) -> torch.Tensor:
        ctx.pairs = pairs
        return add_choices(rows, pairs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return repeat_by_choice(grad, ctx.pairs), None
