"""Media items get their places among the tokens of a text, and spans of characters their tokens."""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from omnizoo.data.chat_template import TAGS_HINT, Span
from omnizoo.data.row_media import MOVED, RowMedia
from omnizoo.data.rows import BadRow
from omnizoo.modalities.base import Follower, Inside, Item, Modality, Port
from omnizoo.modalities.item import BadMedia
from omnizoo.models.media_model import Ids


@dataclass(frozen=True)
class Tokens:
    """A text and what the tokenizer made of it, with one token for each run of an item's places."""

    text: str
    ids: Ids
    offsets: list[Span]
    weights: npt.NDArray[np.float32]  # of the loss on each; 0: no target


def place(
    tokens: Tokens,
    media: RowMedia,
    placeholders: Sequence[int],
    modalities: Mapping[str, Modality],
    last_ids: Mapping[str, int],
) -> tuple[Ids, npt.NDArray[np.float32], tuple[Item, ...], tuple[Span, ...]]:
    """Repeat placeholders to the length of their runs, and tell items where they are, also with their marks.

    Nothing inside of an item is a target of the text: its places are its decoder's, what stands between them
    (`Size`) nobody predicts. Begin and end are text like any other. `last_ids`: of modalities whose last place has an
    id of its own.
    """
    ids, weights = tokens.ids, tokens.weights
    is_place = np.isin(ids, placeholders)
    if not media.items and not is_place.any():
        return ids, weights, (), ()
    lengths = np.ones(len(ids), np.int64)
    placed: list[tuple[Item, npt.NDArray[np.int64]]] = []
    whole, inner = _tokens_of_items(tokens, media, modalities)
    ranges = iter(inner)
    for item in media.items:
        if item.answer is not None:  # a follower's
            placed.append((item, np.empty(0, np.int64)))
            continue
        first, last = next(ranges)
        runs = [run for run in item.size.layout or (item.size.places,) if not isinstance(run, str)]
        own = first + np.flatnonzero(is_place[first:last])
        assert len(own) == len(runs), f"{item.port}: {len(own)} placeholders for the runs {runs}"
        if item.is_target and own[0] == 0:
            raise BadRow(f"{item.media.name} comes first, so nothing is there to predict it from: give it a begin")
        if item.is_target and not weights[own].all():
            raise BadRow(f"{item.media.name} is to be produced, but not where the model writes: {TAGS_HINT}")
        if item.is_target and (weights[own] != 1).any():
            raise BadRow(f"{item.media.name} is to be produced: a `weight` other than 0 and 1 is for text only")
        weights[first:last] = 0
        lengths[own] = [run.places if isinstance(run, Inside) else run for run in runs]
        whose = np.array([run.modality if isinstance(run, Inside) else "" for run in runs])
        placed.append((item, own[whose == ""]))
        for name, size in item.size.inside.items():
            part = Item(Port(name, "encoder"), size, (), False, replace(item.media, modality=name))
            placed.append((part, own[whose == name]))
    if is_place.sum() != sum(len(own) for _, own in placed):
        raise BadRow("a media placeholder is in its text outside of the contents (in its tools, or a name)")
    starts = np.cumsum(lengths) - lengths
    items = tuple(
        replace(item, spans=tuple((int(starts[at]), int(lengths[at])) for at in own if lengths[at]))
        for item, own in placed
    )
    extents = tuple((int(starts[first]), int(starts[last - 1] + lengths[last - 1])) for first, last in whole)
    ids = np.repeat(ids, lengths)
    for item in items:
        if item.spans and item.port.modality in last_ids:
            ids[sum(item.spans[-1]) - 1] = last_ids[item.port.modality]
    return ids, np.repeat(weights, lengths), items, extents


def follow(ids: Ids, items: tuple[Item, ...], answers: int, modalities: Mapping[str, Modality]) -> tuple[Item, ...]:
    """Followers look for their places once all others have theirs."""

    def placed(item: Item) -> Item:
        module = item.port.module(modalities)
        if not isinstance(module, Follower):
            return item
        try:
            return module.follow(ids, items, item, answers)
        except BadMedia as bad:
            raise BadRow(str(bad)) from None

    return tuple(map(placed, items))


def _tokens_of_items(
    tokens: Tokens, media: RowMedia, modalities: Mapping[str, Modality]
) -> tuple[list[Span], list[Span]]:
    """Of each item that has places, its range of tokens; and that between its begin and its end."""
    whole, inner, stop = [], [], 0
    for item, written in zip(media.items, media.texts, strict=True):
        if item.answer is not None:
            continue
        start, modality = tokens.text.find(written, stop), modalities[item.media.modality]
        if start < 0:
            raise BadRow(MOVED.format(name=item.media.name))
        stop = start + len(written)
        whole.append((start, stop))
        inner.append((start + len(modality.begin), stop - len(modality.end)))
    if not inner:
        return [], []
    # tokens that the tokenizer puts around a text are said to be at its very beginning
    offsets = [(int(start), int(stop)) for start, stop in np.maximum.accumulate(np.array(tokens.offsets), axis=0)]
    return tokens_of_spans(offsets, whole), tokens_of_spans(offsets, inner)


def tokens_of_spans(offsets: list[Span], spans: list[Span]) -> list[Span]:
    """Ranges of the tokens that have a character in a span.

    Offsets may leave out the white space around a token, and the bytes of one character may be several tokens: a token
    begins where the one before it ends, or earlier.
    """

    def begin(token: int) -> int:
        return min(offsets[token][0], offsets[token - 1][1] if token else 0)

    return [
        (bisect_right(offsets, start, key=lambda offset: offset[1]), bisect_left(range(len(offsets)), stop, key=begin))
        for start, stop in spans
        if start < stop
    ]
