"""Read the labels of rows for sequence classification."""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from omnizoo.config.sections.model import ScoreHead
from omnizoo.data.row import BadRow, Row
from omnizoo.data.token_fields import pack_labels

FIELDS = ("label", "labels")


class LabelReader:
    """Reads the labels of rows.

    A label is a name, or its index in the list of labels.

    Args:
        head: The labels of the run, and whether a sample has exactly one of them.
    """

    def __init__(self, head: ScoreHead) -> None:
        self.names = head.labels
        self.indices = {name: i for i, name in enumerate(head.labels)}
        self.is_multi = head.problem == "multi"

    def read(self, row: Row, ignored: Collection[str]) -> tuple[npt.NDArray[np.int32], Row]:
        """Read the labels of a row.

        Args:
            row: The row.
            ignored: Names of fields to ignore.

        Returns:
            The value of the column `CLASSES`, and the row without its labels.

        Raises:
            BadRow: If the labels are missing, unknown or repeated.
        """
        present = [name for name in FIELDS if row.get(name) is not None and name not in ignored]
        if not present:
            raise BadRow(
                "`label` is missing. If another field contains it, set `columns: {label: FIELD}` of the source"
            )
        if len(present) > 1:
            raise BadRow("`label` and `labels` are present, but only one can be used. Add the other to data.ignore")
        field = present[0]
        value = row[field]
        rest = {name: item for name, item in row.items() if name != field}
        if not self.is_multi:
            return np.array(self._index(value, field), np.int32), rest

        if not isinstance(value, list | tuple | np.ndarray):
            raise BadRow(f"`{field}` is {value!r}; expected a list of labels, because `problem` is multi")
        indices = [self._index(item, field) for item in value]
        if len(set(indices)) < len(indices):
            raise BadRow(f"`{field}` contains a label more than once; expected each label that applies, once")
        return pack_labels(indices, len(self.names)), rest

    def _index(self, value: Any, field: str) -> int:
        """Return the index of one label."""
        if isinstance(value, str) and value in self.indices:
            return self.indices[value]
        is_number = isinstance(value, int | np.integer) and (not isinstance(value, bool) or len(self.names) == 2)
        if is_number and 0 <= value < len(self.names):
            return int(value)
        shown = ", ".join(self.names[:8]) + (", ..." if len(self.names) > 8 else "")
        raise BadRow(f"`{field}` contains {str(value)[:80]!r}; expected one of {shown}, or its number from 0")


def read_margin(present: Mapping[str, Any]) -> float:
    """Return the `margin` of a preference pair; 0 if it has none. Raises `BadRow` if it is not a finite number."""
    margin = present.get("margin", 0.0)
    if isinstance(margin, bool) or not isinstance(margin, int | float | np.number) or not np.isfinite(margin):
        raise BadRow(f"`margin` is {margin!r}; expected a number")
    return float(margin)
