"""Spans of bidirectional tokens, which attend to each other in both directions, in an otherwise causal sample.

A span is a run of certain token ids within one sample. Spans are found on the host, so that the attention blocks are
built once for all layers, without a host sync.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from omnizoo.ops.attention.blocks import Blocks, pack_blocks

Stretches = Sequence[Sequence[tuple[int, int]]]  # spans of each sample, as (first position, number of tokens)


@dataclass(frozen=True)
class BidirectionalTokens:
    """The token ids of a model that attend in both directions within a run of such tokens."""

    tokens: tuple[int, ...]  # token ids
    modalities: tuple[str, ...] = ()  # modalities whose placeholder tokens have these ids
    everywhere: bool = True  # in all layers; False: only in layers with a sliding window
    over_windows: bool = False  # whether tokens also attend to earlier tokens of their span outside the window

    def pairs_ahead(self, runs: Iterable[tuple[str, int]]) -> int:
        """Return the number of (query, later key) pairs that bidirectional attention adds to causal attention.

        `runs` are runs of placeholder tokens, as (modality, number of tokens).
        """
        return sum(count * (count - 1) // 2 for modality, count in runs if modality in self.modalities)

    def find(self, ids: torch.Tensor, lengths: Sequence[int]) -> "BidirectionalSpans":
        """Find the spans in samples of these `lengths`. `ids [tokens]` are the token ids, on the host."""
        samples = np.split(np.isin(ids.numpy(), self.tokens), np.cumsum(lengths)[:-1])
        stretches = []
        for is_one in samples:
            edges = np.flatnonzero(np.diff(is_one.astype(np.int8), prepend=0, append=0)).reshape(-1, 2)
            stretches.append([(first, end - first) for first, end in edges.tolist()])
        return BidirectionalSpans(lengths, stretches, self.everywhere, self.over_windows)


class BidirectionalSpans:
    """The bidirectional spans of a pack, and the attention blocks built from them.

    The class is not a dataclass, because FSDP copies dataclasses that are arguments of a module.
    """

    def __init__(
        self, lengths: Sequence[int], stretches: Stretches, everywhere: bool = True, over_windows: bool = False
    ) -> None:
        self.lengths, self.stretches = lengths, stretches
        self.everywhere, self.over_windows = everywhere, over_windows
        self.made: dict[tuple[int | None, torch.device], Blocks] = {}  # cache, by window and device

    def counts(self, causal: bool, window: int | None) -> bool:
        """Whether the spans change the attention of a layer with this `causal` flag and `window`."""
        return causal and (self.everywhere or window is not None) and any(self.stretches)

    def beyond(self, window: int | None) -> int | None:
        """Return the window beyond which spans still attend backward, or None if the window limits them."""
        return window if self.over_windows else None

    def blocks(self, window: int | None, device: torch.device) -> Blocks:
        """Return the blocks of causal attention over the whole pack, including the spans."""
        kind = window, device
        if kind not in self.made:
            self.made[kind] = Blocks(
                pack_blocks(self.lengths, True, window, self.stretches, self.beyond(window)), device
            )
        return self.made[kind]

    def visible(self, sample: int, device: torch.device) -> torch.Tensor:
        """Return a bool mask `[length, length]` of a sample: the (query, key) pairs that its spans add."""
        together = torch.zeros(self.lengths[sample], self.lengths[sample], dtype=torch.bool, device=device)
        for first, count in self.stretches[sample]:
            together[first : first + count, first : first + count] = True
        return together if self.over_windows else together.triu(1)
