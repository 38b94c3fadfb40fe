"""`omnizoo data inspect`: show samples as the model receives them, and statistics of the data of a run.

The output is printed and, with `--out`, written as an HTML page with thumbnails.
"""

import argparse
import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from omnizoo.cli.parser import path_argument
from omnizoo.config.errors import UserError
from omnizoo.config.load import load_config

if TYPE_CHECKING:
    from omnizoo.data.loading.inspection import InspectedSample, Inspection, PortMix, SourceMix, TokenText
    from omnizoo.data.loading.reader import Reader
    from omnizoo.modalities.item import MediaItem

LOSS, NO_LOSS, ROLE = "bold green", "dim", "bold underline"
COLORS = ("blue", "magenta", "cyan", "yellow", "red", "white")  # colors of modalities, in the order of the config
ON_TERMINAL = 300  # maximum number of pieces of a sample that are printed
LISTED = 20  # maximum number of bad rows that are printed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", metavar="inspect", choices=("inspect",), help="show samples and figures")
    parser.add_argument("config", metavar="CONFIG")
    parser.add_argument("--samples", metavar="N", type=int, default=5, help="number of samples to show (default: 5)")
    parser.add_argument(
        "--out", metavar="FILE", type=path_argument, help="HTML file for a page with all of it and thumbnails"
    )


def run(args: argparse.Namespace) -> int:
    config = load_config(args.config, args.overrides)
    out: Path | None = args.out
    if args.samples < 0:
        raise UserError(f"--samples is {args.samples}; expected how many samples to show, at least 0")
    if out is not None and out.is_dir():
        raise UserError(f"--out {out} is a folder; expected the name of an HTML file to write")
    from omnizoo.cli.data_page import bad_rows_page, data_page
    from omnizoo.data.loading.inspection import TooManyBadError, inspect_data, one_lane
    from omnizoo.data.rendering.template_limits import memory_limits
    from omnizoo.data.row import stop_message
    from omnizoo.training.setup import build_bundle

    console = Console()
    if not console.is_terminal:
        console.width = 120
    with console.status("reading rows"), memory_limits():
        reader = build_bundle(one_lane(config)).reader()
        try:
            inspection = inspect_data(reader, args.samples)
        except TooManyBadError as error:
            if out is not None:
                save(out, bad_rows_page(Path(args.config).name, error.bad_rows))
            for line in red_lines(error.bad_rows):
                console.print(line)
            raise
        if out is not None:
            save(out, data_page(Path(args.config).name, inspection, reader))
    for part in describe(inspection, reader, plain=console.no_color or console.color_system is None):
        console.print(part)
    if out is not None:
        console.print(Text(f"written: {out}"), soft_wrap=True)
    if inspection.bad_rows and config.data.on_bad_row == "error":
        raise UserError(stop_message(inspection.bad_rows[0]))
    return 0


def save(out: Path, page: str) -> None:
    from omnizoo.reporting.run_folder import replace_file

    try:
        replace_file(out, page)
    except OSError as error:
        raise UserError(f"--out {out} cannot be written: {error.strerror}") from None


def facts(inspection: "Inspection") -> dict[str, tuple[str, str]]:
    """Return the most important statistics: name -> (value, note)."""
    lengths = sorted(inspection.lengths)
    num_samples, num_tokens = len(lengths), sum(lengths)
    num_rows = sum(source.rows for source in inspection.sources)
    num_targets = sum(found.loss_tokens for found in inspection.samples)
    counters = inspection.counters
    split, cut, dropped = counters.split_overlong, counters.truncated_overlong, counters.dropped_overlong
    figures = {
        "Samples": (f"{num_samples:,}", f"looked at; the sources have {num_rows:,} rows"),
        "Length": (f"{statistics.median(lengths):,.0f}", f"median; mean {num_tokens / num_samples:,.0f} tokens"),
        "Longest": (f"{lengths[-1]:,}", inspection.longest.where),
        "Expected fill": (percent(inspection.fill, 1), f"of {inspection.packs:,} packs"),
        "Tokens with loss": (percent(num_targets, num_tokens), f"{num_targets:,} of {num_tokens:,}"),
        "Text only": (percent(inspection.text_only, num_samples), f"{inspection.text_only:,} samples"),
        "Longer than a pack": (
            f"{split + cut + dropped:,}",
            f"rows: {cut:,} cut off, {dropped:,} left out, {split:,} cut into pieces",
        ),
    }
    if counters.few_targets:
        figures["Few targets"] = (f"{counters.few_targets:,}", "samples left out (data.min_targets)")
    if counters.beyond_positions:
        note = f"samples longer than the {inspection.most_positions} positions that the model was made for"
        figures["Beyond positions"] = (f"{counters.beyond_positions:,}", note)
    figures["Bad rows"] = (f"{len(inspection.bad_rows):,}", f"of {inspection.rows:,} read")
    return figures


def tables(inspection: "Inspection") -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Yield the title, the columns and the rows of each table."""
    num_samples, num_tokens = len(inspection.samples), sum(inspection.lengths)
    rows = [
        [
            source.path,
            f"{source.rows:,}",
            taken_as(source),
            percent(source.samples, num_samples),
            percent(source.tokens, num_tokens),
            f"{source.tokens / source.samples:,.0f}" if source.samples else "-",
        ]
        for source in inspection.sources
    ]
    yield "Sources", ["source", "rows", "taken as", "of samples", "of tokens", "mean length"], rows
    if not inspection.ports:
        return
    cost = sum(port.cost for port in inspection.ports)
    rows = [
        [
            str(port.port),
            percent(port.samples, num_samples),
            f"{port.items:,}",
            f"{port.tokens:,}",
            percent(port.tokens, num_tokens),
            percent(port.cost, cost),
            costliest(port),
        ]
        for port in inspection.ports
    ]
    share = "its costliest item, share of its work"
    yield "Media", ["module", "in samples", "items", "tokens", "of tokens", "of media work", share], rows


def costliest(port: "PortMix") -> str:
    if not port.cost:
        return "-"
    return f"{describe_item(port.costliest)} in {port.where}: {percent(port.costliest.size.cost, port.cost)}"


def taken_as(source: "SourceMix") -> str:
    """Return the schema of the rows and the rule that chose it, or the number of samples of each schema."""
    if len(source.formats) == 1:
        (name,) = source.formats
        return f"{name}: {source.why}" if source.why else name
    return ", ".join(f"{name} ({count:,})" for name, count in source.formats.items()) or "-"


def bars(inspection: "Inspection") -> Iterator[tuple[str, int, float]]:
    """Yield the bars of the length histogram: label, number of samples, length relative to the longest bar."""
    from omnizoo.data.loading.inspection import histogram

    bins = histogram(inspection.lengths)
    most = max(count for *_, count in bins)
    for first, last, count in bins:
        label = f"{first:,}" if first == last else f"{first:,} - {last:,}"
        yield label, count, count / most


def describe_item(item: "MediaItem") -> str:
    from omnizoo.data.loading.inspection import visible

    return f"{visible(item.media.name)} ({item.size.num_placeholders:,} placeholder tokens)"


def describe_sample(found: "InspectedSample") -> str:
    part = f", part {found.sample.id.part}" if found.sample.id.part else ""
    return f"{found.where}{part}: {found.tokens:,} tokens, loss on {found.loss_tokens:,}"


def percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f}%" if whole else "-"


def all_pieces(found: "InspectedSample", reader: "Reader", most: int) -> "Iterator[tuple[str, list[TokenText]]]":
    """Yield the title and the pieces of a sample, or of each response of a preference row."""
    from omnizoo.data.loading.inspection import parts, pieces, shorten

    decode = partial(reader.renderer.backend.decode, skip_special_tokens=False)
    for role, part in parts(found.sample):
        yield f"{role}:" if role else "", shorten(list(pieces(part, decode)), most)


def describe(inspection: "Inspection", reader: "Reader", plain: bool) -> Iterator[RenderableType]:
    """Yield everything to print. If `plain`, brackets instead of colors mark tokens with loss."""
    yield from red_lines(inspection.bad_rows)
    colors = dict(zip(reader.modalities, itertools.cycle(COLORS), strict=False))
    legend = [("⟦loss⟧" if plain else "loss", LOSS), ("no loss", NO_LOSS)]
    legend += [(f"[{name} x places]", f"reverse {color}") for name, color in colors.items()]
    yield Text(" ").join(Text(*part) for part in legend)
    for found in inspection.shown:
        yield Text(f"\n{describe_sample(found)}", "bold")
        for title, shown in all_pieces(found, reader, ON_TERMINAL):
            if title:
                yield Text(title, ROLE)
            yield color_tokens(shown, colors, plain)
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
            table.add_row(*(Text(cell, overflow="fold") for cell in row))
        yield table


def red_lines(bad_rows: Sequence[str]) -> Iterator[Text]:
    for message in bad_rows[:LISTED]:
        yield Text.assemble(("bad row: ", "bold red"), (message, "red"))
    if (more := len(bad_rows) - LISTED) > 0:
        yield Text(f"and {more:,} more bad rows", "red")


def color_tokens(shown: "Sequence[TokenText]", colors: dict[str, str], plain: bool) -> Text:
    text = Text()
    for has_loss, group in itertools.groupby(shown, key=lambda piece: piece.has_loss):
        text.append("⟦" if plain and has_loss else "")
        for piece in group:
            style = LOSS if has_loss else NO_LOSS
            if piece.item is not None:
                style = f"{'bold underline ' if has_loss else ''}reverse {colors[piece.item.media.modality]}"
            text.append(piece.text.replace("\n", "↵\n"), style)
        text.append("⟧" if plain and has_loss else "")
    text.rstrip()
    return text
