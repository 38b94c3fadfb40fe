"""Collect bad rows while data is inspected, and group bad rows with the same reason."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from omnizoo.data.loading.lanes import Lane
from omnizoo.data.packing.overlong import SampleSplit
from omnizoo.data.row import BadRow

MAX_USELESS_ROWS = 512  # number of unusable rows after which no more rows are read from a source
# Parts of a reason that differ between rows: quoted values, file names and numbers.
DETAILS = re.compile(r"""'[^']*'|"[^"]*"|\S*/\S*|\S+\.[a-zA-Z]\w{1,4}\b|\d[\d,.]*""")


class BadRowRecord(NamedTuple):
    """A bad row, and why it cannot be used."""

    source: int  # index in data.sources
    row: int
    where: str  # file and line
    reason: str

    @property
    def message(self) -> str:
        """The location of the row, and why it cannot be used."""
        return f"{self.where}: {self.reason}"


@dataclass(frozen=True)
class BadRowGroup:
    """Bad rows of one source with the same reason."""

    count: int
    first: BadRowRecord  # the bad row with the lowest number

    @property
    def title(self) -> str:
        """A title that states the number of rows. The message of the first row should follow the title."""
        return "bad row" if self.count == 1 else f"{self.count:,} bad rows, the first"


def group_bad_rows(records: Iterable[BadRowRecord]) -> list[BadRowGroup]:
    """Group bad rows by source and reason, the largest group first.

    Reasons are the same if they differ only in quoted values, file names and numbers.
    """
    groups: dict[tuple[int, str], dict[int, BadRowRecord]] = {}
    for record in records:
        key = (record.source, DETAILS.sub("...", record.reason))
        groups.setdefault(key, {}).setdefault(record.row, record)
    found = [BadRowGroup(len(rows), rows[min(rows)]) for rows in groups.values()]
    return sorted(found, key=lambda group: (-group.count, group.first))


class InspectedLane(Lane):
    """A lane that collects bad rows instead of raising an error at the first one.

    It stops reading a source after `MAX_USELESS_ROWS` unusable rows, or when all rows were read and none is usable. It
    continues with the other sources. Rows of a small source may be read several times, but they are counted once.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.records: list[BadRowRecord] = []
        self.num_bad = [0] * len(self.sources)
        self.rows_read: list[set[int]] = [set() for _ in self.sources]
        self.given_up: dict[int, str] = {}  # abandoned sources, and why the last row of each is unusable
        self.with_usable_rows: set[int] = set()  # sources with at least one usable row
        self.is_repeated = False  # whether the current row was read before

    @property
    def num_usable_rows(self) -> int:
        """Number of rows in the sources that are still read."""
        return sum(len(source) for i, source in enumerate(self.sources) if i not in self.given_up)

    def reason_without_rows(self, i: int) -> str:
        """Return the location of an unusable row and the reason, for a source without usable rows; empty for others."""
        return "" if i in self.with_usable_rows else self.given_up.get(i, "")

    def samples_of(self, i: int, epoch: int, row: int) -> SampleSplit:
        """Return the samples of a row. If the row is bad, record it and return no samples."""
        self.is_repeated = row in self.rows_read[i]
        self.rows_read[i].add(row)
        try:
            return self._read_samples(i, epoch, row)
        except BadRow as bad:
            self.records.append(BadRowRecord(i, row, self.sources[i].where(row), str(bad)))
            self.num_bad[i] += 1
            return SampleSplit([], reason=str(bad))

    def _count(self, split: SampleSplit) -> None:
        """Update the counters, unless the row was counted before."""
        if not self.is_repeated:
            super()._count(split)

    def _check_usable(self, i: int, row: int, reason: str) -> None:
        """Stop reading source `i` if too many of its rows are unusable."""
        if not reason:
            self.with_usable_rows.add(i)
        num_useless = max(self.num_bad[i], self.cursors[i].rows_without_sample)
        was_read = len(self.rows_read[i]) == len(self.sources[i])
        if num_useless >= MAX_USELESS_ROWS or (was_read and i not in self.with_usable_rows):
            self.given_up[i] = f"{self.sources[i].where(row)}: {reason}"

    def _is_open(self, i: int) -> bool:
        """Whether source `i` is still read."""
        return i not in self.given_up and super()._is_open(i)
