"""Mixture-of-experts math on one device: sort (token, choice) pairs by expert, run the experts, and combine.

`grouped_matmul` selects the kernel. `matmul_per_expert` is the plain torch reference in tests. It also runs where
torch's grouped matmul cannot run: in float64, and for widths that are not multiples of 16 bytes.

Shapes: T tokens, K choices (experts per token), N = T x K pairs, E experts, H hidden width, I expert width.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from omnizoo.ops.quantization import Packed, multiply

NUM_CHUNKS = 8  # number of chunks in which the gradient of routing weights is computed


@dataclass(frozen=True)
class ExpertAdapter:
    """The adapter matrices of E experts that map width A to width B (weights `[E, A, B]`).

    The product of the two matrices of an expert is never computed.
    """

    first: torch.Tensor  # [E, A, rank]
    second: torch.Tensor  # [E, rank, B]
    scaling: float

    def __call__(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Return the output of the adapter for `rows [N, A]`, sorted by expert."""
        narrow = grouped_matmul(rows.to(self.first.dtype), counts, self.first)
        return grouped_matmul(narrow, counts, self.second) * self.scaling


# Returns the values that an adapter adds, `[N, B]`, for `rows [N, A]` and the number of rows of each expert `[E]`.
AddedRows = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class GateUpAdapter:
    """Adapters of the gate and of the up projection, whose weights are fused. At least one of them exists."""

    gate: AddedRows | None
    up: AddedRows | None
    is_concatenated: bool  # whether the outputs of gate and up projection are concatenated; otherwise interleaved

    def __call__(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Return the output of both adapters for `rows [N, A]`, sorted by expert."""
        gate = None if self.gate is None else self.gate(rows, counts)
        up = None if self.up is None else self.up(rows, counts)
        added = gate if gate is not None else up
        assert added is not None
        parts = [torch.zeros_like(added) if part is None else part for part in (gate, up)]
        return torch.cat(parts, -1) if self.is_concatenated else torch.stack(parts, -1).flatten(-2)


@dataclass(frozen=True)
class Experts:
    """The weights of E experts, applied as `activate(rows @ up) @ down`."""

    up: torch.Tensor | Packed  # [E, H, U]; U is 2 x I if the gate is fused with the up projection, otherwise I
    down: torch.Tensor | Packed  # [E, I, H]
    up_bias: torch.Tensor | None  # [E, U]
    down_bias: torch.Tensor | None  # [E, H]
    activate: Callable[[torch.Tensor], torch.Tensor]  # [N, U] -> [N, I]
    up_adapter: AddedRows | None = None
    down_adapter: AddedRows | None = None


@dataclass(frozen=True)
class Pairs:
    """The N = T x K (token, choice) pairs, sorted by expert. The pairs of one expert are in token order."""

    order: torch.Tensor  # [N], index of the pair at each sorted position
    sorted_position: torch.Tensor  # [N], sorted position of each pair; the inverse of `order`
    counts: torch.Tensor  # [E], number of pairs of each expert
    choices: int  # K


def sort_by_expert(index: torch.Tensor, experts: int) -> Pairs:
    """Sort the (token, choice) pairs by expert, without a host sync.

    `index [T, K]` contains the experts that each token chose.
    """
    expert_of_pair = index.flatten()
    order = expert_of_pair.argsort(stable=True)
    positions = torch.arange(len(order), device=order.device)
    sorted_position = torch.empty_like(order).scatter_(0, order, positions)
    counts = order.new_zeros(experts).scatter_add_(0, expert_of_pair, torch.ones_like(expert_of_pair))
    return Pairs(order=order, sorted_position=sorted_position, counts=counts, choices=index.shape[1])


def gather(hidden: torch.Tensor, pairs: Pairs) -> torch.Tensor:
    """Return the rows of `hidden [T, H]`, repeated once per choice of the token and sorted by expert, `[N, H]`."""
    rows: torch.Tensor = _Permute.apply(hidden, pairs, repeat_by_choice, add_choices)  # type: ignore[no-untyped-call]
    return rows


def by_expert(weights: torch.Tensor, pairs: Pairs) -> torch.Tensor:
    """Return the routing weights `[T, K]` as `[N, 1]`, sorted by expert."""
    return gather(weights.reshape(-1, 1), replace(pairs, choices=1))


def multiply_rows(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return `rows [N, width]` times `weights [N, 1]`, in the dtype of the rows.

    Weight gradients are summed in fp32.
    """
    products: torch.Tensor = _MultiplyRows.apply(rows, weights)  # type: ignore[no-untyped-call]
    return products


def combine(rows: torch.Tensor, pairs: Pairs) -> torch.Tensor:
    """Sum the expert outputs of each token in a fixed order.

    `rows [N, H]` are sorted by expert. The result is `[T, H]`.
    """
    combined: torch.Tensor = _Permute.apply(rows, pairs, add_choices, repeat_by_choice)  # type: ignore[no-untyped-call]
    return combined


def run_experts(
    rows: torch.Tensor, counts: torch.Tensor, experts: Experts, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """Run each expert on its rows. An expert without rows gets a gradient of zeros.

    Args:
        rows: `[N, H]`, sorted by expert.
        counts: `[E]`, number of rows of each expert.
        experts: The weights of this rank's experts.
        weights: `[N, 1]`, routing weights that multiply the output. They are applied before the second matmul, where
            rows are narrower. Backward then does not need the output of that matmul, so recomputation stops before it.

    Returns:
        The outputs `[N, H]`, sorted by expert.
    """
    inner = _linear(rows.to(experts.up.dtype), counts, experts.up, experts.up_bias, experts.up_adapter)
    inner = experts.activate(inner)
    if weights is None:
        return _linear(inner, counts, experts.down, experts.down_bias, experts.down_adapter)

    out = _linear(multiply_rows(inner, weights), counts, experts.down, None, experts.down_adapter)
    if experts.down_bias is None:
        return out
    return out + multiply_rows(_bias_of_rows(experts.down_bias, counts, len(rows)), weights)


def _linear(
    rows: torch.Tensor,
    counts: torch.Tensor,
    weights: torch.Tensor | Packed,
    bias: torch.Tensor | None,
    adapter: AddedRows | None,
) -> torch.Tensor:
    """Apply one projection of the experts, with its adapter and bias, to `rows` sorted by expert."""
    if isinstance(weights, Packed):
        out = multiply(rows, weights, lambda rows, weight: grouped_matmul(rows, counts, weight))
    else:
        out = grouped_matmul(rows, counts, weights)
    if adapter is not None:
        out = out + adapter(rows, counts).to(out.dtype)
    if bias is not None:
        out = out + _bias_of_rows(bias, counts, len(rows))
    return out


def _bias_of_rows(bias: torch.Tensor, counts: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the bias of each row's expert: `[E, H]` -> `[N, H]`."""
    return bias.repeat_interleave(counts, 0, output_size=rows)


def grouped_matmul(rows: torch.Tensor, counts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Multiply the rows of each expert by its weights: `rows [N, A]`, `weights [E, A, B]` -> `[N, B]`."""
    is_aligned = all(width * rows.element_size() % 16 == 0 for width in weights.shape[1:])
    is_supported_dtype = rows.dtype in (torch.float32, torch.bfloat16, torch.float16)
    if is_aligned and len(rows) and is_supported_dtype:
        return F.grouped_mm(rows, weights, offs=counts.cumsum(0, dtype=torch.int32))
    return matmul_per_expert(rows, counts, weights)


def matmul_per_expert(rows: torch.Tensor, counts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Compute the result of `grouped_matmul` with one matmul per expert."""
    # The backward of `unbind` writes each gradient once. The backward of `weights[e]` would allocate the gradient of
    # all experts E times.
    groups = rows.split(counts.tolist())
    return torch.cat([group @ weight for group, weight in zip(groups, weights.unbind(), strict=True)])


def add_choices(rows: torch.Tensor, pairs: Pairs) -> torch.Tensor:
    """Sum the K expert outputs of each token, `[N, H]` -> `[T, H]`.

    The terms are added in the order of the choices, in fp32 or better. Autograd does not record the sum.
    """
    if pairs.choices == 1:
        return rows.index_select(0, pairs.sorted_position)
    positions = pairs.sorted_position.view(-1, pairs.choices)
    if not len(rows):
        return rows.new_zeros(len(positions), rows.shape[1])

    # `embedding_bag` gathers and adds in one kernel. Weights of 1 make it sum in fp32. Without weights, torch 2.13 sums
    # bf16 in bf16 on CPUs.
    ones = None
    if rows.dtype != _wide_dtype(rows):
        ones = torch.ones_like(positions, dtype=rows.dtype)
    return F.embedding_bag(positions, rows, mode="sum", per_sample_weights=ones)


def repeat_by_choice(tokens: torch.Tensor, pairs: Pairs) -> torch.Tensor:
    """Repeat each token once per choice, sorted by expert, `[T, H]` -> `[N, H]`.

    Autograd does not record the copies.
    """
    return tokens.index_select(0, pairs.order // pairs.choices)


def _wide_dtype(rows: torch.Tensor) -> torch.dtype:
    """Return fp32, or float64 if the rows are float64."""
    return torch.promote_types(rows.dtype, torch.float32)


# The backward of a permutation is the inverse permutation, so it is a gather too. Autograd's backward would be a
# scatter. A scatter is slower, and its atomic additions would make the sum over choices depend on timing. `pairs` is
# not saved by `save_for_backward`, because recomputation would then have to run up to this operator.


class _Permute(torch.autograd.Function):
    """Apply `permute` in forward and its inverse `reverse` in backward."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, pairs: Pairs, permute: Any, reverse: Any) -> Any:
        ctx.pairs = pairs
        ctx.reverse = reverse
        return permute(rows, pairs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return ctx.reverse(grad, ctx.pairs), None, None, None


class _MultiplyRows(torch.autograd.Function):
    """Multiplies rows by weights (see `multiply_rows`)."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows, weights)
        return torch.mul(rows, weights, out=torch.empty_like(rows))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        rows, weights = ctx.saved_tensors
        grad_weights = None
        if ctx.needs_input_grad[1]:  # chunk by chunk, because the fp32 products take twice the memory of bf16 rows
            wide = _wide_dtype(rows)
            sums = []
            for row_chunk, grad_chunk in zip(rows.chunk(NUM_CHUNKS), grad.chunk(NUM_CHUNKS), strict=True):
                sums.append((row_chunk.to(wide) * grad_chunk).sum(1, keepdim=True))
            grad_weights = torch.cat(sums).to(weights.dtype)
        return torch.mul(grad, weights, out=torch.empty_like(rows)), grad_weights
