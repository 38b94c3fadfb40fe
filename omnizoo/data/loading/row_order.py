"""Compute the shuffled order of rows.

The row at any position can be computed without iterating over the earlier positions, so a run resumes immediately.
"""

import numpy as np
import numpy.typing as npt

from omnizoo.data.sources.base import Rows, RowSource

PIECE = 256  # maximum number of consecutive rows that are assigned to the same lane
MAX_OTHER_ROWS = 8  # maximum number of other rows that may be tried to find a mismatched response


def random_bits(count: int, *key: int) -> npt.NDArray[np.uint64]:
    """Return `count` random 64-bit integers that depend only on `key`.

    NumPy guarantees that raw bits stay the same in all versions; it gives no such guarantee for its shuffles.
    """
    return np.random.PCG64(list(key)).random_raw(count)


def lane_pieces(source: RowSource, lane: int, lanes: int, epoch: int, key: tuple[int, ...] | None) -> tuple[Rows, Rows]:
    """Divide the rows of a source into pieces, and return the pieces that a lane reads in an epoch.

    A piece consists of consecutive rows within one extent of the source. (An extent is a range of rows that are best
    read together, such as a row group of Parquet; see `RowSource.extents`.) If `key` is set, the extents are shuffled,
    and then the pieces within each extent. The lanes of a process therefore read from the same few extents at a time.

    Pieces are assigned to the lanes in turn. The first lane changes with each epoch, so that the numbers of pieces even
    out. If the source has fewer rows than there are lanes, the lane reads all pieces.

    Args:
        source: The source.
        lane: Number of the lane.
        lanes: Number of lanes.
        epoch: Number of the epoch.
        key: Numbers that determine the shuffled order; None to keep the order of the source.

    Returns:
        The first row and the number of rows of each piece, in the order in which the lane reads them.
    """
    size = min(PIECE, max(1, len(source) // (lanes * 16)))
    extent_lengths = np.diff(source.extents)
    pieces_per_extent = -(-extent_lengths // size)
    extent = np.repeat(np.arange(len(pieces_per_extent)), pieces_per_extent)  # extent of each piece
    first_piece = np.cumsum(pieces_per_extent) - pieces_per_extent
    offset = size * (np.arange(len(extent)) - first_piece[extent])  # offset of each piece in its extent
    starts = source.extents[extent] + offset
    sizes = np.minimum(size, extent_lengths[extent] - offset)

    if key is not None:
        extent_order = random_bits(len(extent_lengths), *key, 0)
        piece_order = random_bits(len(starts), *key, 1)
        order = np.lexsort((piece_order, extent_order[extent]))
        starts = starts[order]
        sizes = sizes[order]
    if len(source) >= lanes:
        lane_slice = slice((lane + epoch) % lanes, None, lanes)
        starts = starts[lane_slice]
        sizes = sizes[lane_slice]
    return starts, sizes


class EpochOrder:
    """The order in which a lane reads the rows of one source in one epoch.

    `order[position]` is the number of a row. Rows are shuffled within windows of `shuffle_rows` rows.

    Args:
        source: The source.
        number: Index of the source in `data.sources`.
        lane: Number of the lane.
        lanes: Number of lanes.
        epoch: Number of the epoch.
        seed: `train.seed`.
        shuffle_rows: Number of rows in a window; None to read the rows in the order of the source.
    """

    def __init__(
        self, source: RowSource, number: int, lane: int, lanes: int, epoch: int, seed: int, shuffle_rows: int | None
    ) -> None:
        self.key = None if shuffle_rows is None else (seed, number, epoch)
        self.starts, sizes = lane_pieces(source, lane, lanes, epoch, self.key)
        self.ends = np.cumsum(sizes)
        self.lane = lane
        self.window_rows = shuffle_rows or PIECE
        self.window = -1
        self.rows = np.zeros(0, np.int64)

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, position: int) -> int:
        window, offset = divmod(position, self.window_rows)
        if window != self.window:
            self.window = window
            self.rows = self._read_window(window)
        return int(self.rows[offset])

    def _read_window(self, window: int) -> Rows:
        """Return the row numbers of a window, in the order in which they are read."""
        first = window * self.window_rows
        positions = np.arange(first, min(first + self.window_rows, len(self)))
        piece = np.searchsorted(self.ends, positions, side="right")
        piece_positions = np.concatenate(([0], self.ends))  # position of the first row of each piece
        rows: Rows = self.starts[piece] + positions - piece_positions[piece]
        if self.key is None:
            return rows
        order = np.argsort(random_bits(len(rows), *self.key, 2, self.lane, window), kind="stable")
        return rows[order]


def other_rows(row: int, rows: int) -> list[int]:
    """Return the rows that may provide a mismatched response for a row, in the order in which to try them.

    The result is the same in every epoch, on every layout and after a resume.

    Args:
        row: Number of the row.
        rows: Number of rows in the source.
    """
    candidates = dict.fromkeys((random_bits(2 * MAX_OTHER_ROWS, row) % rows).tolist())
    return [candidate for candidate in candidates if candidate != row][:MAX_OTHER_ROWS]
