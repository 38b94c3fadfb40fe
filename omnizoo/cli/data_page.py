"""HTML page of `omnizoo data inspect --out`: bad rows, samples with their media in place, then statistics.

The page needs no network. Text from the data is escaped, so it cannot add scripts to the page.
"""

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from html import escape
from pathlib import Path

from omnizoo.cli.data import all_pieces, bars, describe_item, describe_sample, facts, tables
from omnizoo.data.loading.bad_rows import BadRowGroup
from omnizoo.data.loading.inspection import InspectedSample, Inspection, TokenText, visible
from omnizoo.data.loading.reader import Reader
from omnizoo.modalities.base import find_module
from omnizoo.modalities.item import MediaItem
from omnizoo.modalities.media import BadMedia
from omnizoo.reporting.pages import render

NUM_HUES = 6  # number of colors for modalities in the style sheet
MAX_TOKENS = 4000  # maximum number of tokens shown per sample

Block = tuple[bool, list[TokenText]]  # (whether the block is media, its pieces)


def data_page(name: str, inspection: Inspection, reader: Reader) -> str:
    """Return the HTML page: bad rows, the inspected samples with previews of their media, and statistics.

    Args:
        name: Title of the page.
        inspection: The inspected samples and the statistics.
        reader: Provides the modalities and the tokenizer.
    """
    shown = {sample.where for sample in inspection.shown}
    is_longest_shown = inspection.longest.where in shown
    shown.add(inspection.longest.where)
    return render(
        "data.html",
        title=name,
        bad_groups=inspection.bad_groups,
        inspection=inspection,
        longest=None if is_longest_shown else inspection.longest,
        costliest=[port for port in inspection.ports if port.where not in shown],
        hues={modality: number % NUM_HUES for number, modality in enumerate(reader.modalities)},
        figures=facts(inspection),
        lengths=bars(inspection),
        tables=tables(inspection),
        sample_blocks=partial(_sample_blocks, reader=reader),
        preview=partial(_preview, reader=reader),
        describe_item=describe_item,
        describe_sample=describe_sample,
        visible=visible,
    )


def bad_rows_page(name: str, bad_groups: Sequence[BadRowGroup]) -> str:
    """Return an HTML page that lists the bad rows, for data without usable rows."""
    return render("data.html", title=name, bad_groups=bad_groups, inspection=None, visible=visible)


def _sample_blocks(sample: InspectedSample, reader: Reader) -> Iterator[tuple[str, list[Block]]]:
    """Yield the text and media of a sample as (role, blocks): once with an empty role, or once for each response."""
    for role, pieces in all_pieces(sample, reader, MAX_TOKENS):
        yield role, _blocks(pieces)


def _blocks(pieces: Sequence[TokenText]) -> list[Block]:
    """Group the pieces of a sample into blocks of text and media.

    A media item may have several pieces. Only the first one counts as media, so the page shows each item once.
    """
    shown_items: set[int] = set()

    def is_first_of_item(piece: TokenText) -> bool:
        is_first = piece.item is not None and id(piece.item) not in shown_items
        shown_items.add(id(piece.item))
        return is_first

    return [(is_media, list(group)) for is_media, group in itertools.groupby(pieces, key=is_first_of_item)]


def _preview(item: MediaItem, reader: Reader) -> str:
    """Return the HTML preview of a media item.

    If its module has no preview, return the value of the item, or an empty string for a file. If the item cannot be
    decoded, return the reason.
    """
    try:
        html = find_module(reader.modalities, item.port).preview(item.media)
    except BadMedia as reason:
        return escape(visible(str(reason)))
    if html not in (item.media.name, escape(item.media.name)):
        return html
    is_file = isinstance(item.media.value, Path | bytes)
    return "" if is_file else f"<code>{escape(repr(item.media.value)[:200])}</code>"
