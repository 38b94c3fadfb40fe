"""Rows whose fields have other names in the file: `data.sources.N.columns` says which is which."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from omnizoo.config.doors import nearest
from omnizoo.config.errors import UserError
from omnizoo.data.rows import BadRow, Row, RowSource

LOOK = 64  # rows among which a column must be


class RenamedRows(RowSource):
    """`columns` is {name here: name in the rows}."""

    def __init__(self, source: RowSource, columns: Mapping[str, str]) -> None:
        self.source, self.extents = source, source.extents
        self.columns, self.here = columns, {theirs: here for here, theirs in columns.items()}

    def __len__(self) -> int:
        return len(self.source)

    def read(self, row: int) -> Row:
        read = self.source.read(row)
        for here, theirs in self.columns.items():
            if here in read and here not in self.here and theirs in read:
                raise BadRow(
                    f"`columns` of its source reads {theirs!r} as `{here}`, but it has a field {here!r}, too; rename "
                    f"that one as well: {{{here}: {theirs}, other_{here}: {here}}}"
                )
        return {self.here.get(name, name): value for name, value in read.items()}

    def find(self, row: int, name: str) -> Path | bytes:
        return self.source.find(row, name)

    def where(self, row: int) -> str:
        return self.source.where(row)


def check_columns(source: RowSource, wanted: Sequence[str], key: str, way: str = "") -> None:
    """Refuse names of fields that none of the first rows has."""
    found: dict[str, None] = {}
    for row in range(min(LOOK, len(source))):
        try:
            found |= dict.fromkeys(source.read(row))
        except BadRow:
            continue
    if not found:
        return  # what is wrong with the rows is said of them
    for name in wanted:
        if name not in found:
            raise UserError(
                f"{key}: none of the first {min(LOOK, len(source))} rows has a field {name!r}; they have "
                f"{', '.join(list(found)[:20])}{nearest(name, found)}{way}"
            )
