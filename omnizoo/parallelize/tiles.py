"""Implements `parallel.tile_tokens`: selects the modules that process a few tokens at a time.

Modules are selected by behavior, not by name. They are the experts of MoE layers, and modules inside blocks that map
each token separately with at least two matmuls (a dense feed-forward layer, a shared expert). Routers process all
tokens at once.
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
from omnizoo.parallel.experts import max_over_group
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
    num_tiled = len(experts)
    for name in facts.blocks:
        for module in feed_forwards(model.get_submodule(name), experts):
            forward = module.forward
            if kinds is not None and isinstance(forward, MethodType):
                forward = partial(kinds.kind_of(module, forward.__func__), module)
            # All layers share one function, because a separate partial for each layer would cause a separate compiled
            # graph.
            vars(module)["tiled"] = tiles, forward
            module.forward = MethodType(_tiled_forward, module)
            num_tiled += 1

    max_over_ranks = None
    if mesh.layout.ep > 1:
        max_over_ranks = partial(max_over_group, mesh.group("ep"), mesh.device)
    for module in experts:
        module.tiles = Tiles(tokens, recomputation, precision, max_over_ranks)
    log.info("parallel.tile_tokens: %d feed-forward layers and MoE layers run in tiles of %d tokens", num_tiled, tokens)
    if not num_tiled:
        raise UserError(
            f"parallel.tile_tokens: {tokens} has no effect, because the blocks of {type(model).__name__} have no "
            "feed-forward layer that maps each token separately. Remove the key."
        )


def feed_forwards(module: nn.Module, excluded: Collection[nn.Module]) -> list[nn.Module]:
    """Return the outermost modules inside `module` that can be tiled and are not in `excluded`."""
    tileable: list[nn.Module] = []
    for child in module.children():
        if child in excluded:
            continue
        matrices = [p for p in child.parameters() if p.ndim == 2]
        widths = sorted({size for p in matrices for size in p.shape})
        if len(matrices) > 1 and any(is_row_wise(child, width) for width in widths):
            tileable.append(child)
        else:
            tileable += feed_forwards(child, excluded)
    return tileable


@graph_break
def _tiled_forward(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Run the original forward of a feed-forward layer in tiles. This function replaces the forward."""
    tiles: Tiles
    tiles, forward = module.tiled
    rows = hidden.reshape(-1, hidden.shape[-1])
    if len(rows) <= tiles.tokens:
        out: torch.Tensor = forward(hidden)
        return out

    def compute(tile: torch.Tensor) -> torch.Tensor:
        tile_out: torch.Tensor = forward(tile) if hidden.ndim == 2 else forward(tile.unsqueeze(0)).squeeze(0)
        return tile_out

    return tiles(module, compute, rows).view(hidden.shape)
