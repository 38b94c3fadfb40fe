"""Statistics of the data of a run: samples token by token, lengths, the mix of sources and media, bad rows.

Rows are read, rendered and packed by the same code as in training. `cli/data` prints the statistics. Control characters
in names and messages that come from the data are escaped.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from omnizoo.config.errors import UserError
from omnizoo.config.schema import Config
from omnizoo.data.loading.lanes import Counters, Lane
from omnizoo.data.loading.prepare import prepare_pack
from omnizoo.data.loading.reader import Reader
from omnizoo.data.sample import Sample
from omnizoo.data.token_fields import IGNORE_INDEX, select
from omnizoo.modalities.item import MediaItem, Port

LOOK = 512  # samples to inspect; fewer if there are fewer rows
BINS = 12  # bins of the histogram of lengths


class TooManyBadError(UserError):
    """Many rows are bad, and few or none are usable."""

    def __init__(self, message: str, bad_rows: list[str]) -> None:
        super().__init__(message)
        self.bad_rows = bad_rows


def stops_at(bad_row: str) -> str:
    """Return the error message of a run that stops at a bad row."""
    return f"{bad_row} (data.on_bad_row: skip goes on without such rows)"


@dataclass(frozen=True)
class TokenText:
    """Tokens that are shown together: one token, the tokens of one character, or a span of placeholder tokens."""

    text: str
    tokens: int
    has_loss: bool  # cross entropy for text, the decoder's loss for placeholder tokens
    item: MediaItem | None = None


@dataclass(frozen=True)
class InspectedSample:
    """A sample, and the file and line of its row."""

    sample: Sample
    where: str

    @property
    def tokens(self) -> int:
        return len(self.sample)

    @property
    def loss_tokens(self) -> int:
        count = 0
        for _, part in parts(self.sample):
            count += int(part.is_target[1:].sum())  # no token precedes the first one, so it is not predicted
            for item in part.items:
                if item.is_target and item.port.role != "follower":
                    count += sum(length for _, length in item.spans)
        return count


@dataclass(frozen=True)
class PortMix:
    """Statistics of the media items of one encoder, decoder or follower."""

    port: Port
    samples: int
    items: int
    tokens: int
    cost: float
    costliest: MediaItem
    where: str  # file and line of the costliest item


@dataclass(frozen=True)
class SourceMix:
    """Statistics of the samples of one source."""

    path: str
    rows: int  # all rows of the source
    samples: int  # number of inspected samples
    tokens: int
    formats: dict[str, int]  # number of samples by the format of their row
    why: str  # the rule that decided the format of the first row


@dataclass(frozen=True)
class Inspection:
    """Statistics of the first few hundred samples of a run."""

    samples: list[InspectedSample]
    fill: float  # mean fraction of `data.pack_tokens` that packs fill, as training reports it
    packs: int
    sources: list[SourceMix]
    ports: list[PortMix]
    shown: list[InspectedSample]  # samples to show, whose media could be decoded
    longest: InspectedSample
    rows: int  # rows read: packed, in the packing window, or skipped
    bad_rows: list[str]  # distinct messages, with reasons
    counters: Counters
    most_positions: int | None  # maximum number of positions of the model; None if unknown

    @property
    def lengths(self) -> list[int]:
        return [found.tokens for found in self.samples]

    @property
    def text_only(self) -> int:
        return sum(not found.sample.items for found in self.samples)


def one_lane(config: Config) -> Config:
    """Return the config with one lane, whose first few hundred rows are a sample of all the data."""
    return config.model_copy(update={"data": config.data.model_copy(update={"lanes": 1})})


def inspect_data(reader: Reader, show: int) -> Inspection:
    """Inspect the first few hundred samples that a lane packs.

    Bad rows are collected even if training would stop at the first one.

    Args:
        reader: The data of a run.
        show: Number of samples to select and decode.

    Raises:
        TooManyBadError: If many rows are bad, and few or none are usable.
    """
    data, lane = reader.config.data, Lane(reader, 0, patience=LOOK)
    num_wanted = min(LOOK, sum(map(len, reader.sources)))
    packs: list[list[Sample]] = []
    samples: list[InspectedSample] = []
    while len(samples) < num_wanted:
        try:
            pack = lane.next_pack()
        except UserError as error:
            bad_rows = distinct(lane.take_bad_rows())
            stops = bool(bad_rows) and data.on_bad_row == "error"
            raise TooManyBadError(stops_at(bad_rows[0]) if stops else str(error), bad_rows) from None
        assert pack is not None, "a lane that is not read just once never ends"
        packs.append(pack)
        for sample in pack:
            samples.append(InspectedSample(sample, visible(reader.sources[sample.id.source].where(sample.id.row))))
    bad_rows = lane.take_bad_rows()
    shown = decodable(varied(samples), reader, show, bad_rows)
    return Inspection(
        samples=samples,
        fill=sum(found.tokens for found in samples) / (len(packs) * data.pack_tokens),
        packs=len(packs),
        sources=source_mix(samples, reader),
        ports=port_mix(samples),
        shown=shown,
        longest=max(samples, key=lambda found: found.tokens),
        rows=sum(cursor.drawn for cursor in lane.cursors),
        bad_rows=distinct(bad_rows),
        counters=lane.counters,
        most_positions=reader.most_positions,
    )


def distinct(bad_rows: Sequence[str]) -> list[str]:
    """Return the distinct messages in order, as printable text."""
    return list(dict.fromkeys(map(visible, bad_rows)))


def varied(samples: Sequence[InspectedSample]) -> list[InspectedSample]:
    """Reorder samples: the first ones cover every source and port, the next ones every combination of them."""
    mixes = [
        frozenset([("source", found.sample.id.source), *(item.port for item in found.sample.items)])
        for found in samples
    ]
    order: list[int] = []
    missing = set().union(*mixes)
    while missing:
        order.append(max(range(len(mixes)), key=lambda i: len(mixes[i] & missing)))
        missing -= mixes[order[-1]]
    order += (mixes.index(mix) for mix in dict.fromkeys(mixes))
    return [samples[i] for i in dict.fromkeys([*order, *range(len(samples))])]


def decodable(
    samples: Iterable[InspectedSample], reader: Reader, count: int, bad_rows: list[str]
) -> list[InspectedSample]:
    """Return the first `count` samples whose media can be decoded. Append errors about others to `bad_rows`."""
    good: list[InspectedSample] = []
    rows: set[tuple[int, int]] = set()
    for found in samples:
        if len(good) == count:
            break
        row = (found.sample.id.source, found.sample.id.row)
        if row in rows:  # another sample of the same row, or the same row in the next epoch
            continue
        rows.add(row)
        _, bad = prepare_pack(0, [found.sample], reader)
        if not bad:
            good.append(found)
        bad_rows += bad
    return good


def source_mix(samples: Sequence[InspectedSample], reader: Reader) -> list[SourceMix]:
    mix = []
    for i, (spec, source) in enumerate(zip(reader.config.data.sources, reader.sources, strict=True)):
        of_source = [found for found in samples if found.sample.id.source == i]
        formats = Counter(found.sample.row_schema for found in of_source)
        mix.append(
            SourceMix(
                path=visible(spec.name),
                rows=len(source),
                samples=len(of_source),
                tokens=sum(found.tokens for found in of_source),
                formats=dict(formats.most_common()),
                why=reader.format_of(i)[1],
            )
        )
    return mix


def port_mix(samples: Sequence[InspectedSample]) -> list[PortMix]:
    by_port: dict[Port, list[tuple[MediaItem, InspectedSample]]] = {}
    for found in samples:
        for item in found.sample.items:
            by_port.setdefault(item.port, []).append((item, found))
    mix = []
    for port, entries in sorted(by_port.items()):
        costliest, found = max(entries, key=lambda entry: entry[0].size.cost)
        mix.append(
            PortMix(
                port=port,
                samples=len({id(found) for _, found in entries}),
                items=len(entries),
                tokens=sum(item.size.num_placeholders for item, _ in entries),
                cost=sum(item.size.cost for item, _ in entries),
                costliest=costliest,
                where=found.where,
            )
        )
    return mix


def histogram(lengths: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return (first length, last length, number of samples) of each bin.

    Bins are logarithmic if the largest length is more than 8 times the smallest.
    """
    low, high = min(lengths), max(lengths)
    spread = np.geomspace if high > 8 * low else np.linspace
    edges = np.unique(np.rint(spread(low, high + 1, BINS + 1)).astype(np.int64))
    counts, _ = np.histogram(lengths, edges)
    return [(int(first), int(after) - 1, int(n)) for first, after, n in zip(edges[:-1], edges[1:], counts, strict=True)]


def parts(sample: Sample) -> Iterator[tuple[str, Sample]]:
    """Yield the parts of a sample that do not attend to each other, with their roles.

    These are the responses of a row with preferences, or the sample itself. Mismatched responses have no targets.
    """
    if not sample.responses:
        yield "", sample
    first = 0
    for role, length in sample.responses:
        last = first + length
        has_loss = role != "mismatched"
        items = []
        for item in sample.items:
            if spans := tuple((at - first, n) for at, n in item.spans if first <= at < last):
                items.append(replace(item, spans=spans, is_target=item.is_target and has_loss))
        columns = select(sample.columns, slice(first, last))
        if not has_loss:
            columns["labels"] = np.full_like(columns["labels"], IGNORE_INDEX)
        yield role, Sample(columns, tuple(items), id=sample.id)
        first = last


def pieces(sample: Sample, decode: Callable[[list[int]], str]) -> Iterator[TokenText]:
    """Yield the tokens of a sample as text, and its media items as short descriptions in brackets."""
    ids, has_loss = sample.input_ids.tolist(), sample.is_target
    has_loss[0] = False
    inside = [(*span, item) for item in sample.items for span in item.spans if item.port.role != "follower"]
    beside = [(sum(item.spans[-1]), 0, item) for item in sample.items if item.port.role == "follower" and item.spans]
    runs = sorted([*inside, *beside], key=lambda run: run[0])
    at = 0
    for first, places, item in runs:
        yield from text_pieces(ids[at:first], has_loss[at:first].tolist(), decode)
        target = " target" if item.is_target else ""
        count = item.targets if item.port.role == "follower" else places
        yield TokenText(f"[{item.media.modality} x {count}{target}]", places, item.is_target, item)
        at = first + places
    yield from text_pieces(ids[at:], has_loss[at:].tolist(), decode)


def text_pieces(ids: list[int], has_loss: list[bool], decode: Callable[[list[int]], str]) -> Iterator[TokenText]:
    """Yield the text that each token adds to the preceding text. Decoded alone, a token may lose its leading space."""
    context = start = 0
    for end in range(1, len(ids) + 1):
        before, text = decode(ids[context:start]), decode(ids[context:end])
        if text.endswith("\ufffd") and end - start < 4 and end < len(ids):
            continue  # the bytes of one character may be spread over several tokens
        yield TokenText(visible(text[len(before) :]), end - start, any(has_loss[start:end]))
        context, start = start, end


def shorten(shown: list[TokenText], most: int) -> list[TokenText]:
    """Return at most about `most` pieces, from the beginning and the end."""
    if len(shown) <= most:
        return shown
    left_out = sum(piece.tokens for piece in shown[most // 2 : -(most // 2)])
    return [*shown[: most // 2], TokenText(f" ... {left_out:,} tokens ... ", left_out, False), *shown[-(most // 2) :]]


def visible(text: str) -> str:
    """Escape control characters in `text`, which could change the state of the terminal."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)
