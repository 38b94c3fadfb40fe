"""Truncate, drop or split rows that do not fit in a pack (`data.overlong`).

By default, plain text is split at any token. Chats and other rows with a prompt are truncated, because a part without a
response would have no targets. Media items are never cut, and each response of a preference row keeps the whole prompt.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from omnizoo.config.sections.data import DataSection
from omnizoo.data.row import BadRow
from omnizoo.data.sample import RenderedRow, Sample, SampleId, Segment, segment_slices
from omnizoo.data.token_fields import cut_piece, select

# For each method, the field of `Counters` that counts the rows. Dropped rows are counted elsewhere.
COUNTERS = {"split": "split_overlong", "truncate": "truncated_overlong"}


@dataclass(frozen=True)
class SampleSplit:
    """The samples of a row, and counters of the changes that make them fit in packs."""

    samples: list[Sample]
    counters: tuple[str, ...] = ()  # field of `Counters` to increment, for each document longer than a pack
    few_targets: int = 0  # number of samples that were dropped because of `data.min_targets`
    reason: str = ""  # why there are no samples; empty if there are some


def fit_to_pack(source: int, epoch: int, row: int, rendered: RenderedRow, data: DataSection) -> SampleSplit:
    """Split or truncate a rendered row so that each sample has at most `data.pack_tokens` tokens.

    If the row consists of several documents, each document becomes separate samples.

    Args:
        source: Index of the source.
        epoch: Number of the epoch.
        row: Number of the row in its source.
        rendered: The rendered row.
        data: The `data` section of the config.
    """
    first = SampleId(source, epoch, row, part=0)
    if not rendered.documents:
        return _fit_document(first, rendered, data, data.min_targets)
    splits = []
    for document in _documents(rendered):
        splits.append(_fit_document(first, document, data, max(1, data.min_targets)))
        first = first._replace(part=first.part + math.ceil(len(document) / data.pack_tokens))
    return SampleSplit(
        samples=[sample for split in splits for sample in split.samples],
        counters=tuple(counter for split in splits for counter in split.counters),
        few_targets=sum(split.few_targets for split in splits),
        reason=splits[-1].reason,
    )


def _documents(rendered: RenderedRow) -> Iterator[RenderedRow]:
    """Yield each document of a row into which another tool has packed several."""
    for span in segment_slices(rendered.documents):
        document = replace(rendered, columns=select(rendered.columns, span), documents=())
        yield replace(document, is_prose=bool(document.is_target[1:].all()))


def _fit_document(first: SampleId, rendered: RenderedRow, data: DataSection, min_targets: int) -> SampleSplit:
    """Split or truncate one document. The document is a whole row or a part of one.

    Args:
        first: The id of the first sample.
        rendered: The document.
        data: The `data` section of the config.
        min_targets: Minimum number of targets of a sample. Samples with fewer targets are dropped.
    """
    limit = data.pack_tokens
    method = ""
    if len(rendered) > limit:
        default_method = "split" if rendered.is_prose else "truncate"
        method = data.overlong or default_method
        too_long = f"{len(rendered)} tokens are more than data.pack_tokens ({limit})"
        if method == "drop":
            return SampleSplit([], ("dropped_overlong",), reason=too_long)
        if method == "truncate":
            truncated = truncate(rendered, limit)
            if truncated is None:
                reason = f"{too_long}, and the first {limit} have no targets"
                return SampleSplit([], ("dropped_overlong",), reason=reason)
            rendered = truncated

    all_samples = list(split(first.source, first.epoch, first.row, rendered, limit, first.part))
    # In plain text, all tokens except the first one of a sample are targets. A part of a chat may have none.
    is_split_chat = method == "split" and not rendered.is_prose
    min_targets = max(min_targets, int(is_split_chat))
    samples = [sample for sample in all_samples if not min_targets or num_targets(sample) >= min_targets]
    return SampleSplit(
        samples=samples,
        counters=(COUNTERS[method],) if method else (),
        few_targets=len(all_samples) - len(samples),
        reason="" if samples else f"fewer targets than data.min_targets ({data.min_targets})",
    )


def fit_all_to_packs(
    source: int, epoch: int, row: int, samples: Sequence[RenderedRow], data: DataSection
) -> SampleSplit:
    """Apply `fit_to_pack` to a row that was rendered as several samples, and number the samples in order."""
    splits = [fit_to_pack(source, epoch, row, rendered, data) for rendered in samples]
    if len(splits) == 1:
        return splits[0]
    parts = [sample for split in splits for sample in split.samples]
    numbered = [replace(sample, id=SampleId(source, epoch, row, part)) for part, sample in enumerate(parts)]
    return SampleSplit(
        samples=numbered,
        counters=next((split.counters for split in splits if split.counters), ()),
        few_targets=sum(split.few_targets for split in splits),
        reason="" if numbered else splits[0].reason,
    )


def split(
    source: int, epoch: int, row: int, rendered: RenderedRow, pack_tokens: int, first_part: int = 0
) -> Iterator[Sample]:
    """Split a rendered row into samples of at most `pack_tokens` tokens.

    Args:
        source: Index of the source.
        epoch: Number of the epoch.
        row: Number of the row in its source.
        rendered: The rendered row.
        pack_tokens: Maximum number of tokens of a sample.
        first_part: Index of the first sample within its row.

    Raises:
        BadRow: If the row is too long and has media or preferences, because such rows are never split.
    """
    if len(rendered) > pack_tokens:
        _check_split(rendered, pack_tokens)
    for part, start in enumerate(range(0, len(rendered), pack_tokens), first_part):
        columns = cut_piece(rendered.columns, start, start + pack_tokens)
        id = SampleId(source, epoch, row, part)
        yield Sample(columns, rendered.items, rendered.responses, rendered.row_schema, rendered.batch_shape, id=id)


def _check_split(rendered: RenderedRow, pack_tokens: int) -> None:
    """Check that an over-long row can be split. Raises `BadRow` if it has media or preferences."""
    too_long = f"{len(rendered)} tokens are more than data.pack_tokens ({pack_tokens})"
    if rendered.items:
        in_sequence = [item for item in rendered.items if item.port.role != "follower"]
        largest = max(in_sequence, key=lambda item: item.size.num_placeholders, default=None)
        largest_item = ""
        if largest is not None:
            largest_item = f" The largest item, {largest.media.name}, has {largest.size.num_placeholders} tokens."
        raise BadRow(
            f"{too_long}, and rows with media are never split. Set `data.overlong: truncate` to truncate them."
            + largest_item
        )
    if rendered.responses:
        raise BadRow(
            f"{too_long}, and preference rows are never split. Set `data.overlong: truncate` to truncate their "
            "responses."
        )


def num_targets(sample: Sample) -> int:
    """Return the number of target tokens of a sample, including placeholder tokens of generated media.

    In a sample with several responses, only the response with the fewest text targets counts.
    """
    media_targets = [item for item in sample.items if item.is_target and item.port.role != "follower"]
    num_placeholders = sum(item.size.num_placeholders for item in media_targets)
    is_target = sample.is_target
    # The first token of a segment is never predicted, because no token precedes it.
    num_tokens = [int(is_target[segment][1:].sum()) for segment in segment_slices(sample.lengths)]
    return num_placeholders + min(num_tokens)


def truncate(rendered: RenderedRow, limit: int) -> RenderedRow | None:
    """Remove the end of a row so that at most `limit` tokens remain.

    If the limit is inside a media item, the row ends before the item and its marks. If the row has several responses,
    the longest ones are shortened first.

    Returns:
        The truncated row. None if it has no targets; or, in a row with several responses, if a response would lose a
        part of the prompt, media or all its targets, or if different responses would become equal.

    Raises:
        BadRow: If a media item alone is longer than `limit`.
    """
    if any(stop - start > limit for start, stop in rendered.item_spans):
        largest = max(rendered.items, key=lambda item: item.size.num_placeholders)
        raise BadRow(
            f"{len(rendered)} tokens are more than data.pack_tokens ({limit}), and truncation cannot help: the largest "
            f"item, {largest.media.name}, has {largest.size.num_placeholders} tokens"
        )
    if rendered.responses:
        return _truncate_responses(rendered, limit)
    end = limit
    for start, stop in rendered.item_spans:
        if start < end < stop:
            end = start
    truncated = keep_tokens(rendered, np.arange(len(rendered)) < end)
    has_targets = truncated.is_target[1:].any() or any(item.is_target for item in truncated.items)
    return truncated if has_targets else None


def _truncate_responses(rendered: RenderedRow, limit: int) -> RenderedRow | None:
    """Shorten the longest responses of a row so that at most `limit` tokens remain.

    Return None if a response would lose all its targets or a media item, or become equal to another response.
    """
    max_length = max_response_length(rendered.lengths, limit)
    is_kept = np.concatenate([np.arange(length) < max_length for length in rendered.lengths])
    responses = tuple(Segment(role, min(length, max_length)) for role, length in rendered.responses)
    truncated = replace(keep_tokens(rendered, is_kept), responses=responses)
    if not all(truncated.is_target[segment][1:].any() for segment in segment_slices(truncated.lengths)):
        return None
    if _num_different(truncated) < _num_different(rendered):
        return None

    response_ends = np.cumsum(rendered.lengths)
    spans = [span for item in rendered.items for span in item.spans]
    for start, count in spans:
        stop = start + count
        is_end_mark_cut = stop not in response_ends and not is_kept[stop]
        if not is_kept[start:stop].all() or is_end_mark_cut:
            return None  # without the whole item and its end mark, the response would have another meaning
    return truncated


def _num_different(rendered: RenderedRow) -> int:
    """Return the number of different responses."""
    return len({rendered.input_ids[segment].tobytes() for segment in segment_slices(rendered.lengths)})


def max_response_length(lengths: Sequence[int], limit: int) -> int:
    """Return the largest L such that all responses, cut to L tokens each, have at most `limit` tokens in total."""
    for num_shorter, length in enumerate(sorted(lengths)):
        share = limit // (len(lengths) - num_shorter)
        if length > share:
            return share
        limit -= length
    return max(lengths)


def keep_tokens(rendered: RenderedRow, is_kept: npt.NDArray[np.bool_]) -> RenderedRow:
    """Return a row with only some of its tokens, and with the items whose tokens are all kept.

    Args:
        rendered: The row.
        is_kept: `[tokens]`, whether to keep each token.
    """
    new_index = np.cumsum(is_kept) - 1
    items = []
    for item in rendered.items:
        if all(is_kept[start : start + count].all() for start, count in item.spans):
            spans = tuple((int(new_index[start]), count) for start, count in item.spans)
            items.append(replace(item, spans=spans))
    return replace(rendered, columns=select(rendered.columns, is_kept), items=tuple(items), item_spans=())
