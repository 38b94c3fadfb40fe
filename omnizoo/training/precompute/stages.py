"""Stages of precomputing: each loads one group of frozen components, and encodes the items of all rows with it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from omnizoo.data.row import Row
from omnizoo.modalities.item import Inputs, MediaItem


@dataclass(frozen=True)
class RowItems:
    """The media items of a row, before they are decoded."""

    row: int  # number in the source
    fields: Row
    items: Sequence[MediaItem]

    @property
    def prompt(self) -> str:
        """The prompt of a row of a diffusion transformer, which has one item."""
        return bytes(self.items[0].notes["prompt"].tolist()).decode()


@dataclass(frozen=True)
class LoadedStage:
    """The loaded components of a stage."""

    # Returns the tensors of a row, from its items and their decoded media (by the index of the item).
    encode: Callable[[RowItems, Mapping[int, Inputs]], Inputs]
    encode_empty: Callable[[], Inputs] | None = None  # returns the tensors of the empty prompt


class Stage(ABC):
    """One group of frozen components, which are in memory at the same time."""

    name: str  # begins the names of the stage's files
    fingerprints: Mapping[str, str]  # hash of each component, by name
    encodes_prompts = False

    @abstractmethod
    def load(self, device: torch.device) -> LoadedStage:
        """Load the components. They are freed when the result is no longer used."""

    def decodes(self, item: MediaItem) -> bool:
        """Whether the stage needs the decoded media of an item."""
        return True
