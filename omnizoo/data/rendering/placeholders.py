"""Expand placeholder tokens to the size of media items, and map spans of characters to tokens."""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from omnizoo.data.rendering.chat_template import TAGS_HINT, Span
from omnizoo.data.row import BadRow
from omnizoo.data.rows.media import MOVED, RowMedia
from omnizoo.modalities.base import Follower, find_module
from omnizoo.modalities.item import Ids, MediaItem, NestedRun, Port
from omnizoo.modalities.media import BadMedia


@dataclass(frozen=True)
class TokenizedText:
    """A tokenized text, with one placeholder token for each run of a media item."""

    text: str
    ids: Ids  # [tokens]
    offsets: list[Span]  # start and stop character of each token
    weights: npt.NDArray[np.float32]  # [tokens], loss weights; 0 for tokens that are not targets


def place(
    tokens: TokenizedText, media: RowMedia, placeholders: Sequence[int], last_ids: Mapping[str, int]
) -> tuple[Ids, npt.NDArray[np.float32], tuple[MediaItem, ...], tuple[Span, ...]]:
    """Repeat each placeholder token to the length of its run, and set the spans of the items.

    Tokens inside an item are no text targets: the decoder of the item predicts its placeholder tokens, and the text
    between them (`MediaSize.layout`) is not predicted. The begin and end markers are ordinary text. The weights in
    `tokens` are modified.

    Args:
        tokens: The tokenized text.
        media: The items of the row and their texts.
        placeholders: Ids of the placeholder tokens of all modalities.
        last_ids: Id of the last placeholder token of an item, for modalities where it differs from the others.

    Returns:
        The token ids `[tokens]`, the loss weights `[tokens]`, the items with their spans, and the [start, stop) tokens
        of each item with its markers.

    Raises:
        BadRow: If an item cannot be a target at its position, or a placeholder occurs outside the message contents.
    """
    ids, weights = tokens.ids, tokens.weights
    is_place = np.isin(ids, placeholders)
    if not media.items and not is_place.any():
        return ids, weights, (), ()
    lengths = np.ones(len(ids), np.int64)
    placed: list[tuple[MediaItem, npt.NDArray[np.int64]]] = []
    whole, inner = _tokens_of_items(tokens, media)
    ranges = iter(inner)
    for item in media.items:
        if item.answer is not None:  # a follower has no placeholder tokens
            placed.append((item, np.empty(0, np.int64)))
            continue
        first, last = next(ranges)
        positions = first + np.flatnonzero(is_place[first:last])
        if item.is_target:
            _check_target(item, positions, weights)
        weights[first:last] = 0
        placed += _place_runs(item, positions, lengths)
    if is_place.sum() != sum(len(positions) for _, positions in placed):
        raise BadRow("a media placeholder is in its text outside of the contents (in its tools, or a name)")

    starts = np.cumsum(lengths) - lengths
    items = tuple(
        replace(item, spans=tuple((int(starts[at]), int(lengths[at])) for at in positions if lengths[at]))
        for item, positions in placed
    )
    extents = tuple((int(starts[first]), int(starts[last - 1] + lengths[last - 1])) for first, last in whole)
    ids = np.repeat(ids, lengths)
    for item in items:
        if item.spans and item.port.modality in last_ids:
            ids[sum(item.spans[-1]) - 1] = last_ids[item.port.modality]
    return ids, np.repeat(weights, lengths), items, extents


def _check_target(item: MediaItem, positions: npt.NDArray[np.int64], weights: npt.NDArray[np.float32]) -> None:
    """Check that the model can generate an item at its placeholder tokens. Raises `BadRow` otherwise."""
    if positions[0] == 0:
        raise BadRow(f"{item.media.name} comes first, so nothing is there to predict it from: give it a begin")
    if not weights[positions].all():
        raise BadRow(f"{item.media.name} is to be produced, but not where the model writes: {TAGS_HINT}")
    if (weights[positions] != 1).any():
        raise BadRow(f"{item.media.name} is to be produced: a `weight` other than 0 and 1 is for text only")


def _place_runs(
    item: MediaItem, positions: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
) -> list[tuple[MediaItem, npt.NDArray[np.int64]]]:
    """Write the length of each run of an item to `lengths`.

    Returns:
        The item and the items nested in it, each with the positions of its runs.
    """
    runs = [run for run in item.size.layout or (item.size.num_placeholders,) if not isinstance(run, str)]
    assert len(positions) == len(runs), f"{item.port}: {len(positions)} placeholders for the runs {runs}"
    lengths[positions] = [run.num_placeholders if isinstance(run, NestedRun) else run for run in runs]
    modality_of_run = np.array([run.modality if isinstance(run, NestedRun) else "" for run in runs])
    placed = [(item, positions[modality_of_run == ""])]
    for name, size in item.size.inside.items():
        nested = MediaItem(Port(name, "encoder"), size, (), False, replace(item.media, modality=name))
        placed.append((nested, positions[modality_of_run == name]))
    return placed


def follow(ids: Ids, items: tuple[MediaItem, ...], media: RowMedia) -> tuple[MediaItem, ...]:
    """Return the items with the spans of followers set, which depend on the spans of all other items."""

    def placed(item: MediaItem) -> MediaItem:
        module = find_module(media.notation.modalities, item.port)
        if not isinstance(module, Follower):
            return item
        try:
            return module.locate_item(ids, items, item, media.answers)
        except BadMedia as bad:
            raise BadRow(str(bad)) from None

    return tuple(map(placed, items))


def _tokens_of_items(tokens: TokenizedText, media: RowMedia) -> tuple[list[Span], list[Span]]:
    """Return the token range of each item with placeholder tokens: with its begin and end markers, and without them."""
    whole, inner, stop = [], [], 0
    for item, written in zip(media.items, media.texts, strict=True):
        if item.answer is not None:
            continue
        start, modality = tokens.text.find(written, stop), media.notation.modalities[item.media.modality]
        if start < 0:
            raise BadRow(MOVED.format(name=item.media.name))
        stop = start + len(written)
        whole.append((start, stop))
        inner.append((start + len(modality.begin), stop - len(modality.end)))
    if not inner:
        return [], []
    # Special tokens that the tokenizer adds have offsets (0, 0), also at the end. Make the offsets monotonic.
    offsets = [(int(start), int(stop)) for start, stop in np.maximum.accumulate(np.array(tokens.offsets), axis=0)]
    return tokens_of_spans(offsets, whole), tokens_of_spans(offsets, inner)


def tokens_of_spans(offsets: list[Span], spans: list[Span]) -> list[Span]:
    """Return the range of tokens that overlap each span of characters. Empty spans are left out.

    Offsets may exclude white space around a token, and one character may consist of several tokens. Therefore a token
    is taken to begin where the previous token ends, or earlier.
    """

    def begin(token: int) -> int:
        return min(offsets[token][0], offsets[token - 1][1] if token else 0)

    return [
        (bisect_right(offsets, start, key=lambda offset: offset[1]), bisect_left(range(len(offsets)), stop, key=begin))
        for start, stop in spans
        if start < stop
    ]
