"""A row as the model sees it: token ids, the tokens the loss is on, media items; or two of them, a preference pair."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from omnizoo.data.rows import BadRow
from omnizoo.modalities.base import Item
from omnizoo.models.media_model import Ids


@dataclass(frozen=True)
class Rendered:
    ids: Ids
    targets: npt.NDArray[np.bool_]  # the loss is on predicting these tokens
    items: tuple[Item, ...] = ()
    positions: npt.NDArray[Any] | None = None  # [R, L]
    weights: npt.NDArray[np.float32] | None = None  # of the loss on each token; None: 1
    first: int = 0  # of a preference pair: how many tokens are of the chosen half; 0: it is no pair


def pair_of(chosen: Rendered, rejected: Rendered) -> Rendered:
    """Two rows with one prompt as one, in which media of the prompt are at two places: they are encoded once.

    The weights are for losses of single tokens (cross entropy): these are on the chosen half only.
    """
    first = len(chosen.ids)
    for half in (chosen, rejected):
        if half.weights is not None:
            raise BadRow("a preference pair has no weights; a message of it has a `weight` other than 0 and 1")
        begins = int(half.targets.argmax())
        if any(start + count > begins for item in half.items for start, count in item.spans):
            raise BadRow("media in the answers of a preference pair are not supported yet, only in its prompt")
    assert [item.size for item in chosen.items] == [item.size for item in rejected.items], "one prompt, the same media"
    both = zip(chosen.items, rejected.items, strict=True)
    targets = np.concatenate([chosen.targets, rejected.targets])
    weights = targets.astype(np.float32)
    weights[first:] = 0
    positions = [half.positions for half in (chosen, rejected) if half.positions is not None]
    return Rendered(
        ids=np.concatenate([chosen.ids, rejected.ids]),
        targets=targets,
        items=tuple(replace(one, spans=one.spans + other.moved(first).spans) for one, other in both),
        positions=np.concatenate(positions, axis=1) if positions else None,
        weights=weights,
        first=first,
    )
