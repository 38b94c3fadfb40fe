"""`omnizoo data inspect`: samples as the model sees them, and what the data of a run is made of.

On the terminal, and with `--out` as one HTML page with thumbnails that needs no network and runs no script.
"""

import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from omnizoo.config.errors import UserError
from omnizoo.config.load import load_config

if TYPE_CHECKING:
    from omnizoo.data.inspect import Found, Inspection, Piece, SourceMix
    from omnizoo.data.reader import Reader
    from omnizoo.modalities.base import Item

LOSS, NO_LOSS, ROLE = "bold green", "dim", "bold underline"
COLOURS = ("blue", "magenta", "cyan", "yellow", "red", "white")  # of modalities, in the order of the config
ON_TERMINAL = 300  # tokens of a sample that are shown
LISTED = 20  # bad rows


def inspect(path: str, overrides: list[str], samples: int, out: Path | None) -> int:
    config = load_config(path, overrides)
    if samples < 0:
        raise UserError(f"--samples is {samples}; expected how many samples to show, at least 0")
    if out is not None and out.is_dir():
        raise UserError(f"--out {out} is a folder; expected the name of an HTML file to write")
    from omnizoo.assembly.assemble import assemble
    from omnizoo.cli.data_page import red_table, whole_page, write_page
    from omnizoo.data.inspect import TooManyBadError, inspect_data, one_lane, stops_at

    console = Console()
    if not console.is_terminal:
        console.width = 120
    with console.status("reading rows"):
        reader = assemble(one_lane(config)).reader()
        try:
            inspection = inspect_data(reader, samples)
        except TooManyBadError as error:
            if out is not None:
                save(out, whole_page(Path(path).name, [red_table(error.bad_rows)]))
            for line in red_lines(error.bad_rows):
                console.print(line)
            raise
        if out is not None:
            save(out, write_page(Path(path).name, inspection, reader))
    for part in describe(inspection, reader, plain=console.no_color or console.color_system is None):
        console.print(part)
    if out is not None:
        console.print(Text(f"written: {out}"), soft_wrap=True)
    if inspection.bad_rows and config.data.on_bad_row == "error":
        raise UserError(stops_at(inspection.bad_rows[0]))
    return 0


def save(out: Path, page: str) -> None:
    from omnizoo.training.metrics import replace_file

    try:
        replace_file(out, page)
    except OSError as error:
        raise UserError(f"--out {out} cannot be written: {error.strerror}") from None


# What is said, in either form


def facts(inspection: "Inspection") -> dict[str, tuple[str, str]]:
    """The data in a handful of figures: value and note by name."""
    from omnizoo.data.inspect import visible

    lengths = sorted(inspection.lengths)
    samples, tokens, rows = len(lengths), sum(lengths), sum(source.rows for source in inspection.sources)
    learnt = sum(found.loss_tokens for found in inspection.samples)
    counters = inspection.counters
    split, cut, dropped = counters.split_overlong, counters.truncated_overlong, counters.dropped_overlong
    rare = {
        "Few targets": (f"{counters.few_targets:,}", "samples left out (data.min_targets)"),
        "Beyond positions": (
            f"{counters.beyond_positions:,}",
            f"samples longer than the {inspection.most_positions} positions that the model was made for",
        ),
    }
    rare = {name: told for name, told in rare.items() if told[0] != "0"}
    return {
        "Samples": (f"{samples:,}", f"looked at; the sources have {rows:,} rows"),
        "Length": (f"{statistics.median(lengths):,.0f}", f"median; mean {tokens / samples:,.0f} tokens"),
        "Longest": (f"{lengths[-1]:,}", visible(inspection.longest.where)),
        "Expected fill": (percent(inspection.fill), f"of {inspection.packs:,} packs"),
        "Tokens with loss": (percent(learnt / tokens), f"{learnt:,} of {tokens:,}"),
        "Text only": (percent(inspection.text_only / samples), f"{inspection.text_only:,} samples"),
        "Longer than a pack": (
            f"{split + cut + dropped:,}",
            f"rows: {cut:,} cut off, {dropped:,} left out, {split:,} cut into pieces",
        ),
        **rare,
        "Bad rows": (f"{len(inspection.bad_rows):,}", f"of {inspection.rows:,} read"),
    }


def tables(inspection: "Inspection") -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Title, columns, rows."""
    samples, tokens = len(inspection.samples), sum(inspection.lengths)
    rows = [
        [
            source.path,
            f"{source.rows:,}",
            taken_as(source),
            percent(source.samples / samples),
            percent(source.tokens / tokens),
            f"{source.tokens / source.samples:,.0f}" if source.samples else "-",
        ]
        for source in inspection.sources
    ]
    yield "Sources", ["source", "rows", "taken as", "of samples", "of tokens", "mean length"], rows
    cost = sum(port.cost for port in inspection.ports)
    rows = [
        [
            str(port.port),
            percent(port.samples / samples),
            f"{port.items:,}",
            f"{port.tokens:,}",
            percent(port.tokens / tokens),
            percent(port.cost / cost) if cost else "-",
            f"{describe_item(port.costliest)} in {port.where}: {percent(port.costliest.size.cost / port.cost)}"
            if port.cost
            else "-",
        ]
        for port in inspection.ports
    ]
    columns = [
        "module",
        "in samples",
        "items",
        "tokens",
        "of tokens",
        "of media work",
        "its costliest item, share of its work",
    ]
    if rows:
        yield "Media", columns, rows


def taken_as(source: "SourceMix") -> str:
    """The format of its rows, and by which rule; where there are several, how many samples of each."""
    if len(source.formats) == 1:
        return f"{next(iter(source.formats))}: {source.why}" if source.why else next(iter(source.formats))
    return ", ".join(f"{name} ({count:,})" for name, count in source.formats.items()) or "-"


def bars(inspection: "Inspection") -> Iterator[tuple[str, int, float]]:
    """Of the histogram of lengths: what it is about, samples, and how long it is next to the longest."""
    from omnizoo.data.inspect import histogram

    bins = histogram(inspection.lengths)
    most = max(count for *_, count in bins)
    for first, last, count in bins:
        yield f"{first:,}" if first == last else f"{first:,} - {last:,}", count, count / most


def describe_item(item: "Item") -> str:
    return f"{item.media.name} ({item.size.places:,} places)"


def describe_sample(found: "Found") -> str:
    part = f", part {found.sample.id.part}" if found.sample.id.part else ""
    return f"{found.where}{part}: {found.tokens:,} tokens, loss on {found.loss_tokens:,}"


def percent(share: float) -> str:
    return f"{100 * share:.1f}%"


def all_pieces(found: "Found", reader: "Reader", most: int) -> "Iterator[tuple[str, list[Piece]]]":
    """Of a sample; or of each answer of a row with preferences, after what it is."""
    from omnizoo.data.inspect import parts, pieces, shorten

    def decode(ids: list[int]) -> str:
        text: str = reader.renderer.backend.decode(ids, skip_special_tokens=False)
        return text

    for role, part in parts(found.sample):
        yield f"{role}:" if role else "", shorten(list(pieces(part, decode)), most)


# On the terminal


def describe(inspection: "Inspection", reader: "Reader", plain: bool) -> Iterator[RenderableType]:
    """`plain`: there are no colours, so brackets say where the loss is."""
    from omnizoo.data.inspect import visible

    yield from red_lines(inspection.bad_rows)
    colours = dict(zip(reader.modalities, itertools.cycle(COLOURS), strict=False))
    legend = [("⟦loss⟧" if plain else "loss", LOSS), ("no loss", NO_LOSS)]
    legend += [(f"[{name} x places]", f"reverse {colour}") for name, colour in colours.items()]
    yield Text(" ").join(Text(*part) for part in legend)
    for found in inspection.shown:
        yield Text(f"\n{visible(describe_sample(found))}", "bold")
        for title, shown in all_pieces(found, reader, ON_TERMINAL):
            if title:
                yield Text(title, ROLE)
            yield colour_tokens(shown, colours, plain)
    yield ""
    grid = Table.grid(padding=(0, 2))
    for name, (value, note) in facts(inspection).items():
        grid.add_row(name, Text(value, "bold"), Text(note, "dim"))
    yield grid
    grid = Table(title="Lengths in tokens", title_justify="left", box=None, show_header=False)
    for span, count, share in bars(inspection):
        grid.add_row(Text(span, justify="right"), f"{count:,}", Text("█" * math.ceil(40 * share), "blue"))
    yield grid
    for title, columns, rows in tables(inspection):
        table = Table(*columns, title=title, title_justify="left")
        for row in rows:
            table.add_row(*(Text(visible(cell), overflow="fold") for cell in row))
        yield table


def red_lines(bad_rows: Sequence[str]) -> Iterator[Text]:
    from omnizoo.data.inspect import visible

    for message in bad_rows[:LISTED]:
        yield Text.assemble(("bad row: ", "bold red"), (visible(message), "red"))
    if (more := len(bad_rows) - LISTED) > 0:
        yield Text(f"and {more:,} more bad rows", "red")


def colour_tokens(shown: "Sequence[Piece]", colours: dict[str, str], plain: bool) -> Text:
    text = Text()
    for has_loss, group in itertools.groupby(shown, key=lambda piece: piece.has_loss):
        text.append("⟦" if plain and has_loss else "")
        for piece in group:
            style = LOSS if has_loss else NO_LOSS
            if piece.item is not None:
                style = f"{'bold underline ' if has_loss else ''}reverse {colours[piece.item.media.modality]}"
            text.append(piece.text.replace("\n", "↵\n"), style)
        text.append("⟧" if plain and has_loss else "")
    text.rstrip()
    return text
