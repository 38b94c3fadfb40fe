"""Stretches of a sample whose tokens all see each other, whatever the order, while everything else looks back only.

They are told by tokens: a stretch is a run of certain token ids in one sample. Known on the host, so that the blocks
of attention that they add are made once for all layers, and nobody waits for the device.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from omnizoo.ops.attention_blocks import Blocks, pack_blocks

Stretches = Sequence[Sequence[tuple[int, int]]]  # of each sample: (first position, how many)


@dataclass(frozen=True)
class MutualTokens:
    """Which tokens of a model see each other, run by run: `tokens` by their ids, which stand for items of
    `modalities`. `everywhere`: in all layers, else in those with a window. `over_windows`: also those that a window
    hides, looking back."""

    tokens: tuple[int, ...]
    modalities: tuple[str, ...] = ()
    everywhere: bool = True
    over_windows: bool = False

    def pairs_ahead(self, runs: Iterable[tuple[str, int]]) -> int:
        """Pairs of tokens of which the first sees the second only by this, in runs of places (modality, how many)."""
        return sum(count * (count - 1) // 2 for modality, count in runs if modality in self.modalities)

    def find(self, ids: torch.Tensor, lengths: Sequence[int]) -> "Mutual":
        """In samples of these `lengths`, whose `ids [T]` are on the host."""
        samples = np.split(np.isin(ids.numpy(), self.tokens), np.cumsum(lengths)[:-1])
        stretches = []
        for is_one in samples:
            edges = np.flatnonzero(np.diff(is_one.astype(np.int8), prepend=0, append=0)).reshape(-1, 2)
            stretches.append([(first, end - first) for first, end in edges.tolist()])
        return Mutual(lengths, stretches, self.everywhere, self.over_windows)


class Mutual:
    """The stretches of a pack. No dataclass: FSDP would copy it on its way through the model."""

    def __init__(
        self, lengths: Sequence[int], stretches: Stretches, everywhere: bool = True, over_windows: bool = False
    ) -> None:
        self.lengths, self.stretches = lengths, stretches
        self.everywhere, self.over_windows = everywhere, over_windows
        self.made: dict[tuple[int | None, torch.device], Blocks] = {}  # by window and device: layers repeat a few

    def counts(self, causal: bool, window: int | None) -> bool:
        """Whether a layer that attends so has anything to do with them."""
        return causal and (self.everywhere or window is not None) and any(self.stretches)

    def beyond(self, window: int | None) -> int | None:
        """The window over which they look back."""
        return window if self.over_windows else None

    def blocks(self, window: int | None, device: torch.device) -> Blocks:
        """What causal attention sees, with a window or without, where the whole pack is."""
        kind = window, device
        if kind not in self.made:
            self.made[kind] = Blocks(
                pack_blocks(self.lengths, True, window, self.stretches, self.beyond(window)), device
            )
        return self.made[kind]

    def numbers(self, sample: int, device: torch.device) -> torch.Tensor:
        """Of each token of a sample: the number of its stretch, from 1 on; 0: none."""
        numbers = torch.zeros(self.lengths[sample], dtype=torch.int64)
        for number, (first, count) in enumerate(self.stretches[sample], 1):
            numbers[first : first + count] = number
        return numbers.to(device)
