"""Media items, their sizes, and ports (the modules that process them)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from omnizoo.modalities.media import Media

Ids = npt.NDArray[np.int32]
Inputs = dict[str, torch.Tensor]  # a prepared item: the tensors that `prepare` returns, for `encode` or `targets`
Role = Literal["encoder", "decoder", "follower"]


class NestedRun(NamedTuple):
    """A run of placeholder tokens that belong to a nested item, such as the audio of a video."""

    modality: str
    num_placeholders: int


@dataclass(frozen=True)
class MediaSize:
    """Size and cost of an item, known before it is decoded."""

    num_placeholders: int  # number of tokens in the sequence
    cost: float  # FLOPs of `encode` (with backward if trained) or of `targets`; ranks are balanced by cost
    targets: int | None = None  # for decoders only: contribution to the loss count; if None, `num_placeholders`
    num_residual_targets: int = 0  # contribution to the loss count of "residual" (`MultiLossDecoder`)
    # Order of texts, runs of placeholder tokens (their lengths) and runs of nested items, such as
    # ("<0.5 s>", 64, "<1.5 s>", 64). An empty tuple stands for a single run of `num_placeholders`.
    layout: tuple[str | int | NestedRun, ...] = ()
    # Sizes of nested items of the same media, keyed by modality.
    inside: Mapping[str, "MediaSize"] = field(default_factory=dict)
    shape: tuple[float, ...] = ()  # size along each position axis, for models with several axes, such as M-RoPE

    def part(self, share: float) -> "MediaSize":
        """Return the size of a part that makes up the fraction `share` of the item."""
        return replace(self, num_placeholders=round(self.num_placeholders * share), cost=self.cost * share)


class Port(NamedTuple):
    """The encoder, decoder or follower of a modality."""

    modality: str
    role: Role

    def __str__(self) -> str:
        return "/".join(self)


@dataclass(frozen=True)
class MediaItem:
    """A media item. Its spans are first relative to a sample, later to its pack, and finally to its micro-batch."""

    port: Port  # encoder, decoder or follower that processes the item
    size: MediaSize
    spans: tuple[tuple[int, int], ...]  # (first token, number of tokens) of each run of placeholder tokens
    is_target: bool  # whether the model predicts the item
    raw: Media | None = None  # the item of the row; None after preparation
    inputs: Inputs | None = None  # the prepared item, on the rank that prepared it
    has_targets: bool = True  # False if only the log-likelihood of a target is used, not its loss
    source: int = 0  # index in data.sources; set when the item is prepared
    answer: int | None = None  # for followers only: index of the assistant message
    notes: Inputs = field(default_factory=dict)  # for followers only: tensors derived from the conversation

    @property
    def media(self) -> Media:
        """The item as its row contains it. Available only before preparation."""
        assert self.raw is not None, "a prepared item has no raw media"
        return self.raw

    @property
    def targets(self) -> int:
        """The contribution of this item to the loss count."""
        if not (self.is_target and self.has_targets):
            return 0
        return self.size.targets or self.size.num_placeholders

    def cut(self, parts: Sequence[tuple[MediaSize, Inputs]]) -> list["MediaItem"]:
        """Split this prepared item into parts, each with its spans.

        If the item occurs several times in the sequence, each part has spans in every occurrence.
        """
        runs = [np.arange(first, first + count) for first, count in self.spans]
        tokens = np.concatenate(runs or [np.zeros(0, int)])
        part_ends = np.cumsum([size.num_placeholders for size, _ in parts])
        occurrences = tokens.reshape(-1, part_ends[-1])
        tokens_by_part = np.split(occurrences, part_ends[:-1], axis=1)

        items = []
        for (size, inputs), part_tokens in zip(parts, tokens_by_part, strict=True):
            positions = part_tokens.reshape(-1)
            is_gap = np.diff(positions) != 1
            runs = np.split(positions, np.flatnonzero(is_gap) + 1)
            spans = tuple((int(run[0]), len(run)) for run in runs if len(run))
            items.append(replace(self, size=size, spans=spans, raw=None, inputs=inputs))
        return items

    def moved(self, by: int, **changes: Any) -> "MediaItem":
        """Return the item with its spans shifted by `by` tokens, and with `changes` to other fields."""
        spans = tuple((first + by, count) for first, count in self.spans)
        return replace(self, spans=spans, **changes)
