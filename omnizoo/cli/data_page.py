"""The page of `omnizoo data inspect --out`: what is wrong first, then samples with their media in place, then figures.

It needs no network and runs no script, whatever the data say.
"""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from omnizoo.cli.data import all_pieces, bars, describe_item, describe_sample, facts, tables
from omnizoo.data.inspect import Found, Inspection, Piece, visible
from omnizoo.data.reader import Reader
from omnizoo.modalities.base import Item
from omnizoo.modalities.item import BadMedia
from omnizoo.training.page_style import STYLE

HUES = (215, 290, 180, 40, 0, 100)
MOST = 4000  # tokens of a sample that are shown


def write_page(name: str, inspection: Inspection, reader: Reader) -> str:
    numbers = {modality: i % len(HUES) for i, modality in enumerate(reader.modalities)}
    tints = "".join(f".m{i}{{--hue:{hue}}}" for i, hue in enumerate(HUES))
    legend = "".join(f"<u class=m{i}>[{escape(modality)} x places]</u> " for modality, i in numbers.items())
    body = [red_table(inspection.bad_rows)] if inspection.bad_rows else []
    body.append(f"<h2>Samples</h2><p class=tokens><b>loss</b> <i>no loss</i> {legend}</p>")
    body += [draw_sample(found, reader, numbers) for found in inspection.shown]
    shown = {found.where for found in inspection.shown}
    if inspection.longest.where not in shown:
        body += ["<h2>The longest sample</h2>", draw_sample(inspection.longest, reader, numbers)]
        shown.add(inspection.longest.where)
    costliest = [port for port in inspection.ports if port.where not in shown]
    if costliest:
        items = "".join(draw_item(port.costliest, reader, numbers, port.where) for port in costliest)
        body.append(f"<h2>The costliest items</h2><div class=media>{items}</div>")
    cards = "".join(
        f"<div><dt>{escape(what)}</dt><dd>{escape(value)}</dd><small>{escape(note)}</small></div>"
        for what, (value, note) in facts(inspection).items()
    )
    lines = "".join(
        f"<tr><td>{span}<td>{count:,}<td><div style='width:{100 * share:.1f}%'></div></tr>"
        for span, count, share in bars(inspection)
    )
    body += [
        f"<h2>Figures</h2><dl>{cards}</dl>",
        f"<h2>Lengths in tokens</h2><div class=scroll><table class=bars>{lines}</table></div>",
    ]
    for title, columns, rows in tables(inspection):
        head = "".join(f"<th>{escape(column)}</th>" for column in columns)
        cells = ["".join(f"<td>{escape(visible(cell))}</td>" for cell in row) for row in rows]
        lines = "".join(f"<tr>{line}</tr>" for line in cells)
        body.append(f"<h2>{escape(title)}</h2><div class=scroll><table><tr>{head}</tr>{lines}</table></div>")
    return whole_page(name, body, tints)


def red_table(bad_rows: Sequence[str]) -> str:
    lines = "".join(f"<tr><td class=bad>{escape(visible(message))}</td></tr>" for message in bad_rows)
    return f"<h2 class=bad>Bad rows: {len(bad_rows):,}</h2><div class='scroll bad'><table>{lines}</table></div>"


def whole_page(name: str, body: Sequence[str], style: str = "") -> str:
    head = f"<header><h1>{escape(name)}</h1><p>data as the model sees it<span>OmniZoo</span></p></header>"
    return PAGE.format(title=escape(name), style=STYLE + OWN_STYLE + style, body="\n".join([head, *body]))


def draw_sample(found: Found, reader: Reader, numbers: dict[str, int]) -> str:
    """Its tokens, each item in the place where it stands for the first time."""
    texts = "".join(
        f"{f'<h3>{role}</h3>' if role else ''}{draw_tokens(shown, reader, numbers)}"
        for role, shown in all_pieces(found, reader, MOST)
    )
    return f"<section><small>{escape(visible(describe_sample(found)))}</small>{texts}</section>"


def draw_tokens(shown: Sequence[Piece], reader: Reader, numbers: dict[str, int]) -> str:
    """Text in a line with marks for the places of items; where an item stands for the first time, the item."""
    seen: set[int] = set()

    def is_new(piece: Piece) -> bool:
        return piece.item is not None and id(piece.item) not in seen

    blocks: list[tuple[bool, list[str]]] = []  # (of items, what is in it)
    for piece in shown:
        new = is_new(piece)
        if not blocks or blocks[-1][0] != new:
            blocks.append((new, []))
        drawn = _token(piece, numbers)
        if piece.item is not None and new:
            seen.add(id(piece.item))
            drawn = draw_item(piece.item, reader, numbers, chip=f"<p class=tokens>{drawn}</p>")
        blocks[-1][1].append(drawn)
    tags = {True: "<div class=media>{}</div>", False: "<p class=tokens>{}</p>"}
    return "".join(tags[of_items].format("".join(inside)) for of_items, inside in blocks)


def _token(piece: Piece, numbers: dict[str, int]) -> str:
    text = escape(piece.text).replace("\n", "↵\n")
    if piece.item is not None:
        look = f"m{numbers[piece.item.media.modality]}{' target' if piece.item.is_target else ''}"
        return f'<u class="{look}">{text}</u>'
    tag = "b" if piece.has_loss else "i"
    return f"<{tag}>{text}</{tag}>"


def draw_item(item: Item, reader: Reader, numbers: dict[str, int], where: str = "", chip: str = "") -> str:
    about = [str(item.port) + " target" * item.is_target, f"{describe_item(item)}{' in ' * bool(where)}{where}"]
    caption = "<br>".join(escape(visible(line)) for line in about)
    look = f"m{numbers[item.media.modality]}"
    return f"<div class={look}>{chip}{preview(item, reader)}<small>{caption}</small></div>"


def preview(item: "Item", reader: "Reader") -> str:
    """What its module shows of it; one that shows nothing gives its name, so here are its values."""
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
section .media{margin:6px 0}
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
.media img{min-width:40px;margin:0 4px 4px 0}
td.bad{color:var(--bad)}h2.bad{color:var(--bad)}.scroll.bad{border-color:var(--bad)}
.bars td:not(:last-child){width:1%;white-space:nowrap;text-align:right;font-variant-numeric:tabular-nums}
.bars div{height:14px;background:var(--line);border-radius:3px}
"""
