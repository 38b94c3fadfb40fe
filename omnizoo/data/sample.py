"""Rows as per-token columns: the rendered row, and the samples that it is split into."""

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
    """A part of a sample that attends only to itself: a response with its prompt, or the whole sample."""

    role: str  # one of ROLES; empty for rows without preferences
    length: int  # tokens


class SampleId(NamedTuple):
    """Identifies a sample within a run."""

    source: int  # index in data.sources
    epoch: int
    row: int  # number of the row in its source
    part: int  # index of the sample within its row; 0 unless the row was split

    def __str__(self) -> str:
        return "/".join(map(str, self))


def segment_slices(lengths: Sequence[int]) -> list[slice]:
    """Return the slice of tokens of each segment, given the segment lengths."""
    ends = accumulate(lengths)
    return [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)]


@dataclass(frozen=True)
class TokenSequence:
    """Per-token columns with their media items.

    Labels are not shifted: `labels[t]` is `input_ids[t]` or `IGNORE_INDEX`.
    """

    columns: Columns
    items: tuple[MediaItem, ...] = ()  # in order of occurrence; spans are relative to this sequence
    responses: tuple[Segment, ...] = ()  # empty without preferences; each includes a copy of the prompt
    row_schema: str = ""  # name of the row format, such as "messages"

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
    """A whole row as tokens, with the information needed to shorten or split it."""

    is_prose: bool = False  # plain text without a prompt; by default, it is split instead of truncated
    item_spans: tuple[tuple[int, int], ...] = ()  # [start, stop) tokens of each item, with its markers
    num_prompt_items: int = 0  # number of items in the prompt of the responses; they come first
    documents: tuple[int, ...] = ()  # lengths of concatenated documents, in tokens; empty if the row is one document


@dataclass(frozen=True, kw_only=True)
class Sample(TokenSequence):
    """A row, or one part of a row that is longer than a pack. Samples are concatenated into packs."""

    id: SampleId

    @property
    def num_positions(self) -> int:
        """Number of positions that the model must support for this sample."""
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
