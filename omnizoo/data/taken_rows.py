"""A part of a source's rows: `data.sources.N.take`. So one file serves for training and for held-out data."""

import re
from pathlib import Path

import numpy as np

from omnizoo.data.rows import Row, RowSource

EVERY = re.compile(r"(all but )?every ([0-9]{1,9})(?:st|nd|rd|th)")


class TakenRows(RowSource):
    """Every n-th row of a source, or all others: two that are never of one row, wherever rows are added at the end."""

    def __init__(self, source: RowSource, take: str) -> None:
        found = EVERY.fullmatch(take)
        assert found is not None, "checked with the config"
        self.source, self.others, self.every = source, bool(found[1]), int(found[2])
        held = len(source) // self.every
        self.count = len(source) - held if self.others else held
        kept_before = source.extents - source.extents // self.every if self.others else source.extents // self.every
        self.extents = np.unique(kept_before)

    def _row(self, row: int) -> int:
        if self.others:
            return row + row // (self.every - 1)
        return (row + 1) * self.every - 1

    def __len__(self) -> int:
        return self.count

    def read(self, row: int) -> Row:
        return self.source.read(self._row(row))

    def find(self, row: int, name: str) -> Path | bytes:
        return self.source.find(self._row(row), name)

    def where(self, row: int) -> str:
        return self.source.where(self._row(row))
