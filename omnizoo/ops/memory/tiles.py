"""Compute row-wise layers a few tokens at a time (in tiles), so that their memory does not grow with the pack.

The forward pass saves only the input rows, and no intermediate results. The backward pass recomputes one tile at a time
and computes its gradients. Gradients of weights are accumulated in place, in fp32 or better.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from omnizoo.ops.precision import at_least_fp32, keep_precision
from omnizoo.ops.torch_private import Recomputation, TorchDispatchMode, tree_leaves

ROWS = 13  # number of rows in the test input of `is_row_wise`; no width of a model is equal to it
MATMULS = {"mm", "addmm", "bmm"}
# Operators that reshape, split or reduce tensors. The shapes of their outputs show whether they process each row
# independently.
ROW_WISE = {
    *("view", "_unsafe_view", "reshape", "alias", "detach", "clone", "_to_copy", "unsqueeze", "squeeze", "expand"),
    *("split", "slice", "chunk", "split_with_sizes", "select"),
    *("mean", "sum", "var_mean", "_fused_rms_norm", "native_layer_norm"),
}


@dataclass(frozen=True)
class Tiles:
    """Computes a module in tiles. Call `Tiles(...)(module, compute, rows, ...)` instead of `compute(rows, ...)`."""

    tokens: int  # maximum number of tokens in a tile
    recomputation: Recomputation
    precision: str  # train.precision
    # Returns the maximum over ranks of the number of tiles. It is needed if `compute` uses collectives.
    max_over_ranks: Callable[[int], int] | None = None

    def __call__(
        self, module: nn.Module, compute: Callable[..., torch.Tensor], rows: torch.Tensor, *others: torch.Tensor
    ) -> torch.Tensor:
        """Return `compute(rows, *others)`, computed tile by tile.

        If `max_over_ranks` is set, this is a collective: all ranks must call it.

        Args:
            module: Contains the weights that `compute` uses.
            compute: Row-wise function, in which each output row depends only on the same row of the inputs.
            rows: `[tokens, ...]`.
            others: More inputs with the same number of rows.
        """
        num_tiles = -(-len(rows) // self.tokens)
        if self.max_over_ranks is not None:
            num_tiles = self.recomputation.once(lambda: self.max_over_ranks(num_tiles))  # type: ignore[misc]
        if num_tiles <= 1:
            return compute(rows, *others)

        spans = [(i * self.tokens, (i + 1) * self.tokens) for i in range(num_tiles)]
        inputs = (rows, *others)
        weights = [p for p in module.parameters() if p.requires_grad]
        if not torch.is_grad_enabled() or not any(x.requires_grad for x in (*inputs, *weights)):
            return _forward(compute, inputs, spans)
        if any(x.requires_grad for x in inputs):
            inputs = _Enter.apply(*inputs)  # type: ignore[no-untyped-call]
        out: torch.Tensor = _Tiled.apply(self, module, compute, spans, len(inputs), *inputs, *weights)  # type: ignore[no-untyped-call]
        return out


def _forward(
    compute: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor], spans: Sequence[tuple[int, int]]
) -> torch.Tensor:
    """Compute each tile and write it into one output tensor."""
    out: torch.Tensor | None = None
    for begin, end in spans:
        tile = compute(*(x[begin:end] for x in inputs))
        if out is None:
            out = tile.new_empty(len(inputs[0]), *tile.shape[1:])
        out[begin:end] = tile
    assert out is not None
    return out


class _Enter(torch.autograd.Function):
    """Saves the inputs of the tiles, so that recomputation of the enclosing block can stop before the tiles."""

    @staticmethod
    def forward(ctx: Any, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(*inputs)
        ctx.set_materialize_grads(False)
        return tuple(x.view_as(x) for x in inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return grads


class _Tiled(torch.autograd.Function):
    """Computes tiles without saving intermediates, and recomputes each tile in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        tiles: Tiles,
        module: nn.Module,
        compute: Callable[..., torch.Tensor],
        spans: Sequence[tuple[int, int]],
        count: int,
        *tensors: torch.Tensor,
    ) -> torch.Tensor:
        inputs = tensors[:count]
        ctx.tiles = tiles
        ctx.module = module
        ctx.compute = compute
        ctx.spans = spans
        ctx.count = count
        ctx.entered = next((x.grad_fn for x in inputs if x.grad_fn is not None), None)
        if ctx.entered is None:
            ctx.save_for_backward(*inputs)
        contexts = [tiles.recomputation.contexts(None) for _ in spans]
        forward_contexts = iter([forward for forward, _ in contexts])
        ctx.recompute_contexts = [recompute for _, recompute in contexts]

        def compute_tile(*tile_inputs: torch.Tensor) -> torch.Tensor:
            with next(forward_contexts):
                return compute(*tile_inputs)

        # Selective recomputation saves the output of all tiles, and no intermediate result inside a tile.
        return tiles.recomputation.once(lambda: _forward(compute_tile, inputs, spans), large=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        tiles: Tiles = ctx.tiles
        inputs = (ctx if ctx.entered is None else ctx.entered).saved_tensors
        first = 5  # number of arguments of `forward` that come before the tensors
        needs_grad = ctx.needs_input_grad[first : first + ctx.count]
        gradients = [torch.empty_like(x) if needs else None for x, needs in zip(inputs, needs_grad, strict=True)]
        with summed_gradients(ctx.module) as weight_gradients:
            for (begin, end), recompute_context in zip(ctx.spans, ctx.recompute_contexts, strict=True):
                tile_inputs = []
                for x, needs in zip(inputs, needs_grad, strict=True):
                    tile_inputs.append(x[begin:end].detach().requires_grad_(needs))
                with (
                    torch.enable_grad(),
                    recompute_context,
                    keep_precision(tiles.precision),
                    tiles.recomputation.for_gradients(),
                ):
                    out = ctx.compute(*tile_inputs)
                torch.autograd.backward(out, grad[begin:end])
                del out
                for gradient, tile_input in zip(gradients, tile_inputs, strict=True):
                    if gradient is not None:
                        gradient[begin:end] = 0 if tile_input.grad is None else tile_input.grad
        return None, None, None, None, None, *gradients, *weight_gradients


@contextmanager
def summed_gradients(module: nn.Module) -> Iterator[list[torch.Tensor | None]]:
    """Context manager: sum the gradients of the trained parameters of `module` over all backward passes inside it.

    Each gradient is added as soon as it is computed, so there is never a second full set of gradients in memory. The
    yielded list has one gradient per trained parameter, in the dtype of the parameter, and is complete after the
    context has ended.
    """
    parameters = [p for p in module.parameters() if p.requires_grad]
    sums: list[torch.Tensor | None] = [None] * len(parameters)
    leaves = {id(p): p.detach().requires_grad_() for p in parameters}

    def gradient_adder(i: int) -> Callable[[torch.Tensor], None]:
        def add(leaf: torch.Tensor) -> None:
            assert leaf.grad is not None
            total = sums[i]
            leaf_grad = leaf.grad
            leaf.grad = None
            if total is None:
                sums[i] = at_least_fp32(leaf_grad)
            else:
                total.add_(leaf_grad)

        return add

    for i, leaf in enumerate(leaves.values()):
        leaf.register_post_accumulate_grad_hook(gradient_adder(i))
    replaced = [
        (owner._parameters, name, p)
        for owner in module.modules()
        for name, p in owner._parameters.items()
        if p is not None and id(p) in leaves
    ]
    for owner_parameters, name, p in replaced:
        owner_parameters[name] = leaves[id(p)]  # type: ignore[assignment]
    try:
        yield sums
    finally:
        for owner_parameters, name, p in replaced:
            owner_parameters[name] = p
    for i, (total, p) in enumerate(zip(sums, parameters, strict=True)):
        sums[i] = None if total is None else total.to(p.dtype)


def is_row_wise(module: nn.Module, width: int) -> bool:
    """Whether `module`, on meta, maps each row of `[1, tokens, width]` to a row of the same width independently.

    The answer is derived from the operators that the module runs. A module that uses random numbers is not row-wise.
    """
    rows = torch.empty(1, ROWS, width, device="meta", dtype=next(module.parameters()).dtype)
    try:
        with torch.no_grad(), _RowWise() as mode:
            out = module.forward(rows)
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError, NotImplementedError, AssertionError):
        return False
    has_same_shape = isinstance(out, torch.Tensor) and out.shape == rows.shape
    return has_same_shape and mode.is_row_wise and mode.num_matmuls > 1


class _RowWise(TorchDispatchMode):
    """Mode that checks whether all operators process each row independently. Unknown operators fail the check."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_row_wise = True
        self.num_matmuls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        inputs = [x for x in tree_leaves((args, kwargs or {})) if isinstance(x, torch.Tensor)]
        outputs = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        if any(_has_rows(x) for x in inputs):
            self.is_row_wise &= all(_has_rows(x) for x in outputs) and _keeps_rows(func, args)
            self.num_matmuls += _operator_name(func) in MATMULS
        return out


def _has_rows(x: torch.Tensor) -> bool:
    """Whether `x` consists of the `ROWS` rows of the test input."""
    return ROWS in x.shape[:-1] and x.shape[:-1].numel() == ROWS


def _operator_name(func: Any) -> str:
    """Return the name of an operator without its namespace and overload, such as "addmm"."""
    return str(func._schema.name).removeprefix("aten::")


def _keeps_rows(func: Any, args: Sequence[Any]) -> bool:
    """Whether the operator is known to compute each row independently."""
    name = _operator_name(func)
    if name in MATMULS:  # rows may be multiplied by weights, but not by other rows
        return sum(_has_rows(x) for x in args if isinstance(x, torch.Tensor)) == 1
    is_random = torch.Tag.nondeterministic_seeded in func.tags
    is_pointwise = torch.Tag.pointwise in func.tags
    return name in ROW_WISE or (is_pointwise and not is_random)
