"""Join the KV caches of several conversations to one cache with padding on the left, and split this cache again.

Only caches of attention layers can be joined. The cache classes come from transformers. Its `generate` also pads on the
left, but has no function to join caches, because it processes all prompts of a batch at once.
"""

from collections.abc import Sequence
from copy import copy
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer


def can_join(cache: DynamicCache) -> bool:
    """Whether all layers of a cache have keys and values with one position per token."""
    return all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers)


def join_caches(caches: Sequence[DynamicCache], length: int) -> DynamicCache:
    """Return a cache with the rows of all `caches`, each padded on the left to `length` positions."""
    aligned = [resized(cache, length) for cache in caches]
    joined = aligned[0]
    for layers in zip(*(cache.layers for cache in aligned), strict=True):
        _join_layers(layers)
    return joined


def row_of(cache: DynamicCache, row: int, length: int) -> DynamicCache:
    """Return the last `length` positions of one row as a separate cache. This removes the padding of the row."""
    return resized(cache, length, [row])


def resized(cache: DynamicCache, length: int, rows: Sequence[int] | None = None) -> DynamicCache:
    """Return a copy of a cache with `length` positions. Padding is added or removed on the left.

    Args:
        cache: The cache. It is not changed.
        length: Number of positions.
        rows: Indices of the rows to keep; None keeps all rows.
    """
    result = copy(cache)
    result.layers = [_resized_layer(layer, length, rows) for layer in cache.layers]
    return result


def _resized_layer(layer: Any, length: int, rows: Sequence[int] | None) -> Any:
    """Return a cache layer with `length` positions, or with the newest ones if a sliding window limits their number."""
    result = copy(layer)
    if not layer.is_initialized:
        return result
    num_positions = length
    if isinstance(layer, DynamicSlidingWindowLayer):
        num_positions = min(length, layer.sliding_window - 1)
        result.cumulative_length = length
    for name in ("keys", "values"):
        states = getattr(layer, name)
        if rows is not None:
            states = states[list(rows)]
        setattr(result, name, pad(states, (0, 0, num_positions - states.shape[-2], 0)))
    return result


def _join_layers(layers: Sequence[Any]) -> None:
    """Append keys and values `[rows, heads, positions, width]` of all other layers to the first layer."""
    if layers[0].is_initialized:  # False for layers that use the keys and values of another layer
        layers[0].keys = torch.cat([layer.keys for layer in layers])
        layers[0].values = torch.cat([layer.values for layer in layers])
