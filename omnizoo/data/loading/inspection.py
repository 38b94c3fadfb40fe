"""Statistics about the data of a run, for `omnizoo data inspect`.

They contain samples token by token, sample lengths, the mix of sources and media, and bad rows. Rows are read, rendered
and packed by the same code as in training. Control characters in names and messages from the data are escaped.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from omnizoo.config.errors import UserError
from omnizoo.config.schema import Config
from omnizoo.data.loading.bad_rows import BadRowGroup, BadRowRecord, InspectedLane, group_bad_rows
from omnizoo.data.loading.lanes import Counters
from omnizoo.data.loading.prepare import prepare_pack
from omnizoo.data.loading.reader import Reader
from omnizoo.data.row import stop_message
from omnizoo.data.sample import Sample
from omnizoo.data.token_fields import IGNORE_INDEX, select
from omnizoo.modalities.item import MediaItem, Port

LOOK = 512  # number of samples to inspect; data with fewer rows has fewer samples
BINS = 12  # number of bins in the histogram of sample lengths


class NoUsableRowsError(UserError):
    """Raised if no row of any source is usable."""

    def __init__(self, message: str, bad_groups: list[BadRowGroup]) -> None:
        super().__init__(message)
        self.bad_groups = bad_groups


@dataclass(frozen=True)
class TokenText:
    """Consecutive tokens that are shown as one piece of text.

    Usually, this is a single token. It may also be several tokens that encode one character together, or the
    placeholder tokens of a media item.
    """

    text: str
    tokens: int  # number of tokens
    has_loss: bool  # whether the tokens are targets of cross entropy or, for placeholder tokens, of a decoder's loss
    item: MediaItem | None = None  # the media item that the placeholder tokens belong to


@dataclass(frozen=True)
class InspectedSample:
    """A sample with the location of its row."""

    sample: Sample
    where: str  # file and line of the row

    @property
    def tokens(self) -> int:
        """Number of tokens of the sample."""
        return len(self.sample)

    @property
    def loss_tokens(self) -> int:
        """Number of target tokens, including placeholder tokens of generated media."""
        count = 0
        for _, part in parts(self.sample):
            count += int(part.is_target[1:].sum())  # the first token is never predicted, because no token precedes it
            for item in part.items:
                if item.is_target and item.port.role != "follower":
                    count += sum(length for _, length in item.spans)
        return count


@dataclass(frozen=True)
class PortMix:
    """Statistics about the media items of one encoder, decoder or follower."""

    port: Port
    samples: int  # number of samples with media items of the port
    items: int  # number of media items
    tokens: int  # number of placeholder tokens of all items
    cost: float  # FLOPs of all items
    costliest: MediaItem
    where: str  # file and line of the row with the costliest item


@dataclass(frozen=True)
class SourceMix:
    """Statistics about the samples of one source."""

    path: str
    rows: int  # number of rows of the source
    rows_read: int  # number of different rows that were read, including bad rows and rows in the packing window
    bad_rows: int
    reason_without_rows: str  # why the source has no usable rows; empty if there are some
    samples: int  # number of inspected samples
    tokens: int  # number of tokens of these samples
    formats: dict[str, int]  # number of samples of each row format
    why: str  # the rule that determined the format of the first row


@dataclass(frozen=True)
class Inspection:
    """Statistics about the first few hundred samples of a run."""

    samples: list[InspectedSample]
    fill: float  # mean number of tokens per pack / `data.pack_tokens`, the same metric as in training
    packs: int  # number of packs that contain the samples
    sources: list[SourceMix]
    mixed_by: str  # how sources are mixed: "size" or "weight"
    ports: list[PortMix]
    shown: list[InspectedSample]  # samples to show; all their media could be decoded
    longest: InspectedSample
    bad_rows: list[str]  # messages about bad rows, without repetitions
    bad_groups: list[BadRowGroup]
    counters: Counters
    most_positions: int | None  # maximum number of positions of the model; None if unknown

    @property
    def lengths(self) -> list[int]:
        """Length of each inspected sample in tokens."""
        return [inspected.tokens for inspected in self.samples]

    @property
    def rows(self) -> int:
        """Number of different rows that the inspected samples come from."""
        return len({(inspected.sample.id.source, inspected.sample.id.row) for inspected in self.samples})

    @property
    def text_only(self) -> int:
        """Number of samples without media."""
        return sum(not inspected.sample.items for inspected in self.samples)


def one_lane(config: Config) -> Config:
    """Return a copy of the config with a single lane, so that the first few hundred rows represent all the data."""
    return config.model_copy(update={"data": config.data.model_copy(update={"lanes": 1})})


def inspect_data(reader: Reader, show: int) -> Inspection:
    """Compute statistics about the first few hundred samples of a run.

    Bad rows are collected even if training would stop at the first one. A source without usable rows is left out.

    Args:
        reader: The data of the run, with a config from `one_lane`.
        show: Number of samples to select for display. Their media are decoded.

    Raises:
        NoUsableRowsError: If no row of any source is usable.
    """
    data = reader.config.data
    lane = InspectedLane(reader, 0, by_rows=reader.config.train.epochs is not None)
    num_packs = 0
    samples: list[InspectedSample] = []
    # When the lane has stopped reading all sources, it still packs the samples in its packing window.
    while len(samples) < min(LOOK, lane.num_usable_rows or LOOK):
        pack = lane.next_pack()
        if pack is None:
            break
        num_packs += 1
        for sample in pack:
            location = reader.sources[sample.id.source].where(sample.id.row)
            samples.append(InspectedSample(sample, visible(location)))
    if not samples:
        raise _no_usable_rows(reader, lane)

    shown = decodable(varied(samples), reader, show, lane.records)
    return Inspection(
        samples=samples,
        fill=sum(inspected.tokens for inspected in samples) / (num_packs * data.pack_tokens),
        packs=num_packs,
        sources=source_mix(samples, reader, lane),
        mixed_by="size" if lane.by_rows or data.weights is None else "weight",
        ports=port_mix(samples),
        shown=shown,
        longest=max(samples, key=lambda inspected: inspected.tokens),
        bad_rows=distinct(record.message for record in lane.records),
        bad_groups=group_bad_rows(lane.records),
        counters=lane.counters,
        most_positions=reader.most_positions,
    )


def _no_usable_rows(reader: Reader, lane: InspectedLane) -> NoUsableRowsError:
    """Return the error for data without usable rows."""
    groups = group_bad_rows(lane.records)
    if groups and reader.config.data.on_bad_row == "error":
        return NoUsableRowsError(stop_message(visible(lane.records[0].message)), groups)
    names = ", ".join(spec.name for spec in reader.config.data.sources)
    num_rows = sum(map(len, lane.rows_read))
    reason = visible(next(iter(lane.given_up.values())))
    return NoUsableRowsError(
        f"data.sources: none of the {num_rows:,} rows read from {names} is usable; the last one ({reason})", groups
    )


def distinct(bad_rows: Iterable[str]) -> list[str]:
    """Return the messages without repetitions, in order, with control characters escaped."""
    return list(dict.fromkeys(map(visible, bad_rows)))


def varied(samples: Sequence[InspectedSample]) -> list[InspectedSample]:
    """Reorder samples for display, so that the first ones differ as much as possible.

    The first samples together contain every source and every port (encoder, decoder or follower). The next ones add
    every combination of a source and ports that occurs in a sample. The rest follows in the original order.
    """
    mixes = []
    for inspected in samples:
        ports = [item.port for item in inspected.sample.items]
        mixes.append(frozenset([("source", inspected.sample.id.source), *ports]))
    order: list[int] = []
    missing = set().union(*mixes)
    while missing:
        order.append(max(range(len(mixes)), key=lambda i: len(mixes[i] & missing)))
        missing -= mixes[order[-1]]
    order += (mixes.index(mix) for mix in dict.fromkeys(mixes))
    return [samples[i] for i in dict.fromkeys([*order, *range(len(samples))])]


def decodable(
    samples: Iterable[InspectedSample], reader: Reader, count: int, records: list[BadRowRecord]
) -> list[InspectedSample]:
    """Return the first `count` samples whose media can be decoded, at most one for each row.

    Args:
        samples: The samples to choose from, in order of preference.
        reader: The data of the run.
        count: Number of samples to return.
        records: Receives a record of each row whose media cannot be decoded.
    """
    decoded: list[InspectedSample] = []
    rows: set[tuple[int, int]] = set()
    for inspected in samples:
        if len(decoded) == count:
            break
        row = (inspected.sample.id.source, inspected.sample.id.row)
        if row in rows:  # an earlier sample comes from the same row, possibly in another epoch
            continue
        rows.add(row)
        _, undecodable = prepare_pack(0, [inspected.sample], reader)
        if not undecodable:
            decoded.append(inspected)
        where = reader.sources[row[0]].where(row[1])
        records += [BadRowRecord(*row, where, message.removeprefix(f"{where}: ")) for message in undecodable]
    return decoded


def source_mix(samples: Sequence[InspectedSample], reader: Reader, lane: InspectedLane) -> list[SourceMix]:
    """Return statistics about each source."""
    mix = []
    for i, (spec, source) in enumerate(zip(reader.config.data.sources, reader.sources, strict=True)):
        source_samples = [inspected for inspected in samples if inspected.sample.id.source == i]
        formats = Counter(inspected.sample.row_schema for inspected in source_samples)
        mix.append(
            SourceMix(
                path=visible(spec.name),
                rows=len(source),
                rows_read=len(lane.rows_read[i]),
                bad_rows=len({record.row for record in lane.records if record.source == i}),
                reason_without_rows=visible(lane.reason_without_rows(i)),
                samples=len(source_samples),
                tokens=sum(inspected.tokens for inspected in source_samples),
                formats=dict(formats.most_common()),
                why=reader.format_of(i)[1],
            )
        )
    return mix


def port_mix(samples: Sequence[InspectedSample]) -> list[PortMix]:
    """Return statistics about the media items of each port (encoder, decoder or follower)."""
    entries_by_port: dict[Port, list[tuple[MediaItem, InspectedSample]]] = {}
    for inspected in samples:
        for item in inspected.sample.items:
            entries_by_port.setdefault(item.port, []).append((item, inspected))
    mix = []
    for port, entries in sorted(entries_by_port.items()):
        costliest, sample_of_costliest = max(entries, key=lambda entry: entry[0].size.cost)
        mix.append(
            PortMix(
                port=port,
                samples=len({id(inspected) for _, inspected in entries}),
                items=len(entries),
                tokens=sum(item.size.num_placeholders for item, _ in entries),
                cost=sum(item.size.cost for item, _ in entries),
                costliest=costliest,
                where=sample_of_costliest.where,
            )
        )
    return mix


def histogram(lengths: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return the histogram of sample lengths: (shortest length, longest length, number of samples) for each bin.

    The bins are logarithmic if the largest length is more than 8 times the smallest.
    """
    low = min(lengths)
    high = max(lengths)
    spread = np.geomspace if high > 8 * low else np.linspace
    edges = np.unique(np.rint(spread(low, high + 1, BINS + 1)).astype(np.int64))
    counts, _ = np.histogram(lengths, edges)
    bins = []
    for first, next_first, count in zip(edges[:-1], edges[1:], counts, strict=True):
        bins.append((int(first), int(next_first) - 1, int(count)))
    return bins


def parts(sample: Sample) -> Iterator[tuple[str, Sample]]:
    """Yield the segments of a sample as separate samples, each with its role.

    The sample of a preference row has one segment for each response. Other samples have one segment without a role.
    Mismatched responses are yielded without targets, because no loss trains on them.
    """
    if not sample.responses:
        yield "", sample
    start = 0
    for role, length in sample.responses:
        stop = start + length
        has_loss = role != "mismatched"
        items = []
        for item in sample.items:
            spans = tuple((first - start, count) for first, count in item.spans if start <= first < stop)
            if spans:
                items.append(replace(item, spans=spans, is_target=item.is_target and has_loss))
        columns = select(sample.columns, slice(start, stop))
        if not has_loss:
            columns["labels"] = np.full_like(columns["labels"], IGNORE_INDEX)
        yield role, Sample(columns, tuple(items), id=sample.id)
        start = stop


def pieces(sample: Sample, decode: Callable[[list[int]], str]) -> Iterator[TokenText]:
    """Yield the tokens of a sample as text, and its media items as short descriptions in brackets."""
    ids = sample.input_ids.tolist()
    has_loss = sample.is_target
    has_loss[0] = False
    in_sequence: list[tuple[int, int, MediaItem]] = []
    followed: list[tuple[int, int, MediaItem]] = []
    for item in sample.items:
        if item.port.role != "follower":
            in_sequence += [(first, num_tokens, item) for first, num_tokens in item.spans]
        elif item.spans:
            followed.append((sum(item.spans[-1]), 0, item))
    runs = sorted([*in_sequence, *followed], key=lambda run: run[0])

    stop = 0
    for first, num_tokens, item in runs:
        yield from text_pieces(ids[stop:first], has_loss[stop:first].tolist(), decode)
        target = " target" if item.is_target else ""
        count = item.targets if item.port.role == "follower" else num_tokens
        yield TokenText(f"[{item.media.modality} x {count}{target}]", num_tokens, item.is_target, item)
        stop = first + num_tokens
    yield from text_pieces(ids[stop:], has_loss[stop:].tolist(), decode)


def text_pieces(ids: list[int], has_loss: list[bool], decode: Callable[[list[int]], str]) -> Iterator[TokenText]:
    """Yield the text of each token, as it appears after the preceding tokens.

    Tokens are not decoded separately, because this could remove their leading spaces.

    Args:
        ids: The token ids.
        has_loss: Whether each token is a target.
        decode: Converts token ids to text.
    """
    context = start = 0
    for end in range(1, len(ids) + 1):
        before = decode(ids[context:start])
        text = decode(ids[context:end])
        if text.endswith("\ufffd") and end - start < 4 and end < len(ids):
            continue  # add the next token, because the bytes of a character may be spread over several tokens
        yield TokenText(visible(text[len(before) :]), end - start, any(has_loss[start:end]))
        context = start
        start = end


def shorten(shown: list[TokenText], limit: int) -> list[TokenText]:
    """Return about `limit` pieces from the beginning and the end, with a note about the omitted tokens between them."""
    if len(shown) <= limit:
        return shown
    half = limit // 2
    num_omitted = sum(piece.tokens for piece in shown[half:-half])
    ellipsis = TokenText(f" ... {num_omitted:,} tokens ... ", num_omitted, False)
    return [*shown[:half], ellipsis, *shown[-half:]]


def visible(text: str) -> str:
    """Escape control characters, because they could change the state of a terminal. Line breaks are kept."""
    return "".join(map(_visible_character, text))


def _visible_character(character: str) -> str:
    """Return a character unchanged or, if it is a control character, as an escape sequence."""
    if character.isprintable() or character == "\n":
        return character
    return character.encode("unicode_escape").decode()
