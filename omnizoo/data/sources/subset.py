"""Select every n-th row of a source (`data.sources.N.take`), to split a file into training and held-out data."""

import re

import numpy as np

from omnizoo.data.sources.base import RowSource, RowView

EVERY = re.compile(r"(all but )?every ([0-9]{1,9})(?:st|nd|rd|th)")


class RowSubset(RowView):
    """Every n-th row of a source ("every 50th"), or all other rows ("all but every 50th").

    Together, both subsets contain each row exactly once. If rows are appended to the source, earlier rows stay in their
    subset.

    Args:
        source: The source.
        take: The value of `data.sources.N.take`.
    """

    def __init__(self, source: RowSource, take: str) -> None:
        match = EVERY.fullmatch(take)
        assert match is not None, "the config checks `take`"
        self.source = source
        self.is_complement = bool(match[1])
        self.every = int(match[2])
        selected_before = source.extents // self.every  # number of n-th rows before each boundary
        if self.is_complement:
            selected_before = source.extents - selected_before
        self.extents = np.unique(selected_before)

    def locate(self, row: int) -> tuple[RowSource, int]:
        if self.is_complement:
            return self.source, row + row // (self.every - 1)
        return self.source, (row + 1) * self.every - 1
