"""The shuffled order of rows, computed for any position without iterating over the earlier ones."""

import numpy as np
import numpy.typing as npt

from omnizoo.data.sources.base import Rows, RowSource

PIECE = 256  # maximum number of consecutive rows assigned to a lane
TRIES = 8  # maximum number of other rows tried as the source of a mismatched response


def draws(count: int, *key: int) -> npt.NDArray[np.uint64]:
    """Return `count` random 64-bit integers that depend only on `key`.

    NumPy guarantees that raw bits stay the same in all versions; it gives no such guarantee for its shuffles.
    """
    return np.random.PCG64(list(key)).random_raw(count)


def lane_pieces(source: RowSource, lane: int, lanes: int, epoch: int, key: tuple[int, ...] | None) -> tuple[Rows, Rows]:
    """Return the first row and the number of rows of each piece that the lane reads in an epoch, in reading order.

    A piece is a run of consecutive rows within one extent of the source. With a `key`, the extents are shuffled, and
    the pieces within each extent, so that the lanes of one process read from the same few extents at a time. Pieces are
    assigned to the lanes in turn. Each epoch starts at another lane, which evens out a remainder. If the source has
    fewer rows than there are lanes, the lane reads all pieces.
    """
    size = min(PIECE, max(1, len(source) // (lanes * 16)))
    lengths = np.diff(source.extents)
    counts = -(-lengths // size)
    extent = np.repeat(np.arange(len(counts)), counts)
    within = size * (np.arange(len(extent)) - np.repeat(np.cumsum(counts) - counts, counts))
    starts, sizes = source.extents[extent] + within, np.minimum(size, lengths[extent] - within)
    if key is not None:
        order = np.lexsort((draws(len(starts), *key, 1), draws(len(lengths), *key, 0)[extent]))
        starts, sizes = starts[order], sizes[order]
    if len(source) >= lanes:
        mine = slice((lane + epoch) % lanes, None, lanes)
        starts, sizes = starts[mine], sizes[mine]
    return starts, sizes


class EpochOrder:
    """The rows of one source that a lane reads in one epoch, by position.

    Rows are shuffled within windows of `shuffle_rows` rows; None disables shuffling.
    """

    def __init__(
        self, source: RowSource, number: int, lane: int, lanes: int, epoch: int, seed: int, shuffle_rows: int | None
    ) -> None:
        self.key = None if shuffle_rows is None else (seed, number, epoch)
        self.starts, sizes = lane_pieces(source, lane, lanes, epoch, self.key)
        self.ends = np.cumsum(sizes)
        self.lane, self.window_rows = lane, shuffle_rows or PIECE
        self.window, self.rows = -1, np.zeros(0, np.int64)

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, position: int) -> int:
        window, offset = divmod(position, self.window_rows)
        if window != self.window:
            self.window, self.rows = window, self._read_window(window)
        return int(self.rows[offset])

    def _read_window(self, window: int) -> Rows:
        positions = np.arange(window * self.window_rows, min((window + 1) * self.window_rows, len(self)))
        piece = np.searchsorted(self.ends, positions, side="right")
        rows: Rows = self.starts[piece] + positions - np.concatenate(([0], self.ends))[piece]
        if self.key is None:
            return rows
        return rows[np.argsort(draws(len(rows), *self.key, 2, self.lane, window), kind="stable")]


def other_rows(row: int, rows: int) -> list[int]:
    """Return other rows to take a mismatched response from, in the order to try them.

    They are the same in every epoch, on every layout and after a resume.
    """
    found = dict.fromkeys((draws(2 * TRIES, row) % rows).tolist())
    return [other for other in found if other != row][:TRIES]
