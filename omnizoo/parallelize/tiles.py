"""`parallel.tile_tokens`: which modules of a model run a few tokens at a time.

They are detected by behavior, not by name: modules inside blocks that map each token separately and have at least two
matmuls (a dense feed-forward layer, a shared expert), and the experts of MoE layers. Routers process all tokens at
once.
"""

import logging
from collections.abc import Collection
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn

from omnizoo.config.errors import UserError
from omnizoo.models.recipe import ModelFacts
from omnizoo.ops.compiled_blocks import Kinds, graph_break
from omnizoo.ops.memory.tiles import Tiles, is_row_wise
from omnizoo.ops.torch_private import Recomputation
from omnizoo.parallel.experts import most_of
from omnizoo.parallel.mesh import Mesh

log = logging.getLogger(__name__)


def compute_in_tiles(
    model: nn.Module,
    facts: ModelFacts,
    mesh: Mesh,
    tokens: int,
    precision: str,
    recomputation: Recomputation,
    kinds: Kinds | None = None,
) -> None:
    """Tile the feed-forward layers and experts of `model` (on meta).

    Must be called before blocks are recomputed or sharded. If `kinds` is set, the content of a tile is compiled.
    """
    tiles = Tiles(tokens, recomputation, precision)
    experts: set[Any] = {model.get_submodule(name) for name in facts.experts}
    found = len(experts)
    for name in facts.blocks:
        for module in feed_forwards(model.get_submodule(name), experts):
            own = module.forward
            if kinds is not None and isinstance(own, MethodType):
                own = partial(kinds.of(module, own.__func__), module)
            # All layers share one function: with a partial per layer, each layer would have a separate compiled graph.
            vars(module)["tiled"] = tiles, own
            module.forward = MethodType(_forward, module)
            found += 1
    agree = partial(most_of, mesh.group("ep"), mesh.device) if mesh.layout.ep > 1 else None
    for module in experts:
        module.tiles = Tiles(tokens, recomputation, precision, agree)
    log.info("%d feed-forwards and layers of experts compute in tiles of %d tokens", found, tokens)
    if not found:
        raise UserError(
            f"parallel.tile_tokens: {tokens}, but the blocks of {type(model).__name__} have no feed-forward that maps "
            "each token by itself; leave it out"
        )


def feed_forwards(module: nn.Module, apart: Collection[nn.Module]) -> list[nn.Module]:
    """Return the outermost modules inside `module` that can be tiled, except those in `apart`."""
    found: list[nn.Module] = []
    for child in module.children():
        if child in apart:
            continue
        matrices = [p for p in child.parameters() if p.ndim == 2]
        widths = sorted({size for p in matrices for size in p.shape})
        if len(matrices) > 1 and any(is_row_wise(child, width) for width in widths):
            found.append(child)
        else:
            found += feed_forwards(child, apart)
    return found


@graph_break
def _forward(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    tiles: Tiles
    tiles, whole = module.tiled
    rows = hidden.reshape(-1, hidden.shape[-1])
    if len(rows) <= tiles.tokens:
        out: torch.Tensor = whole(hidden)
        return out

    def compute(piece: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = whole(piece) if hidden.ndim == 2 else whole(piece.unsqueeze(0)).squeeze(0)
        return made

    return tiles(module, compute, rows).view(hidden.shape)
