"""What the data of a run is to its model: samples token by token, lengths, the mix, the fill of packs, rows left out.

Facts only; the command shows them. Rows are read, rendered and packed by the code that training reads them with.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from omnizoo.config.errors import UserError
from omnizoo.config.schema import Config
from omnizoo.data.flat_pack import flatten
from omnizoo.data.lanes import Counters
from omnizoo.data.packing import Pack, Sample
from omnizoo.data.reader import Reader
from omnizoo.modalities.base import Item, Port

LOOK = 512  # samples to look at; fewer if there are fewer rows
BINS = 12  # of the histogram of lengths


class TooManyBadError(UserError):
    """Rows are bad, one after the other."""

    def __init__(self, reason: UserError, bad_rows: list[str], on_bad_row: str) -> None:
        super().__init__(stops_at(bad_rows[0]) if bad_rows and on_bad_row == "error" else str(reason))
        self.bad_rows = bad_rows


def stops_at(bad_row: str) -> str:
    return f"{bad_row} (data.on_bad_row: skip goes on without such rows)"


@dataclass(frozen=True)
class Piece:
    """Tokens that are shown together: as many as it takes for a character of text, or a run of an item's places."""

    text: str
    tokens: int
    has_loss: bool  # learnt: text by cross entropy, places by their decoder
    item: Item | None = None


@dataclass(frozen=True)
class Found:
    """A sample, and where its row is."""

    sample: Sample
    where: str

    @property
    def tokens(self) -> int:
        return len(self.sample.ids)

    @property
    def loss_tokens(self) -> int:
        # Nothing stands before the first one of a text to predict it from.
        of_parts = [part for _, part in parts(self.sample)]
        text = sum(int(part.targets[1:].sum()) for part in of_parts)
        inside = [item for part in of_parts for item in part.items if item.is_target and item.port.role != "follower"]
        return text + sum(n for item in inside for _, n in item.spans)


@dataclass(frozen=True)
class PortMix:
    """What one encoder or decoder gets."""

    port: Port
    samples: int
    items: int
    tokens: int
    cost: float
    costliest: Item
    where: str  # the costliest one is


@dataclass(frozen=True)
class SourceMix:
    path: str
    rows: int  # that it has
    samples: int  # of it, among those looked at
    tokens: int
    formats: dict[str, int]  # what its samples were taken as
    why: str  # the first row was


@dataclass(frozen=True)
class Inspection:
    samples: list[Found]
    fill: float  # of packs, as training reports it
    packs: int
    sources: list[SourceMix]
    ports: list[PortMix]
    shown: list[Found]  # decoded as well, so they are known to be good
    longest: Found
    rows: int  # read: those of the samples, those still waiting to be packed, those left out
    bad_rows: list[str]  # with their reasons, each once
    counters: Counters
    most_positions: int | None  # of the model

    @property
    def lengths(self) -> list[int]:
        return [found.tokens for found in self.samples]

    @property
    def text_only(self) -> int:
        return sum(not found.sample.items for found in self.samples)


def one_lane(config: Config) -> Config:
    """For `inspect_data`: all rows come in one stream, so that a few hundred of them are of the whole data."""
    return config.model_copy(update={"data": config.data.model_copy(update={"lanes": 1})})


def inspect_data(reader: Reader, show: int) -> Inspection:
    """Of the first few hundred samples that a lane packs. Bad rows are listed, also where training would stop at the
    first one; many of them, and hardly a good one, are `TooManyBadError`."""
    data, lane = reader.config.data, reader.lane(0, patience=LOOK)
    wanted = min(LOOK, sum(map(len, reader.sources)))
    packs: list[Pack] = []
    while sum(len(pack.samples) for pack in packs) < wanted:
        try:
            pack = lane.next_pack()
        except UserError as error:
            raise TooManyBadError(error, list(dict.fromkeys(lane.take_bad_rows())), data.on_bad_row) from None
        assert pack is not None, "a lane that is not read just once never ends"
        packs.append(pack)
    samples = [
        Found(sample, reader.sources[sample.id.source].where(sample.id.row))
        for pack in packs
        for sample in pack.samples
    ]
    bad_rows = lane.take_bad_rows()
    shown = decodable(varied(samples), reader, show, bad_rows)
    return Inspection(
        samples=samples,
        fill=sum(pack.tokens for pack in packs) / (len(packs) * data.pack_tokens),
        packs=len(packs),
        sources=source_mix(samples, reader),
        ports=port_mix(samples),
        shown=shown,
        longest=max(samples, key=lambda found: found.tokens),
        rows=sum(cursor.drawn for cursor in lane.cursors),
        bad_rows=list(dict.fromkeys(bad_rows)),
        counters=lane.counters,
        most_positions=reader.most_positions,
    )


def varied(samples: Sequence[Found]) -> list[Found]:
    """Few that together have every source, encoder and decoder; then those with a new mix; then all others."""
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


def decodable(samples: Iterable[Found], reader: Reader, count: int, bad_rows: list[str]) -> list[Found]:
    """The first `count` whose media can be decoded; what is wrong with others before them goes to `bad_rows`."""
    good: list[Found] = []
    rows: set[tuple[int, int]] = set()
    for found in samples:
        if len(good) == count:
            break
        row = (found.sample.id.source, found.sample.id.row)
        if row in rows:  # another part of a row that is shown, or the row again in the next epoch
            continue
        rows.add(row)
        _, bad = flatten(0, Pack((found.sample,)), reader)
        if not bad:
            good.append(found)
        bad_rows += bad
    return good


def source_mix(samples: Sequence[Found], reader: Reader) -> list[SourceMix]:
    count = Counter(found.sample.id.source for found in samples)
    tokens: Counter[int] = Counter()
    for found in samples:
        tokens[found.sample.id.source] += found.tokens
    formats: Counter[tuple[int, str]] = Counter((f.sample.id.source, f.sample.format) for f in samples)
    return [
        SourceMix(
            spec.name,
            len(source),
            count[i],
            tokens[i],
            {name: n for (of, name), n in formats.most_common() if of == i},
            reader.format_of(i)[1],
        )
        for i, (spec, source) in enumerate(zip(reader.config.data.sources, reader.sources, strict=True))
    ]


def port_mix(samples: Sequence[Found]) -> list[PortMix]:
    by_port: dict[Port, list[tuple[Item, Found]]] = {}
    for found in samples:
        for item in found.sample.items:
            by_port.setdefault(item.port, []).append((item, found))
    mix = []
    for port, entries in sorted(by_port.items()):
        items = [item for item, _ in entries]
        costliest, found = max(entries, key=lambda entry: entry[0].size.cost)
        users = len({id(found) for _, found in entries})
        tokens, cost = sum(item.size.places for item in items), sum(item.size.cost for item in items)
        mix.append(PortMix(port, users, len(items), tokens, cost, costliest, found.where))
    return mix


def histogram(lengths: Sequence[int]) -> list[tuple[int, int, int]]:
    """(first length, last length, samples) of each bin; bins widen with the length where lengths differ much."""
    low, high = min(lengths), max(lengths)
    spread = np.geomspace if high > 8 * low else np.linspace
    edges = np.unique(np.rint(spread(low, high + 1, BINS + 1)).astype(np.int64))
    counts, _ = np.histogram(lengths, edges)
    return [(int(first), int(after) - 1, int(n)) for first, after, n in zip(edges[:-1], edges[1:], counts, strict=True)]


def parts(sample: Sample) -> Iterator[tuple[str, Sample]]:
    """What does not see each other: the answers of a row with preferences, each with its role; or the sample itself.
    The loss is on no answer to another row's prompt."""
    if not sample.answers:
        yield "", sample
    first = 0
    for role, length in sample.answers:
        last = first + length
        has_loss = role != "mismatched"
        spans = [tuple((at - first, n) for at, n in item.spans if first <= at < last) for item in sample.items]
        items = tuple(
            replace(item, spans=own, is_target=item.is_target and has_loss)
            for item, own in zip(sample.items, spans, strict=True)
            if own
        )
        yield role, Sample(sample.id, sample.ids[first:last], sample.targets[first:last] & has_loss, items)
        first = last


def pieces(sample: Sample, decode: Callable[[list[int]], str]) -> Iterator[Piece]:
    """The tokens of a sample as they are written, and what becomes of each."""
    ids, has_loss = sample.ids.tolist(), sample.targets.copy()
    has_loss[0] = False
    inside = [(*span, item) for item in sample.items for span in item.spans if item.port.role != "follower"]
    beside = [(sum(item.spans[-1]), 0, item) for item in sample.items if item.port.role == "follower" and item.spans]
    runs = sorted([*inside, *beside], key=lambda run: run[0])
    at = 0
    for first, places, item in runs:
        yield from text_pieces(ids[at:first], has_loss[at:first].tolist(), decode)
        target = " target" if item.is_target else ""
        count = item.targets if item.port.role == "follower" else places
        yield Piece(f"[{item.media.modality} x {count}{target}]", places, item.is_target, item)
        at = first + places
    yield from text_pieces(ids[at:], has_loss[at:].tolist(), decode)


def text_pieces(ids: list[int], has_loss: list[bool], decode: Callable[[list[int]], str]) -> Iterator[Piece]:
    """A token's text is what it adds to the text of the one before it: alone, some would lose their leading space."""
    context = start = 0
    for end in range(1, len(ids) + 1):
        before, text = decode(ids[context:start]), decode(ids[context:end])
        if text.endswith("\ufffd") and end - start < 4 and end < len(ids):
            continue  # the bytes of a character may be several tokens
        yield Piece(visible(text[len(before) :]), end - start, any(has_loss[start:end]))
        context, start = start, end


def shorten(shown: list[Piece], most: int) -> list[Piece]:
    """The beginning and the end of what is longer than `most`."""
    if len(shown) <= most:
        return shown
    left_out = sum(piece.tokens for piece in shown[most // 2 : -(most // 2)])
    return [*shown[: most // 2], Piece(f" ... {left_out:,} tokens ... ", left_out, False), *shown[-(most // 2) :]]


def visible(text: str) -> str:
    """Control characters are written as escapes: they would command the terminal, or hide."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)
