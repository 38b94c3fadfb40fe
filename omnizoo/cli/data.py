"""`omnizoo data inspect`: show samples as the model receives them, and statistics about the data of a run.

The output is printed and, with `--out`, written as an HTML page with thumbnails. The action `precompute` is in
data_precompute.py.
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
from omnizoo.hub.resolve import resolve_names

if TYPE_CHECKING:
    from omnizoo.data.loading.bad_rows import BadRowGroup
    from omnizoo.data.loading.inspection import InspectedSample, Inspection, PortMix, SourceMix, TokenText
    from omnizoo.data.loading.reader import Reader
    from omnizoo.modalities.item import MediaItem

LOSS = "bold green"
NO_LOSS = "dim"
ROLE = "bold underline"
COLORS = ("blue", "magenta", "cyan", "yellow", "red", "white")  # colors of modalities, in the order of the config
MAX_PIECES = 300  # maximum number of printed pieces per sample
MAX_BAD_GROUPS = 20  # maximum number of printed groups of bad rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `omnizoo data`."""
    actions = ("inspect", "precompute")
    parser.add_argument("action", metavar="ACTION", choices=actions, help="`inspect` or `precompute`")
    parser.add_argument("config", metavar="CONFIG", help="YAML file")
    parser.add_argument("--samples", metavar="N", type=int, help="inspect: number of samples to show (default: 5)")
    parser.add_argument(
        "--out",
        metavar="PATH",
        type=path_argument,
        help="inspect: HTML file for samples with thumbnails, and statistics (default: none); precompute: folder to "
        "write (required)",
    )
    parser.add_argument(
        "--nproc", metavar="N", type=int, help="precompute: number of processes to start on this machine (default: 1)"
    )
    parser.add_argument(
        "--shard-rows", metavar="N", type=int, help="precompute: number of rows per shard (default: 64)"
    )


def run(args: argparse.Namespace) -> int:
    """Run the action. Returns the exit code."""
    unused = {"inspect": ("nproc", "shard_rows"), "precompute": ("samples",)}[args.action]
    for name in unused:
        if getattr(args, name) is not None:
            option = name.replace("_", "-")
            raise UserError(f"--{option}: not an option of `omnizoo data {args.action}`. Remove it.")
    if args.action == "precompute":
        from omnizoo.cli import data_precompute

        return data_precompute.run(args)
    if args.samples is None:
        args.samples = 5
    return inspect(args)


def inspect(args: argparse.Namespace) -> int:
    """Print samples and statistics, and write the page. Returns 0; bad rows raise an error as in training."""
    config = load_config(args.config, args.overrides)
    out: Path | None = args.out
    if args.samples < 0:
        raise UserError(f"--samples: {args.samples}; expected a number of samples, at least 0")
    if out is not None and out.is_dir():
        raise UserError(f"--out: {out} is a folder. Pass the name of an HTML file to write.")
    config, _ = resolve_names(config, with_weights=False)
    from omnizoo.cli.data_page import bad_rows_page, data_page
    from omnizoo.data.loading.inspection import NoUsableRowsError, inspect_data, one_lane
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
        except NoUsableRowsError as error:
            if out is not None:
                save(out, bad_rows_page(Path(args.config).name, error.bad_groups))
            for line in bad_row_lines(error.bad_groups):
                console.print(line)
            raise
        if out is not None:
            save(out, data_page(Path(args.config).name, inspection, reader))
    is_plain = console.no_color or console.color_system is None
    for renderable in describe(inspection, reader, is_plain):
        console.print(renderable)
    if out is not None:
        console.print(Text(f"written: {out}"), soft_wrap=True)
    if inspection.bad_rows and config.data.on_bad_row == "error":
        raise UserError(stop_message(inspection.bad_rows[0]))
    check_sources(inspection)
    return 0


def check_sources(inspection: "Inspection") -> None:
    """Raise `UserError` if a source has no usable rows. It would stop the run even if bad rows are skipped."""
    for number, source in enumerate(inspection.sources):
        if source.reason_without_rows:
            raise UserError(
                f"data.sources.{number}: none of the {source.rows_read:,} rows read from {source.path} is usable; the "
                f"last one ({source.reason_without_rows}). Fix the rows, or remove the source."
            )


def save(out: Path, page: str) -> None:
    """Write the page to the file in `--out`."""
    from omnizoo.reporting.run_folder import replace_file

    try:
        replace_file(out, page)
    except OSError as error:
        raise UserError(f"--out: cannot write {out}: {error.strerror}") from None


def facts(inspection: "Inspection") -> dict[str, tuple[str, str]]:
    """Return the most important statistics: name -> (value, note)."""
    lengths = sorted(inspection.lengths)
    num_samples = len(lengths)
    num_tokens = sum(lengths)
    num_rows = sum(source.rows for source in inspection.sources)
    num_rows_read = sum(source.rows_read for source in inspection.sources)
    num_bad = sum(source.bad_rows for source in inspection.sources)
    num_targets = sum(sample.loss_tokens for sample in inspection.samples)

    repeated = "; some rows were split or read again" if num_samples > inspection.rows else ""
    counters = inspection.counters
    num_split = counters.split_overlong
    num_truncated = counters.truncated_overlong
    num_dropped = counters.dropped_overlong
    figures = {
        "Samples": (f"{num_samples:,}", f"from {inspection.rows:,} of {num_rows:,} rows{repeated}"),
        "Length": (f"{statistics.median(lengths):,.0f}", f"median; mean {num_tokens / num_samples:,.0f} tokens"),
        "Longest": (f"{lengths[-1]:,}", inspection.longest.where),
        "Expected fill": (percent(inspection.fill, 1), f"of {inspection.packs:,} packs"),
        "Tokens with loss": (percent(num_targets, num_tokens), f"{num_targets:,} of {num_tokens:,}"),
        "Text only": (percent(inspection.text_only, num_samples), f"{inspection.text_only:,} samples"),
        "Longer than a pack": (
            f"{num_split + num_truncated + num_dropped:,}",
            f"rows: {num_truncated:,} truncated, {num_dropped:,} dropped, {num_split:,} split",
        ),
    }
    if counters.few_targets:
        figures["Few targets"] = (f"{counters.few_targets:,}", "samples dropped because of data.min_targets")
    if counters.beyond_positions:
        note = f"samples longer than the {inspection.most_positions} positions of the model"
        figures["Beyond positions"] = (f"{counters.beyond_positions:,}", note)
    figures["Bad rows"] = (f"{num_bad:,}", f"of {num_rows_read:,} different rows read")
    return figures


def tables(inspection: "Inspection") -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Yield the title, the columns and the rows of each table."""
    num_samples = len(inspection.samples)
    num_tokens = sum(inspection.lengths)
    source_rows = []
    columns = ["source", "rows", "bad rows", "schema", "% of samples", "% of tokens", "mean length"]
    for source in inspection.sources:
        mean_length = f"{source.tokens / source.samples:,.0f}" if source.samples else "-"
        cells = [
            source.path,
            f"{source.rows:,}",
            f"{source.bad_rows:,} of {source.rows_read:,} read",
            describe_schema(source),
            percent(source.samples, num_samples),
            percent(source.tokens, num_tokens),
            mean_length,
        ]
        source_rows.append(cells)
    title = f"Sources, mixed by {inspection.mixed_by}" if len(source_rows) > 1 else "Sources"
    yield title, columns, source_rows

    if not inspection.ports:
        return
    total_cost = sum(port.cost for port in inspection.ports)
    port_rows = []
    for port in inspection.ports:
        cells = [
            str(port.port),
            percent(port.samples, num_samples),
            f"{port.items:,}",
            f"{port.tokens:,}",
            percent(port.tokens, num_tokens),
            percent(port.cost, total_cost),
            describe_costliest(port),
        ]
        port_rows.append(cells)
    columns = ["module", "% of samples", "items", "tokens", "% of tokens", "% of media FLOPs", "costliest item"]
    yield "Media", columns, port_rows


def describe_costliest(port: "PortMix") -> str:
    """Describe the costliest item of a module: the row of the item, and its share of the module's FLOPs."""
    if not port.cost:
        return "-"
    share = percent(port.costliest.size.cost, port.cost)
    return f"{describe_item(port.costliest)} in {port.where}: {share} of the module's FLOPs"


def describe_schema(source: "SourceMix") -> str:
    """Return the row schema of a source and why it was chosen, or all schemas with their number of samples."""
    if source.reason_without_rows:
        return "no usable row"
    if len(source.formats) == 1:
        (name,) = source.formats
        return f"{name}: {source.why}" if source.why else name
    return ", ".join(f"{name} ({count:,})" for name, count in source.formats.items()) or "-"


def bars(inspection: "Inspection") -> Iterator[tuple[str, int, float]]:
    """Yield each bar of the histogram of sample lengths: its label, number of samples, and width (longest bar: 1)."""
    from omnizoo.data.loading.inspection import histogram

    bins = histogram(inspection.lengths)
    max_count = max(count for *_, count in bins)
    for first, last, count in bins:
        label = f"{first:,}" if first == last else f"{first:,} - {last:,}"
        yield label, count, count / max_count


def describe_item(item: "MediaItem") -> str:
    """Describe a media item: its name and its number of placeholder tokens."""
    from omnizoo.data.loading.inspection import visible

    return f"{visible(item.media.name)} ({item.size.num_placeholders:,} placeholder tokens)"


def describe_sample(sample: "InspectedSample") -> str:
    """Describe a sample: its row, and how many tokens and targets it has."""
    part = sample.sample.id.part
    suffix = f", part {part}" if part else ""
    return f"{sample.where}{suffix}: {sample.tokens:,} tokens, loss on {sample.loss_tokens:,}"


def percent(part: float, total: float) -> str:
    """Return `part` as a percentage of `total`, or a dash if the total is 0."""
    return f"{100 * part / total:.1f}%" if total else "-"


def all_pieces(sample: "InspectedSample", reader: "Reader", max_pieces: int) -> "Iterator[tuple[str, list[TokenText]]]":
    """Yield the text of a sample as a title and at most `max_pieces` pieces.

    For a row with preferences, each response is yielded separately, with its role as the title.
    """
    from omnizoo.data.loading.inspection import parts, pieces, shorten

    decode = partial(reader.text_renderer.backend.decode, skip_special_tokens=False)
    for role, part in parts(sample.sample):
        title = f"{role}:" if role else ""
        yield title, shorten(list(pieces(part, decode)), max_pieces)


def describe(inspection: "Inspection", reader: "Reader", is_plain: bool) -> Iterator[RenderableType]:
    """Yield everything to print. If `is_plain`, brackets instead of colors mark target tokens."""
    yield from bad_row_lines(inspection.bad_groups)
    colors = dict(zip(reader.modalities, itertools.cycle(COLORS), strict=False))
    legend = [Text("⟦loss⟧" if is_plain else "loss", LOSS), Text("no loss", NO_LOSS)]
    for name, color in colors.items():
        legend.append(Text(f"[{name} x placeholder tokens]", f"reverse {color}"))
    yield Text(" ").join(legend)

    for sample in inspection.shown:
        yield Text(f"\n{describe_sample(sample)}", "bold")
        for title, pieces in all_pieces(sample, reader, MAX_PIECES):
            if title:
                yield Text(title, ROLE)
            yield color_tokens(pieces, colors, is_plain)

    yield ""
    figures = Table.grid(padding=(0, 2))
    for name, (value, note) in facts(inspection).items():
        figures.add_row(name, Text(value, "bold"), Text(note, "dim"))
    yield figures

    lengths = Table(title="Lengths in tokens", title_justify="left", box=None, show_header=False)
    for label, count, relative_width in bars(inspection):
        bar = "█" * math.ceil(40 * relative_width)
        lengths.add_row(Text(label, justify="right"), f"{count:,}", Text(bar, "blue"))
    yield lengths
    for title, columns, rows in tables(inspection):
        table = Table(*columns, title=title, title_justify="left")
        for row in rows:
            table.add_row(*(Text(cell, overflow="fold") for cell in row))
        yield table


def bad_row_lines(groups: "Sequence[BadRowGroup]") -> Iterator[Text]:
    """Yield a line in red for each of the largest groups of bad rows, and the number of rows in the other groups."""
    from omnizoo.data.loading.inspection import visible

    for group in groups[:MAX_BAD_GROUPS]:
        yield Text.assemble((f"{group.title}: ", "bold red"), (visible(group.first.message), "red"))
    num_hidden = sum(group.count for group in groups[MAX_BAD_GROUPS:])
    if num_hidden:
        yield Text(f"and {num_hidden:,} more bad rows for other reasons", "red")


def color_tokens(pieces: "Sequence[TokenText]", colors: dict[str, str], is_plain: bool) -> Text:
    """Return the pieces of a sample as text, with a style for targets, other tokens and media."""
    text = Text()
    for has_loss, group in itertools.groupby(pieces, key=lambda piece: piece.has_loss):
        has_brackets = is_plain and has_loss
        text.append("⟦" if has_brackets else "")
        for piece in group:
            style = LOSS if has_loss else NO_LOSS
            if piece.item is not None:
                emphasis = "bold underline " if has_loss else ""
                style = f"{emphasis}reverse {colors[piece.item.media.modality]}"
            text.append(piece.text.replace("\n", "↵\n"), style)
        text.append("⟧" if has_brackets else "")
    text.rstrip()
    return text
