"""Rename the fields of rows according to `data.sources.N.columns`."""

from collections.abc import Mapping, Sequence

from omnizoo.config.errors import UserError
from omnizoo.config.plugins import nearest
from omnizoo.data.row import BadRow, Row
from omnizoo.data.sources.base import RowSource, RowView

NUM_CHECKED_ROWS = 64  # each renamed field must occur in at least one of the first NUM_CHECKED_ROWS rows


class RenamedRows(RowView):
    """A view of a source in which some fields have other names.

    Args:
        source: The source of the rows.
        columns: Maps the new name of a field to its name in the source.
    """

    def __init__(self, source: RowSource, columns: Mapping[str, str]) -> None:
        self.source = source
        self.extents = source.extents
        self.columns = columns
        self.new_names = {old_name: new_name for new_name, old_name in columns.items()}

    def locate(self, row: int) -> tuple[RowSource, int]:
        return self.source, row

    def read(self, row: int) -> Row:
        """Return a row with renamed fields. Raises `BadRow` if a new name is already the name of another field."""
        fields = self.source.read(row)
        for new_name, old_name in self.columns.items():
            is_taken = new_name in fields and new_name not in self.new_names
            if is_taken and old_name in fields:
                raise BadRow(
                    f"`columns` of the source renames {old_name!r} to `{new_name}`, but the row already has a field "
                    f"{new_name!r}. Rename that field as well: "
                    f"{{{new_name}: {old_name}, other_{new_name}: {new_name}}}"
                )
        return {self.new_names.get(name, name): value for name, value in fields.items()}


def check_columns(source: RowSource, required: Sequence[str], key: str, hint: str = "") -> None:
    """Check that each field that the config names occurs in at least one of the first rows.

    Args:
        source: The source of the rows.
        required: Names of the fields.
        key: Config key that contains these names, for the error message.
        hint: Text to append to the error message.

    Raises:
        UserError: If a required field is missing from all of the first rows.
    """
    names: dict[str, None] = {}
    num_checked = min(NUM_CHECKED_ROWS, len(source))
    for row in range(num_checked):
        try:
            names |= dict.fromkeys(source.read(row))
        except BadRow:
            continue
    if not names:
        return  # all of them are bad rows, and the run will report them
    for name in required:
        if name not in names:
            raise UserError(
                f"{key}: none of the first {num_checked} rows has a field {name!r}; they have "
                f"{', '.join(list(names)[:20])}{nearest(name, names)}{hint}"
            )
