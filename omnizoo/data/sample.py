"""Types for tokenized rows: the rendered row, and the samples that it is split into."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, compress
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from omnizoo.data.token_fields import IGNORE_INDEX, Columns, num_tokens
from omnizoo.modalities.item import MediaItem

# Roles of responses in preference rows. A "mismatched" response comes from a row with another prompt (KTO baseline).
ROLES = ("chosen", "rejected", "desirable", "undesirable", "mismatched")
TRAINED_ROLES = ("chosen", "desirable")  # roles that per-token losses, such as cross entropy, train on


class Segment(NamedTuple):
    """A part of a sample whose tokens attend only to each other.

    It is one response with its prompt in a preference row, and the whole sample in other rows.
    """

    role: str  # one of ROLES; empty for rows without preferences
    length: int  # number of tokens


class SampleId(NamedTuple):
    """Identifies a sample within a run."""

    source: int  # index in data.sources
    epoch: int
    row: int  # number of the row in its source
    part: int  # index of the sample within its row; 0 unless the row was split

    def __str__(self) -> str:
        return "/".join(map(str, self))


def segment_slices(lengths: Sequence[int]) -> list[slice]:
    """Return the slice of each segment in the tokens of a sample or pack, given the lengths of the segments."""
    ends = accumulate(lengths)
    return [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)]


@dataclass(frozen=True)
class TokenSequence:
    """Tokens as named columns (see `token_fields.py`), with their media items.

    Labels are not shifted: `labels[t]` is `input_ids[t]` if token t is a target, otherwise `IGNORE_INDEX`.
    """

    columns: Columns
    items: tuple[MediaItem, ...] = ()  # media items in order of occurrence; spans are relative to this sequence
    responses: tuple[Segment, ...] = ()  # empty without preferences; each includes a copy of the prompt
    row_schema: str = ""  # name of the row format, such as "messages"
    # Sizes that all samples of a pack must have in common; empty if samples of any length can be packed together.
    batch_shape: tuple[int, ...] = ()

    def __len__(self) -> int:
        return num_tokens(self.columns)

    @property
    def input_ids(self) -> npt.NDArray[np.int32]:
        """Token ids, `[tokens]`."""
        return self.columns["input_ids"]

    @property
    def is_target(self) -> npt.NDArray[np.bool_]:
        """Whether each token is a target, `[tokens]`."""
        is_target: npt.NDArray[np.bool_] = self.columns["labels"] != IGNORE_INDEX
        return is_target

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The responses, or one segment that covers the whole sequence."""
        return self.responses or (Segment("", len(self)),)

    @property
    def lengths(self) -> list[int]:
        """Lengths of the segments in tokens."""
        return [segment.length for segment in self.segments]


@dataclass(frozen=True, kw_only=True)
class RenderedRow(TokenSequence):
    """The tokens of a whole row, with the data to truncate or split them if they do not fit in a pack."""

    is_prose: bool = False  # plain text without a prompt; by default, it is split instead of truncated
    item_spans: tuple[tuple[int, int], ...] = ()  # first token and stop of each item, including its marks
    num_prompt_items: int = 0  # number of items in the prompt; they are the first ones in `items`
    documents: tuple[int, ...] = ()  # length of each document in the row; empty if the row is a single document


@dataclass(frozen=True, kw_only=True)
class Sample(TokenSequence):
    """A rendered row, or a part of one. A sample fits in a pack, and samples are concatenated into packs."""

    id: SampleId

    @property
    def num_positions(self) -> int:
        """Smallest `max_position_embeddings` that covers the sample."""
        positions = self.columns.get("position_ids")
        return max(self.lengths) if positions is None else int(positions.max()) + 1

    @property
    def names(self) -> list[str]:
        """Names of the segments: the sample id, followed by the role of the response if there is one."""
        return [f"{self.id}/{segment.role}" if segment.role else str(self.id) for segment in self.segments]


class Preferences(NamedTuple):
    """Preference role (such as `chosen`) and content hash of each segment in a pack or batch."""

    roles: list[str]  # one of ROLES for each segment; "" without preferences
    keys: list[str]  # for each segment: hash of its prompt and response if a loss needs it, otherwise ""

    def select(self, is_kept: Sequence[bool]) -> "Preferences | None":
        """Return the preferences of the kept segments, or None if none of them has a role."""
        roles = list(compress(self.roles, is_kept))
        keys = list(compress(self.keys, is_kept))
        return Preferences(roles, keys) if any(roles) else None

    @classmethod
    def concatenate(cls, parts: Sequence["Preferences | None"], counts: Sequence[int]) -> "Preferences | None":
        """Concatenate the preferences of packs, or return None if no pack has any.

        Args:
            parts: Preferences of each pack; None for packs without preferences.
            counts: Number of segments of each pack.
        """
        if not any(parts):
            return None
        roles: list[str] = []
        keys: list[str] = []
        for part, count in zip(parts, counts, strict=True):
            roles += part.roles if part else [""] * count
            keys += part.keys if part else [""] * count
        return cls(roles, keys)
