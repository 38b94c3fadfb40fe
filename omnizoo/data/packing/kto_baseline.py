"""Separate the mismatched responses of the KTO baseline from the packs that are trained on.

KTO estimates its KL term from prompts that are paired with responses of other rows (mismatched responses). These are
first packed together with the other responses to the prompt. Before the packs of a step are redistributed, this module
moves them to separate packs. The model processes these packs, without gradients, before the first micro-batch.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import compress

import numpy as np

from omnizoo.data.packing.pack import Pack, dummy_pack
from omnizoo.data.token_fields import select


def split_kto_baseline(packs: Sequence[Pack]) -> tuple[list[Pack], list[Pack]]:
    """Split each pack into one without mismatched responses and one with only mismatched responses.

    Returns:
        The packs to train on, and the packs of the baseline. Both lists have as many packs as `packs`; an empty pack is
        replaced by a dummy pack.
    """
    training = [_select_segments(pack, is_baseline=False) for pack in packs]
    baseline = [_select_segments(pack, is_baseline=True) for pack in packs]
    return training, baseline


def _select_segments(pack: Pack, is_baseline: bool) -> Pack:
    """Return a pack with only the mismatched responses (`is_baseline`) or without them.

    If no response is left, return a dummy pack."""
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
        sources=list(compress(pack.sources, is_kept)),
    )
