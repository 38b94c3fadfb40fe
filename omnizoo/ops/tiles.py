"""Row-wise work in tiles of the sequence: what it keeps in memory does not grow with the pack.

Forward keeps the rows that go in, and nothing of what happens inside. Backward computes one tile again, takes its
gradients, and goes on to the next. Gradients of weights are added up in place, in at least fp32.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from omnizoo.ops.precision import exact
from omnizoo.ops.torch_private import Recomputation, TorchDispatchMode, both, tree_leaves

ROWS = 13  # of the trial; no width of a model
SHAPES = {"view", "_unsafe_view", "reshape", "alias", "detach", "clone", "_to_copy", "unsqueeze", "squeeze", "expand"}
MATMULS = {"mm", "addmm", "bmm"}
SPLITS = {"split", "slice", "chunk", "split_with_sizes", "select"}
REDUCTIONS = {"mean", "sum", "var_mean", "_fused_rms_norm", "native_layer_norm"}  # by shape, over the width


@dataclass(frozen=True)
class Tiles:
    """How a module's rows are cut: `Tiles(...)(module, compute, rows, ...)` in the place of `compute(rows, ...)`."""

    tokens: int  # of a tile, at most
    recomputation: Recomputation
    precision: str
    agree: Callable[[int], int] | None = None  # for work with exchanges: this rank's number of tiles -> all ranks'

    def __call__(
        self, module: nn.Module, compute: Callable[..., torch.Tensor], rows: torch.Tensor, *others: torch.Tensor
    ) -> torch.Tensor:
        """`compute(rows, *others)`, of tensors that have as many rows, with weights of `module`: each row of what it
        gives must depend on the same row of what goes in, and on nothing else."""
        count = -(-len(rows) // self.tokens)
        if self.agree is not None:
            count = self.recomputation.once(lambda: self.agree(count))  # type: ignore[misc]
        if count <= 1:
            return compute(rows, *others)
        spans = [(i * self.tokens, (i + 1) * self.tokens) for i in range(count)]
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
    out: torch.Tensor | None = None
    for begin, end in spans:
        piece = compute(*(x[begin:end] for x in inputs))
        if out is None:
            out = piece.new_empty(len(inputs[0]), *piece.shape[1:])
        out[begin:end] = piece
    assert out is not None
    return out


class _Enter(torch.autograd.Function):
    """Keeps what goes into the tiles, before they are computed: recomputation of the block around ends here."""

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
        ctx.tiles, ctx.module, ctx.compute, ctx.spans, ctx.count = tiles, module, compute, spans, count
        ctx.entered = next((x.grad_fn for x in inputs if x.grad_fn is not None), None)
        if ctx.entered is None:
            ctx.save_for_backward(*inputs)
        contexts = [tiles.recomputation.contexts(None) for _ in spans]
        ctx.again = [again for _, again in contexts]
        firsts = iter([first for first, _ in contexts])

        def within(*pieces: torch.Tensor) -> torch.Tensor:
            with next(firsts):
                return compute(*pieces)

        # Selective recomputation keeps what comes of all tiles, and nothing that they are made of.
        return tiles.recomputation.once(lambda: _forward(within, inputs, spans), large=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        tiles: Tiles = ctx.tiles
        inputs = (ctx if ctx.entered is None else ctx.entered).saved_tensors
        first = 5  # arguments before the tensors
        needed = ctx.needs_input_grad[first : first + ctx.count]
        gradients = [torch.empty_like(x) if need else None for x, need in zip(inputs, needed, strict=True)]
        with collected(ctx.module) as weights:
            for (begin, end), again in zip(ctx.spans, ctx.again, strict=True):
                pieces = [x[begin:end].detach().requires_grad_(need) for x, need in zip(inputs, needed, strict=True)]
                with torch.enable_grad(), both(again, exact(tiles.precision)), tiles.recomputation.for_gradients():
                    out = ctx.compute(*pieces)
                torch.autograd.backward(out, grad[begin:end])
                del out
                for whole, piece in zip(gradients, pieces, strict=True):
                    if whole is not None:
                        whole[begin:end] = 0 if piece.grad is None else piece.grad
        return None, None, None, None, None, *gradients, *weights


@contextmanager
def collected(module: nn.Module) -> Iterator[list[torch.Tensor | None]]:
    """Gradients of the trained parameters of `module`, added up over all backward passes inside; complete at its end.

    Each is added as soon as it is made, so no second set of them is ever there.
    """
    parameters = [p for p in module.parameters() if p.requires_grad]
    sums: list[torch.Tensor | None] = [None] * len(parameters)
    leaves = {id(p): p.detach().requires_grad_() for p in parameters}

    def adder(i: int) -> Callable[[torch.Tensor], None]:
        def add(leaf: torch.Tensor) -> None:
            assert leaf.grad is not None
            before, leaf_grad = sums[i], leaf.grad
            leaf.grad = None
            if before is None:
                sums[i] = leaf_grad.to(torch.promote_types(leaf_grad.dtype, torch.float32))
            else:
                before.add_(leaf_grad)

        return add

    for i, leaf in enumerate(leaves.values()):
        leaf.register_post_accumulate_grad_hook(adder(i))
    places = [
        (owner._parameters, name, p)
        for owner in module.modules()
        for name, p in owner._parameters.items()
        if p is not None and id(p) in leaves
    ]
    for own, name, p in places:
        own[name] = leaves[id(p)]  # type: ignore[assignment]
    try:
        yield sums
    finally:
        for own, name, p in places:
            own[name] = p
    for i, (total, p) in enumerate(zip(sums, parameters, strict=True)):
        sums[i] = None if total is None else total.to(p.dtype)


def is_row_wise(module: nn.Module, width: int) -> bool:
    """Whether `module` (on meta) maps rows `[1, T, width]` to rows of the same width, each by itself: seen by the
    operators that it runs. One that draws random numbers is not taken either."""
    rows = torch.empty(1, ROWS, width, device="meta", dtype=next(module.parameters()).dtype)
    try:
        with torch.no_grad(), _RowWise() as watched:
            out = module.forward(rows)
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError, NotImplementedError, AssertionError):
        return False
    return isinstance(out, torch.Tensor) and out.shape == rows.shape and watched.holds and watched.matmuls > 1


class _RowWise(TorchDispatchMode):
    """Notes whether an operator mixes rows of tensors that have them, or is none of those that are known not to."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.holds, self.matmuls = True, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        inputs, outputs = (
            [x for x in tree_leaves(each) if isinstance(x, torch.Tensor)] for each in ((args, kwargs or {}), out)
        )
        if any(_has_rows(x) for x in inputs):
            self.holds &= all(_has_rows(x) for x in outputs) and _keeps_rows(func, args)
            self.matmuls += _name(func) in MATMULS
        return out


def _has_rows(x: torch.Tensor) -> bool:
    return ROWS in x.shape[:-1] and x.shape[:-1].numel() == ROWS


def _name(func: Any) -> str:
    return str(func._schema.name).removeprefix("aten::")


def _keeps_rows(func: Any, args: Sequence[Any]) -> bool:
    name = _name(func)
    if name in MATMULS:  # of rows with weights, not with other rows
        return sum(_has_rows(x) for x in args if isinstance(x, torch.Tensor)) == 1
    random = torch.Tag.nondeterministic_seeded in func.tags
    return name in SHAPES | SPLITS | REDUCTIONS or (torch.Tag.pointwise in func.tags and not random)
