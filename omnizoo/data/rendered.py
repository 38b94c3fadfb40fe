"""A row as the model sees it: token ids, the tokens the loss is on, media items; or several answers to one prompt."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from omnizoo.data.rows import BadRow
from omnizoo.modalities.base import Item
from omnizoo.models.media_model import Ids

# What an answer of a row with preferences is. A mismatched one is the answer to another row's prompt.
ROLES = ("chosen", "rejected", "desirable", "undesirable", "mismatched")
LEARNT = ("chosen", "desirable")  # by losses of single tokens, such as cross entropy
Answers = tuple[tuple[str, int], ...]  # of each: its role, and how many tokens it has with its prompt


@dataclass(frozen=True)
class Rendered:
    ids: Ids
    targets: npt.NDArray[np.bool_]  # the loss is on predicting these tokens
    items: tuple[Item, ...] = ()
    positions: npt.NDArray[Any] | None = None  # [R, L]
    weights: npt.NDArray[np.float32] | None = None  # of the loss on each token; None: 1
    answers: Answers = ()  # of a row with preferences, in order; each has a copy of the prompt before it
    format: str = ""  # what the row was taken as
    is_prose: bool = False  # a text, all of which is learnt: it may be cut anywhere
    extents: tuple[tuple[int, int], ...] = ()  # of each item, with its marks: first token, and the one after its last
    of_prompt: int = 0  # of an answer with its prompt: so many of the items, the first ones, are the prompt's


def join_answers(sides: Sequence[tuple[str, Rendered]], learns: bool = True) -> Rendered:
    """Rows with one prompt as one row, in which media of the prompt are at several places: they are encoded once.

    The weights are for losses of single tokens (cross entropy): these are on good answers only. So are the losses of
    decoders, if such losses are on answers at all (`learns`).
    """
    starts = np.cumsum([0, *(len(side.ids) for _, side in sides)]).tolist()
    for _, side in sides:
        if side.weights is not None:
            raise BadRow("a preference pair has no weights; a message of it has a `weight` other than 0 and 1")
    shared, own = [], []
    for (role, side), start in zip(sides, starts, strict=False):
        is_learnt = learns and role in LEARNT
        items = [item.moved(start, is_learnt=is_learnt) for item in side.items]
        shared.append(items[: side.of_prompt])
        own += items[side.of_prompt :]
    sizes = [[item.size for item in items] for items in shared]
    assert all(each == sizes[0] for each in sizes), "one prompt, the same media"
    positions = [side.positions for _, side in sides if side.positions is not None]
    learnt = [side.targets.astype(np.float32) * (role in LEARNT) for role, side in sides]
    return Rendered(
        ids=np.concatenate([side.ids for _, side in sides]),
        targets=np.concatenate([side.targets for _, side in sides]),
        items=(*(_at_all_places(copies) for copies in zip(*shared, strict=True)), *own),
        positions=np.concatenate(positions, axis=1) if positions else None,
        weights=np.concatenate(learnt),
        answers=tuple((role, len(side.ids)) for role, side in sides),
        format="preference",
    )


def _at_all_places(copies: Sequence[Item]) -> Item:
    return replace(copies[0], spans=tuple(span for item in copies for span in item.spans))
