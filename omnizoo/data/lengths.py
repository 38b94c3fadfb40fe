"""What becomes of a row that does not fit a pack: cut off at its end, left out, or cut into pieces (`data.overlong`).

A text may be cut anywhere. Of a chat, or whatever else has a prompt, pieces without an answer would teach nothing, so
it is cut off instead. Media stay whole, and the answers of one prompt keep all of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from omnizoo.config.data_section import Data
from omnizoo.data.packing import Sample, split
from omnizoo.data.rendered import Rendered
from omnizoo.data.rows import BadRow


@dataclass(frozen=True)
class Cut:
    """The samples of a row."""

    samples: list[Sample]
    became: str = ""  # of a row longer than a pack: the counter of its kind
    few_targets: int = 0  # samples that were left out
    reason: str = ""  # why there are no samples


def cut(source: int, epoch: int, row: int, rendered: Rendered, data: Data) -> Cut:
    most, became = data.pack_tokens, ""
    if len(rendered.ids) > most:
        way = data.overlong or ("split" if rendered.is_prose else "truncate")
        longer = f"longer than data.pack_tokens ({most})"
        if way == "drop":
            return Cut([], "dropped_overlong", reason=longer)
        if way == "truncate":
            shorter = truncate(rendered, most)
            if shorter is None:
                return Cut([], "dropped_overlong", reason=f"{longer}, and nothing that is learnt is within them")
            rendered = shorter
        became = "split_overlong" if way == "split" else "truncated_overlong"
    samples = list(split(source, epoch, row, rendered, most))
    # Each piece of a text is learnt from its second token on; what a chat is cut into by hand may be all prompt.
    fewest = max(data.min_targets, int(became == "split_overlong" and not rendered.is_prose))
    kept = [sample for sample in samples if not fewest or targets_of(sample) >= fewest]
    reason = "" if kept else f"fewer tokens with a loss than data.min_targets ({data.min_targets})"
    return Cut(kept, became, len(samples) - len(kept), reason)


def targets_of(sample: Sample) -> int:
    """Tokens that the loss is on, and places of media to produce; of several answers, those of the shortest."""
    inside = [item for item in sample.items if item.is_target and item.port.role != "follower"]
    produced = sum(item.size.places for item in inside)
    starts = np.cumsum([0, *sample.lengths])
    parts = pairwise(starts.tolist())
    return produced + min(int(sample.targets[first + 1 : last].sum()) for first, last in parts)


def truncate(rendered: Rendered, most: int) -> Rendered | None:
    """The beginning of a row, of at most so many tokens; None if nothing in it is learnt.

    An item that would be cut goes, with its marks and all that follows. Of several answers, the longest are cut first;
    each must keep the prompt, its media and one token of its own, and answers that begin alike must still differ.
    """
    if any(last - first > most for first, last in rendered.extents):
        largest = max(rendered.items, key=lambda item: item.size.places)
        raise BadRow(
            f"{len(rendered.ids)} tokens are longer than data.pack_tokens ({most}), and no cut would help: its largest "
            f"item, {largest.media.name}, takes {largest.size.places}"
        )
    if rendered.answers:
        return _truncate_answers(rendered, most)
    end = most
    for first, last in rendered.extents:
        end = first if first < end < last else end
    shorter = keep(rendered, np.arange(len(rendered.ids)) < end)
    is_learnt = shorter.targets[1:].any() or any(item.is_target for item in shorter.items)
    return shorter if is_learnt else None


def _truncate_answers(rendered: Rendered, most: int) -> Rendered | None:
    lengths = [length for _, length in rendered.answers]
    limit = longest_each(lengths, most)
    starts = np.cumsum([0, *lengths])[:-1].tolist()
    whole = [slice(start, start + length) for start, length in zip(starts, lengths, strict=True)]
    short = [slice(start, start + min(length, limit)) for start, length in zip(starts, lengths, strict=True)]
    if not all(rendered.targets[own][1:].any() for own in short):
        return None
    before, after = (len({rendered.ids[own].tobytes() for own in parts}) for parts in (whole, short))
    if after < before:
        return None
    kept = np.concatenate([np.arange(length) < limit for length in lengths])
    ends = {part.stop for part in whole}
    for first, count in (span for item in rendered.items for span in item.spans):
        last = first + count
        if not kept[first:last].all() or (last not in ends and not kept[last]):
            return None  # an item in an answer, or its end, would be cut: without it, the answer is another one
    answers = tuple((role, min(length, limit)) for role, length in rendered.answers)
    return replace(keep(rendered, kept), answers=answers)


def longest_each(lengths: Sequence[int], most: int) -> int:
    """The largest limit of each length for which all of them are at most `most` together."""
    for done, length in enumerate(sorted(lengths)):
        share = most // (len(lengths) - done)
        if length > share:
            return share
        most -= length
    return max(lengths)


def keep(rendered: Rendered, kept: npt.NDArray[np.bool_]) -> Rendered:
    """The row without some of its tokens; items go if any of theirs do."""
    place = np.cumsum(kept) - 1
    items = tuple(
        replace(item, spans=tuple((int(place[first]), count) for first, count in item.spans))
        for item in rendered.items
        if all(kept[first : first + count].all() for first, count in item.spans)
    )
    return replace(
        rendered,
        ids=rendered.ids[kept],
        targets=rendered.targets[kept],
        items=items,
        positions=None if rendered.positions is None else rendered.positions[:, kept],
        weights=None if rendered.weights is None else rendered.weights[kept],
        extents=(),
    )
