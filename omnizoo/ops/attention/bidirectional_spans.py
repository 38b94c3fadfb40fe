"""Find the spans of tokens that attend to each other in both directions, in samples that are otherwise causal.

A span is a run of certain token ids within one sample. Spans are found on the host, so the attention blocks can be
built once for all layers without a host sync.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from omnizoo.ops.attention.blocks import Blocks, pack_blocks

SpansOfSamples = Sequence[Sequence[tuple[int, int]]]  # for each sample, its spans as (first position, number of tokens)


@dataclass(frozen=True)
class BidirectionalTokens:
    """Token ids of a model. Consecutive tokens with these ids attend to each other in both directions."""

    tokens: tuple[int, ...]  # token ids
    modalities: tuple[str, ...] = ()  # modalities whose placeholder tokens have these ids
    everywhere: bool = True  # whether this applies in all layers, not only in layers with a sliding window
    over_windows: bool = False  # whether tokens also attend to earlier tokens of their span outside the window

    def pairs_ahead(self, runs: Iterable[tuple[str, int]]) -> int:
        """Return the number of (query, later key) pairs that bidirectional attention adds to causal attention.

        `runs` are runs of placeholder tokens, as (modality, number of tokens).
        """
        return sum(count * (count - 1) // 2 for modality, count in runs if modality in self.modalities)

    def find(self, ids: torch.Tensor, lengths: Sequence[int]) -> "BidirectionalSpans":
        """Find the spans in packed samples of these `lengths`. `ids [tokens]` are their token ids, on the host."""
        is_bidirectional = np.isin(ids.numpy(), self.tokens)
        spans = []
        for in_sample in np.split(is_bidirectional, np.cumsum(lengths)[:-1]):
            changes = np.diff(in_sample.astype(np.int8), prepend=0, append=0)
            bounds = np.flatnonzero(changes).reshape(-1, 2)
            spans.append([(first, end - first) for first, end in bounds.tolist()])
        return BidirectionalSpans(lengths, spans, self.everywhere, self.over_windows)


class BidirectionalSpans:
    """The bidirectional spans of a pack, and the attention blocks built from them.

    The class is not a dataclass, because FSDP copies dataclasses that are arguments of a module.
    """

    def __init__(
        self, lengths: Sequence[int], spans: SpansOfSamples, everywhere: bool = True, over_windows: bool = False
    ) -> None:
        self.lengths = lengths
        self.spans = spans
        self.everywhere = everywhere
        self.over_windows = over_windows
        self._blocks: dict[tuple[int | None, torch.device], Blocks] = {}  # cache, keyed by window and device

    def affects(self, causal: bool, window: int | None) -> bool:
        """Whether the spans change the attention of a layer with this `causal` flag and `window`."""
        return causal and (self.everywhere or window is not None) and any(self.spans)

    def outer_window(self, window: int | None) -> int | None:
        """Return `window` if tokens also attend to earlier tokens of their span that are outside it, otherwise None."""
        return window if self.over_windows else None

    def blocks(self, window: int | None, device: torch.device) -> Blocks:
        """Return the blocks of causal attention over the whole pack, including the spans."""
        key = window, device
        if key not in self._blocks:
            blocks = pack_blocks(
                self.lengths,
                causal=True,
                window=window,
                spans=self.spans,
                outer_window=self.outer_window(window),
            )
            self._blocks[key] = Blocks(blocks, device)
        return self._blocks[key]

    def visible(self, sample: int, device: torch.device) -> torch.Tensor:
        """Return a bool mask `[length, length]` of the (query, key) pairs that the spans of a sample add."""
        length = self.lengths[sample]
        is_visible = torch.zeros(length, length, dtype=torch.bool, device=device)
        for first, count in self.spans[sample]:
            span = slice(first, first + count)
            is_visible[span, span] = True
        return is_visible if self.over_windows else is_visible.triu(1)
