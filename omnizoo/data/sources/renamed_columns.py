"""Rename the fields of rows, as `data.sources.N.columns` sets it."""

from collections.abc import Mapping, Sequence

from omnizoo.config.errors import UserError
from omnizoo.config.plugins import nearest
from omnizoo.data.row import BadRow, Row
from omnizoo.data.sources.base import RowSource, RowView

LOOK = 64  # number of first rows, one of which must have a column


class RenamedRows(RowView):
    """A source with renamed fields.

    Args:
        source: The source of the rows.
        columns: Maps each new name to the name in the rows.
    """

    def __init__(self, source: RowSource, columns: Mapping[str, str]) -> None:
        self.source, self.extents = source, source.extents
        self.columns, self.here = columns, {theirs: here for here, theirs in columns.items()}

    def locate(self, row: int) -> tuple[RowSource, int]:
        return self.source, row

    def read(self, row: int) -> Row:
        read = self.source.read(row)
        for here, theirs in self.columns.items():
            if here in read and here not in self.here and theirs in read:
                raise BadRow(
                    f"`columns` of its source reads {theirs!r} as `{here}`, but it has a field {here!r}, too; rename "
                    f"that one as well: {{{here}: {theirs}, other_{here}: {here}}}"
                )
        return {self.here.get(name, name): value for name, value in read.items()}


def check_columns(source: RowSource, wanted: Sequence[str], key: str, way: str = "") -> None:
    """Check that each wanted field occurs in at least one of the first rows.

    Args:
        source: The source of the rows.
        wanted: Names of fields that the config requires.
        key: Config key of these names, for messages.
        way: Text to append to the message.

    Raises:
        UserError: If none of the first rows has one of the fields.
    """
    found: dict[str, None] = {}
    for row in range(min(LOOK, len(source))):
        try:
            found |= dict.fromkeys(source.read(row))
        except BadRow:
            continue
    if not found:
        return  # all of them are bad rows, which are reported when they are read
    for name in wanted:
        if name not in found:
            raise UserError(
                f"{key}: none of the first {min(LOOK, len(source))} rows has a field {name!r}; they have "
                f"{', '.join(list(found)[:20])}{nearest(name, found)}{way}"
            )
