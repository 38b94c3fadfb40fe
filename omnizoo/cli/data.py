"""`omnizoo data inspect`: samples as the model sees them, and what the data of a run is made of.

On the terminal, and with `--out` as one HTML page with thumbnails that needs no network and runs no script.
"""

import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from omnizoo.config.errors import UserError
from omnizoo.config.load import load_config

if TYPE_CHECKING:
    from omnizoo.data.inspect import Found, Inspection, Piece
    from omnizoo.data.loader import Reader
    from omnizoo.modalities.base import Item

LOSS, NO_LOSS, ROLE = "bold green", "dim", "bold underline"
COLOURS = ("blue", "magenta", "cyan", "yellow", "red", "white")  # of modalities, in the order of the config
HUES = (215, 290, 180, 40, 0, 100)
ON_TERMINAL, ON_PAGE = 300, 4000  # tokens of a sample that are shown
LISTED = 20  # bad rows


def inspect(path: str, overrides: list[str], samples: int, out: Path | None) -> int:
    config = load_config(path, overrides)
    if samples < 0:
        raise UserError(f"--samples is {samples}; expected how many samples to show, at least 0")
    if out is not None and out.is_dir():
        raise UserError(f"--out {out} is a folder; expected the name of an HTML file to write")
    from omnizoo.assembly.assemble import assemble
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
                save(out, page(Path(path).name, [red_table(error.bad_rows)]))
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
    cut, dropped = inspection.counters.split_overlong, inspection.counters.dropped_overlong
    return {
        "Samples": (f"{samples:,}", f"looked at; the sources have {rows:,} rows"),
        "Length": (f"{statistics.median(lengths):,.0f}", f"median; mean {tokens / samples:,.0f} tokens"),
        "Longest": (f"{lengths[-1]:,}", visible(inspection.longest.where)),
        "Expected fill": (percent(inspection.fill), f"of {inspection.packs:,} packs"),
        "Tokens with loss": (percent(learnt / tokens), f"{learnt:,} of {tokens:,}"),
        "Text only": (percent(inspection.text_only / samples), f"{inspection.text_only:,} samples"),
        "Longer than a pack": (f"{cut + dropped:,}", f"{cut:,} cut, {dropped:,} dropped"),
        "Bad rows": (f"{len(inspection.bad_rows):,}", f"of {inspection.rows:,} read"),
    }


def tables(inspection: "Inspection") -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Title, columns, rows."""
    samples, tokens = len(inspection.samples), sum(inspection.lengths)
    rows = [
        [
            source.path,
            f"{source.rows:,}",
            percent(source.samples / samples),
            percent(source.tokens / tokens),
            f"{source.tokens / source.samples:,.0f}" if source.samples else "-",
        ]
        for source in inspection.sources
    ]
    yield "Sources", ["source", "rows", "of samples", "of tokens", "mean length"], rows
    cost = sum(port.cost for port in inspection.ports)
    rows = [
        [
            str(port.port),
            percent(port.samples / samples),
            f"{port.items:,}",
            f"{port.tokens:,}",
            percent(port.tokens / tokens),
            percent(port.cost / cost) if cost else "-",
            f"{describe_item(port.costliest)} in {port.where}",
        ]
        for port in inspection.ports
    ]
    columns = ["module", "in samples", "items", "tokens", "of tokens", "of media cost", "its costliest item"]
    if rows:
        yield "Media", columns, rows


def bars(inspection: "Inspection") -> Iterator[tuple[str, int, float]]:
    """Of the histogram of lengths: what it is about, samples, and how long it is next to the longest."""
    from omnizoo.data.inspect import histogram

    bins = histogram(inspection.lengths)
    most = max(count for *_, count in bins)
    for first, last, count in bins:
        yield f"{first:,}" if first == last else f"{first:,} - {last:,}", count, count / most


def describe_item(item: "Item") -> str:
    return f"{item.media.name} (tokens: {item.size.places:,}, cost: {item.size.cost:.3g})"


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
    yield from red_lines(inspection.bad_rows)


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


# As a page


def write_page(name: str, inspection: "Inspection", reader: "Reader") -> str:
    from omnizoo.data.inspect import visible

    numbers = {modality: i % len(HUES) for i, modality in enumerate(reader.modalities)}
    tints = "".join(f".m{i}{{--hue:{hue}}}" for i, hue in enumerate(HUES))
    cards = "".join(
        f"<div><dt>{escape(what)}</dt><dd>{escape(value)}</dd><small>{escape(note)}</small></div>"
        for what, (value, note) in facts(inspection).items()
    )
    legend = "".join(f"<u class=m{i}>[{escape(modality)} x places]</u> " for modality, i in numbers.items())
    lines = "".join(
        f"<tr><td>{span}<td>{count:,}<td><div style='width:{100 * share:.1f}%'></div></tr>"
        for span, count, share in bars(inspection)
    )
    body = [
        f"<dl>{cards}</dl>",
        f"<h2>Lengths in tokens</h2><div class=scroll><table class=bars>{lines}</table></div>",
    ]
    for title, columns, rows in tables(inspection):
        head = "".join(f"<th>{escape(column)}</th>" for column in columns)
        cells = ["".join(f"<td>{escape(visible(cell))}</td>" for cell in row) for row in rows]
        lines = "".join(f"<tr>{line}</tr>" for line in cells)
        body.append(f"<h2>{escape(title)}</h2><div class=scroll><table><tr>{head}</tr>{lines}</table></div>")
    body.append(f"<h2>Samples</h2><p class=tokens><b>loss</b> <i>no loss</i> {legend}</p>")
    body += [draw_sample(found, reader, numbers) for found in inspection.shown]
    body += ["<h2>The longest sample</h2>", draw_sample(inspection.longest, reader, numbers)]
    if inspection.ports:
        costliest = "".join(draw_item(port.costliest, reader, numbers, port.where) for port in inspection.ports)
        body.append(f"<h2>The costliest items</h2><div class=media>{costliest}</div>")
    if inspection.bad_rows:
        body.append(red_table(inspection.bad_rows))
    return page(name, body, tints)


def red_table(bad_rows: Sequence[str]) -> str:
    from omnizoo.data.inspect import visible

    lines = "".join(f"<tr><td class=bad>{escape(visible(message))}</td></tr>" for message in bad_rows)
    return f"<h2>Bad rows</h2><div class=scroll><table>{lines}</table></div>"


def page(name: str, body: Sequence[str], style: str = "") -> str:
    from omnizoo.training.report import STYLE

    head = f"<header><h1>{escape(name)}</h1><p>data as the model sees it<span>OmniZoo</span></p></header>"
    return PAGE.format(title=escape(name), style=STYLE + OWN_STYLE + style, body="\n".join([head, *body]))


def draw_sample(found: "Found", reader: "Reader", numbers: dict[str, int]) -> str:
    from omnizoo.data.inspect import visible

    texts = "".join(
        f"{f'<h3>{role}</h3>' if role else ''}<p class=tokens>{draw_tokens(shown, numbers)}</p>"
        for role, shown in all_pieces(found, reader, ON_PAGE)
    )
    items = "".join(draw_item(item, reader, numbers) for item in found.sample.items)
    media = f"<div class=media>{items}</div>" if items else ""
    title = escape(visible(describe_sample(found)))
    return f"<section><small>{title}</small>{texts}{media}</section>"


def draw_tokens(shown: "Sequence[Piece]", numbers: dict[str, int]) -> str:
    tokens = []
    for piece in shown:
        tag = "b" if piece.has_loss else "i"
        text = escape(piece.text).replace("\n", "↵\n")
        if piece.item is not None:
            look = f"m{numbers[piece.item.media.modality]}{' target' if piece.item.is_target else ''}"
            tokens.append(f'<u class="{look}">{text}</u>')
        else:
            tokens.append(f"<{tag}>{text}</{tag}>")
    return "".join(tokens)


def draw_item(item: "Item", reader: "Reader", numbers: dict[str, int], where: str = "") -> str:
    from omnizoo.data.inspect import visible

    about = [str(item.port) + " target" * item.is_target, f"{describe_item(item)}{' in ' * bool(where)}{where}"]
    caption = "<br>".join(escape(visible(line)) for line in about)
    return f"<div class=m{numbers[item.media.modality]}>{preview(item, reader)}<small>{caption}</small></div>"


def preview(item: "Item", reader: "Reader") -> str:
    """What its module shows of it; one that shows nothing gives its name, so here are its values."""
    from omnizoo.data.inspect import visible
    from omnizoo.modalities.item import BadMedia

    try:
        shown = item.port.module(reader.modalities).preview(item.media)
    except BadMedia as reason:
        return escape(visible(str(reason)))
    if shown not in (item.media.name, escape(item.media.name)):
        return shown
    return "" if isinstance(item.media.value, Path | bytes) else f"<code>{escape(repr(item.media.value)[:200])}</code>"


# No script and no address is ever followed, whatever the data or a preview says.
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">
<meta http-equiv="Content-Security-Policy"
content="default-src 'none';style-src 'unsafe-inline';img-src data:;media-src data:">
<title>{title} · OmniZoo</title><style>{style}</style></head><body><main>
{body}
</main></body></html>
"""

OWN_STYLE = """
dl small{overflow-wrap:anywhere}
section{background:var(--card);border:1px solid var(--rule);border-radius:10px;padding:12px 16px;margin:0 0 12px}
.tokens{font:13px/1.9 ui-monospace,Menlo,Consolas,monospace;white-space:pre-wrap;overflow-wrap:anywhere;margin:6px 0}
.tokens>*{font-style:normal;font-weight:400;text-decoration:none;padding:2px 0;border-right:1px solid var(--card)}
.tokens i{color:var(--soft)}
section h3{font-size:13px;margin:10px 0 0}
.tokens b{color:var(--done);background:color-mix(in srgb,var(--done) 14%,transparent)}
.tokens u{padding:2px 5px;border-radius:5px;background:hsl(var(--hue) 70% 50%/.18);
box-shadow:inset 0 0 0 1px hsl(var(--hue) 70% 50%/.45)}
.tokens u.target{box-shadow:inset 0 0 0 2px var(--done)}
.media{display:flex;flex-wrap:wrap;gap:12px;align-items:flex-start}
.media>div{max-width:340px;padding:8px;border-radius:8px;background:hsl(var(--hue) 70% 50%/.1)}
.media small{display:block;overflow-wrap:anywhere}.media audio{max-width:100%}.media code{overflow-wrap:anywhere}
.media img{image-rendering:auto;margin:0 4px 4px 0}
td.bad{color:var(--bad)}
.bars td:not(:last-child){width:1%;white-space:nowrap;text-align:right;font-variant-numeric:tabular-nums}
.bars div{height:14px;background:var(--line);border-radius:3px}
"""
