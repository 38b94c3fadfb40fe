"""The `Pack` type. Loader workers build packs from samples and send them to their rank."""

from dataclasses import dataclass, field

import numpy as np

from omnizoo.data.sample import Preferences
from omnizoo.data.token_fields import IGNORE_INDEX, Columns, make_columns
from omnizoo.modalities.item import MediaItem


@dataclass(frozen=True)
class Pack:
    """Concatenated samples without padding, with decoded media.

    A sample consists of one segment or, in a preference row, of one segment for each response.

    Labels are shifted: `labels[t]` is the token at position t + 1, or IGNORE_INDEX if that token is not a target or
    belongs to the next segment.
    """

    index: int  # position of the pack in the run
    columns: Columns
    lengths: list[int]  # number of tokens of each segment
    sample_ids: list[str]  # for each segment, source/epoch/row/part and, with preferences, /role; empty in dummy packs
    items: tuple[MediaItem, ...] = ()  # media items; spans are (first token in the pack, number of tokens)
    preferences: Preferences | None = None  # role of each segment; None without preference rows
    batch_shape: tuple[int, ...] = ()  # `batch_shape` of its samples
    sources: list[int] = field(default_factory=list)  # for each segment, its index in data.sources; empty: all are 0

    def __post_init__(self) -> None:
        """Fill in `sources`."""
        if not self.sources:
            object.__setattr__(self, "sources", [0] * len(self.lengths))

    @property
    def is_dummy(self) -> bool:
        """Whether this is a dummy pack. Dummy packs have no samples."""
        return not self.sample_ids

    @property
    def num_targets(self) -> int:
        """Number of text tokens that are targets."""
        return int((self.columns["labels"] != IGNORE_INDEX).sum())


def dummy_pack(index: int) -> Pack:
    """Return a dummy pack of two tokens, for a rank without a pack. It is excluded from losses and counts."""
    columns = make_columns(input_ids=np.zeros(2), labels=np.full(2, IGNORE_INDEX))
    return Pack(index, columns, lengths=[2], sample_ids=[])
