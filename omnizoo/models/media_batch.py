"""Media on their way into a model: items that this rank works on go in, rows for this rank's tokens come out.

A model calls every encoder and decoder exactly once per forward pass, with or without items: modules may be sharded,
and a rank that left one out would leave the others waiting.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from omnizoo.modalities.base import Decoder, Encoder, Inputs, Port


@dataclass(frozen=True)
class Rows:
    """Rows that arrived for this rank's tokens."""

    rows: torch.Tensor  # [N, C]
    index: torch.Tensor  # [N]: the token, in this rank's slice, that each belongs to


Deliver = Callable[[dict[Port, torch.Tensor]], dict[Port, Rows]]


@dataclass(frozen=True)
class MediaBatch:
    """What a model's forward gets as `media`."""

    items: dict[Port, list[Inputs]]  # by port, on the host
    deliver: Deliver  # rows of all ports to the tokens in whose place they are
    deliver_labels: Deliver  # rows of decoder ports to the tokens that predict them
    device: torch.device
    dtype: torch.dtype  # of the computation

    def encode(self, port: Port, encoder: Encoder) -> torch.Tensor:
        """Rows `[n, C]` of this rank's items."""
        return self._run(port, encoder.encode, encoder.blank, self.dtype)

    @torch.no_grad()
    def targets(self, port: Port, decoder: Decoder) -> torch.Tensor:
        """Target rows `[n, K]` of this rank's items, in fp32 at least: codes and losses depend on every digit."""
        return self._run(port, decoder.targets, decoder.blank, torch.promote_types(self.dtype, torch.float32))

    def _run(
        self,
        port: Port,
        work: Callable[[Sequence[Inputs]], torch.Tensor],
        blank: Callable[[], Inputs],
        dtype: torch.dtype,
    ) -> torch.Tensor:
        items = self.items[port]
        rows = work([place(inputs, self.device, dtype) for inputs in items or [blank()]])
        return rows if items else rows[:0]  # of no item nothing is kept, and the gradient is exactly zero


def place(inputs: Inputs, device: torch.device, dtype: torch.dtype) -> Inputs:
    """A prepared item on the device, its floats in the precision of the computation."""
    return {
        name: tensor.to(device, dtype if tensor.is_floating_point() else tensor.dtype)
        for name, tensor in inputs.items()
    }
