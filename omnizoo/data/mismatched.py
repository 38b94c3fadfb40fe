"""Prompts with the answers of other rows, by which a loss learns how far the model has moved as a whole.

They are packed next to the row's own answers, and taken apart before a step is dealt out: the model reads all of them,
without gradients, before it trains on the first pack.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import compress

import numpy as np

from omnizoo.data.flat_pack import FlatPack, filler


def apart(packs: Sequence[FlatPack]) -> tuple[list[FlatPack], list[FlatPack]]:
    """The packs without mismatched answers, and as many packs of these alone."""
    own = [_only(pack, lambda role: role != "mismatched") for pack in packs]
    return own, [_only(pack, lambda role: role == "mismatched") for pack in packs]


def _only(pack: FlatPack, wanted: Callable[[str], bool]) -> FlatPack:
    """The samples with such roles."""
    kept = [wanted(role) for role in pack.roles or [""] * len(pack.lengths)]
    if not pack.sample_ids or not any(kept):
        return filler(pack.index)
    tokens = np.repeat(kept, pack.lengths)
    place = np.cumsum(tokens) - 1
    items = []
    for item in pack.items:
        spans = tuple((int(place[first]), count) for first, count in item.spans if tokens[first])
        if spans or not item.spans:
            items.append(replace(item, spans=spans))
    return replace(
        pack,
        ids=pack.ids[tokens],
        labels=pack.labels[tokens],
        lengths=list(compress(pack.lengths, kept)),
        sample_ids=list(compress(pack.sample_ids, kept)),
        positions=None if pack.positions is None else pack.positions[:, tokens],
        items=tuple(items),
        weights=None if pack.weights is None else pack.weights[tokens],
        roles=list(compress(pack.roles, kept)),
        keys=list(compress(pack.keys, kept)),
        extra={name: numbers[tokens] for name, numbers in pack.extra.items()},
    )
