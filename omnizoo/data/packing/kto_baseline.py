"""The KTO baseline: prompts paired with mismatched responses from other rows, to estimate the KL term.

Mismatched responses are packed together with the other responses to the prompt. They are moved to packs of their own
before the packs of a step are redistributed. The model processes all of them, without gradients, before it trains on
the first micro-batch.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import compress

import numpy as np

from omnizoo.data.packing.pack import Pack, dummy_pack
from omnizoo.data.token_fields import select


def split_kto_baseline(packs: Sequence[Pack]) -> tuple[list[Pack], list[Pack]]:
    """Return the packs without mismatched responses, and the same number of packs with only mismatched responses."""
    training = [_select_segments(pack, is_baseline=False) for pack in packs]
    baseline = [_select_segments(pack, is_baseline=True) for pack in packs]
    return training, baseline


def _select_segments(pack: Pack, is_baseline: bool) -> Pack:
    """Return the pack with mismatched responses only, or without them. If no segment is left, return a dummy pack."""
    if pack.preferences is None:
        return dummy_pack(pack.index) if is_baseline else pack
    is_kept = [(role == "mismatched") == is_baseline for role in pack.preferences.roles]
    if not any(is_kept):
        return dummy_pack(pack.index)
    is_token_kept = np.repeat(is_kept, pack.lengths)
    new_index = np.cumsum(is_token_kept) - 1
    items = []
    for item in pack.items:
        kept_spans = [(first, count) for first, count in item.spans if is_token_kept[first]]
        spans = tuple((int(new_index[first]), count) for first, count in kept_spans)
        if spans or not item.spans:
            items.append(replace(item, spans=spans))
    return replace(
        pack,
        columns=select(pack.columns, is_token_kept),
        lengths=list(compress(pack.lengths, is_kept)),
        sample_ids=list(compress(pack.sample_ids, is_kept)),
        items=tuple(items),
        preferences=pack.preferences.select(is_kept),
    )
