"""Repeat placeholder tokens as often as media items need, and map spans of characters to tokens."""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from omnizoo.data.rendering.response_spans import TAGS_HINT
from omnizoo.data.rendering.template_sandbox import Span
from omnizoo.data.row import BadRow
from omnizoo.data.rows.media import MOVED, RowMedia
from omnizoo.modalities.base import Follower, find_module
from omnizoo.modalities.item import Ids, MediaItem, NestedRun, Port
from omnizoo.modalities.media import BadMedia

Positions = npt.NDArray[np.int64]  # indices or lengths of tokens


@dataclass(frozen=True)
class TokenizedText:
    """A tokenized text in which each run of placeholder tokens of a media item is still a single token."""

    text: str
    ids: Ids  # [tokens]
    offsets: list[Span]  # start and stop character of each token
    weights: npt.NDArray[np.float32]  # [tokens], loss weights; 0 for tokens that are not targets


def place(
    tokens: TokenizedText, media: RowMedia, placeholders: Sequence[int], last_ids: Mapping[str, int]
) -> tuple[Ids, npt.NDArray[np.float32], tuple[MediaItem, ...], tuple[Span, ...]]:
    """Repeat each placeholder token to the length of its run, and set the spans of the items.

    Tokens inside an item are not text targets: the decoder of the item predicts its placeholder tokens, and nothing
    predicts the text between them (`MediaSize.layout`). The begin and end marks are ordinary text.

    Args:
        tokens: The tokenized text. Its weights are changed in place.
        media: The items of the row and their texts.
        placeholders: Ids of the placeholder tokens of all modalities.
        last_ids: Id of the last placeholder token of an item, for modalities in which it differs from the others.

    Returns:
        The token ids `[tokens]`, the loss weights `[tokens]`, the items with their spans, and for each item with
        placeholder tokens the range of its tokens, from its begin mark to its end mark.

    Raises:
        BadRow: If an item cannot be a target at its position, or if a placeholder occurs outside the message contents.
    """
    ids = tokens.ids
    weights = tokens.weights
    is_placeholder = np.isin(ids, placeholders)
    if not media.items and not is_placeholder.any():
        return ids, weights, (), ()

    lengths = np.ones(len(ids), np.int64)  # number of tokens that each token expands to
    positioned: list[tuple[MediaItem, Positions]] = []  # each item with the positions of its runs
    with_marks, without_marks = _tokens_of_items(tokens, media)
    ranges = iter(without_marks)
    for item in media.items:
        if item.answer is not None:  # a follower has no placeholder tokens
            positioned.append((item, np.empty(0, np.int64)))
            continue
        first, last = next(ranges)
        positions = first + np.flatnonzero(is_placeholder[first:last])
        if item.is_target:
            _check_target(item, positions, weights)
        weights[first:last] = 0
        positioned += _place_runs(item, positions, lengths)
    if is_placeholder.sum() != sum(len(positions) for _, positions in positioned):
        raise BadRow("a media placeholder occurs outside the message contents (in `tools` or a name). Remove it.")

    starts = np.cumsum(lengths) - lengths
    stops = starts + lengths
    items = tuple(_with_spans(item, positions, starts, lengths) for item, positions in positioned)
    item_spans = tuple((int(starts[first]), int(stops[last - 1])) for first, last in with_marks)
    ids = np.repeat(ids, lengths)
    for item in items:
        if item.spans and item.port.modality in last_ids:
            ids[sum(item.spans[-1]) - 1] = last_ids[item.port.modality]
    return ids, np.repeat(weights, lengths), items, item_spans


def _with_spans(item: MediaItem, positions: Positions, starts: Positions, lengths: Positions) -> MediaItem:
    """Return an item with the spans of its runs, except empty ones.

    Args:
        item: The item.
        positions: Indices of its placeholder tokens before they are repeated.
        starts: First token after the repetition, for each token before it.
        lengths: Number of tokens after the repetition, for each token before it.
    """
    spans = [(int(starts[position]), int(lengths[position])) for position in positions if lengths[position]]
    return replace(item, spans=tuple(spans))


def _check_target(item: MediaItem, positions: Positions, weights: npt.NDArray[np.float32]) -> None:
    """Raise `BadRow` if an item cannot be a target at the position of its placeholder tokens."""
    name = item.media.name
    if positions[0] == 0:
        raise BadRow(
            f"{name} is the first token of the sample, so it cannot be predicted. Set a begin mark for the modality."
        )
    if not weights[positions].all():
        raise BadRow(f"{name} is a target, but the chat template writes it outside the response. {TAGS_HINT}")
    if (weights[positions] != 1).any():
        raise BadRow(f"{name} is a target with a `weight` other than 0 and 1, which only text targets support")


def _place_runs(item: MediaItem, positions: Positions, lengths: Positions) -> list[tuple[MediaItem, Positions]]:
    """Write the length of each run of an item to `lengths`.

    Args:
        item: The item.
        positions: Indices of the placeholder tokens of its runs.
        lengths: Number of tokens that each token is repeated to. It is changed in place.

    Returns:
        The item and the items nested in it, each with the indices of the placeholder tokens of its runs.
    """
    layout = item.size.layout or (item.size.num_placeholders,)
    runs = [run for run in layout if not isinstance(run, str)]
    assert len(positions) == len(runs), f"{item.port}: {len(positions)} placeholders for the runs {runs}"
    lengths[positions] = [run.num_placeholders if isinstance(run, NestedRun) else run for run in runs]
    modality_of_run = np.array([run.modality if isinstance(run, NestedRun) else "" for run in runs])
    positioned = [(item, positions[modality_of_run == ""])]
    for name, size in item.size.inside.items():
        nested = MediaItem(Port(name, "encoder"), size, (), False, replace(item.media, modality=name))
        positioned.append((nested, positions[modality_of_run == name]))
    return positioned


def locate_followed(ids: Ids, items: tuple[MediaItem, ...], media: RowMedia) -> tuple[MediaItem, ...]:
    """Return the items with the spans of followers. These depend on the spans of all other items."""

    def with_spans(item: MediaItem) -> MediaItem:
        module = find_module(media.notation.modalities, item.port)
        if not isinstance(module, Follower):
            return item
        try:
            return module.locate_item(ids, items, item, media.num_responses)
        except BadMedia as bad:
            raise BadRow(str(bad)) from None

    return tuple(map(with_spans, items))


def _tokens_of_items(tokens: TokenizedText, media: RowMedia) -> tuple[list[Span], list[Span]]:
    """Return the token ranges of all items with placeholder tokens: with their begin and end marks, and without."""
    with_marks = []
    without_marks = []
    stop = 0
    for item, item_text in zip(media.items, media.texts, strict=True):
        if item.answer is not None:
            continue
        start = tokens.text.find(item_text, stop)
        if start < 0:
            raise BadRow(MOVED.format(name=item.media.name))
        stop = start + len(item_text)
        modality = media.notation.modalities[item.media.modality]
        with_marks.append((start, stop))
        without_marks.append((start + len(modality.begin), stop - len(modality.end)))
    if not without_marks:
        return [], []

    # Special tokens that the tokenizer adds have the offsets (0, 0), even at the end. Make the offsets increasing.
    increasing = np.maximum.accumulate(np.array(tokens.offsets), axis=0)
    offsets = [(int(start), int(stop)) for start, stop in increasing]
    return tokens_of_spans(offsets, with_marks), tokens_of_spans(offsets, without_marks)


def tokens_of_spans(offsets: list[Span], spans: list[Span]) -> list[Span]:
    """Return the range of tokens that overlap each span of characters. Empty spans are omitted.

    Offsets may exclude the white space before a token, and several tokens may encode one character. Each token is
    therefore treated as if it began where the previous token ends, unless it begins earlier.

    Args:
        offsets: The first character and the stop of each token.
        spans: The first character and the stop of each span.
    """

    def begin(token: int) -> int:
        return min(offsets[token][0], offsets[token - 1][1] if token else 0)

    ranges = []
    for start, stop in spans:
        if start < stop:
            first = bisect_right(offsets, start, key=lambda offset: offset[1])
            last = bisect_left(range(len(offsets)), stop, key=begin)
            ranges.append((first, last))
    return ranges
