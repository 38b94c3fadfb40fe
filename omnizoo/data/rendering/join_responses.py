"""Join the responses of a preference row, each rendered with the prompt, into one rendered row."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from omnizoo.data.row import BadRow
from omnizoo.data.sample import TRAINED_ROLES, RenderedRow, Segment
from omnizoo.data.token_fields import concatenate
from omnizoo.modalities.item import MediaItem


def join_responses(responses: Sequence[tuple[str, RenderedRow]], trains_decoders: bool = True) -> RenderedRow:
    """Join rendered responses that share a prompt.

    The result contains a copy of the prompt for each response. A media item of the prompt is encoded only once: it has
    a span in each copy. Per-token losses, such as cross entropy, train only on responses in `TRAINED_ROLES`, so the
    loss weights of other responses are 0.

    Args:
        responses: Role of each response, and the response rendered with its prompt.
        trains_decoders: Whether decoder losses train on the responses in `TRAINED_ROLES`.

    Returns:
        One row with a segment for each response.

    Raises:
        BadRow: If the loss weight of a message is neither 0 nor 1.
    """
    prompt_items: list[list[MediaItem]] = []
    response_items: list[MediaItem] = []
    parts = []
    start = 0
    for role, row in responses:
        if "loss_weights" in row.columns:
            raise BadRow("a message has a `weight` other than 0 and 1, which preference rows do not support")
        is_trained = role in TRAINED_ROLES
        items = [item.moved(start, has_targets=trains_decoders and is_trained) for item in row.items]
        prompt_items.append(items[: row.num_prompt_items])
        response_items += items[row.num_prompt_items :]
        parts.append({**row.columns, "loss_weights": row.is_target.astype(np.float32) * is_trained})
        start += len(row)

    copies_of_items = list(zip(*prompt_items, strict=True))
    for copies in copies_of_items:
        assert all(copy.size == copies[0].size for copy in copies), "all responses have the media of one prompt"
    shared_items = [_join_spans(copies) for copies in copies_of_items]
    return RenderedRow(
        concatenate(parts),
        (*shared_items, *response_items),
        tuple(Segment(role, len(row)) for role, row in responses),
        "preference",
    )


def _join_spans(copies: Sequence[MediaItem]) -> MediaItem:
    """Return one item with the spans of all its copies."""
    return replace(copies[0], spans=tuple(span for item in copies for span in item.spans))
