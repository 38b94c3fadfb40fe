"""Media on their way into a model: items that this rank works on go in, features for this rank's tokens come out.

A model calls every encoder and decoder exactly once per forward pass, with or without items: modules may be sharded,
and a rank that left one out would leave the others waiting.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from omnizoo.modalities.base import Decoder, Encoder, Follower, Inputs, Item, Port
from omnizoo.ops.device import to_device


@dataclass(frozen=True)
class Features:
    """What encoders made of items, or targets of decoders, for this rank's tokens."""

    values: torch.Tensor  # [N, C]
    index: torch.Tensor  # [N]: the token, in this rank's slice, that each belongs to


@dataclass(frozen=True)
class Delivered:
    """What arrived of one port."""

    placed: Features  # for the tokens in whose place they are
    predicted: Features  # of decoders: targets, for the tokens that predict them
    learnt: torch.Tensor | None = None  # which of these the decoder's own loss is on; None: all


@dataclass(frozen=True)
class Likely:
    """How likely the targets of one decoder are, those of this rank's tokens."""

    log_likelihood: torch.Tensor  # [N]
    values: torch.Tensor  # [N] how many each is of
    index: torch.Tensor  # [N]: the token, in this rank's slice, that predicts it


Deliver = Callable[[dict[Port, torch.Tensor]], dict[Port, Delivered]]
Collect = Callable[[Port, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class MediaBatch:
    """What a model's forward gets as `media`."""

    items: dict[Port, list[Inputs]]  # by port, on the host
    deliver: Deliver  # what all ports made, at once: to the tokens in whose place it is, and to those that predict it
    device: torch.device
    dtype: torch.dtype  # of the computation
    # Where that is asked for: takes how likely targets are, by modality, before the model runs its head.
    tell: Callable[[str, Likely], None] | None = None
    collect: Collect | None = None  # of rows `[T, C]` of this rank's tokens, those that this rank's items read

    def follow(self, port: Port, follower: Follower, states: torch.Tensor) -> dict[str, torch.Tensor]:
        """The losses of a follower on this rank's items; `states [T, C]` are of this rank's tokens."""
        assert self.collect is not None, "followers learn in training only"
        rows, items = self.collect(port, states), self.items[port]
        if not items:
            blank = follower.blank()
            rows = torch.cat([rows, rows.new_zeros(follower.rows(blank), rows.shape[1])])  # the graph reaches others
            return {name: 0 * loss for name, loss in follower.loss(rows, [self._placed(blank)]).items()}
        return follower.loss(rows, [self._placed(inputs) for inputs in items])

    def _placed(self, inputs: Inputs) -> Inputs:
        return place(inputs, self.device, self.dtype)

    def encode(self, port: Port, encoder: Encoder) -> torch.Tensor:
        """Features `[n, C]` of this rank's items."""
        return self._made(self.items[port], encoder.encode, encoder.blank, self.dtype)

    def encode_together(self, ports: Sequence[Port], encoder: Encoder) -> dict[Port, torch.Tensor]:
        """The same of several ports, in one call of an encoder that takes the items of any of them."""
        if len(ports) == 1:
            return {ports[0]: self.encode(ports[0], encoder)}
        made = self._made(
            [item for port in ports for item in self.items[port]], encoder.encode, encoder.blank, self.dtype
        )
        counts = [sum(map(encoder.places, self.items[port])) for port in ports]
        return dict(zip(ports, made.split(counts), strict=True))

    @torch.no_grad()
    def targets(self, port: Port, decoder: Decoder) -> torch.Tensor:
        """Targets `[n, K]` of this rank's items, in fp32 at least: codes and losses depend on every digit."""
        exact = torch.promote_types(self.dtype, torch.float32)
        return self._made(self.items[port], decoder.targets, decoder.blank, exact)

    def _made(
        self,
        items: Sequence[Inputs],
        work: Callable[[Sequence[Inputs]], torch.Tensor],
        blank: Callable[[], Inputs],
        dtype: torch.dtype,
    ) -> torch.Tensor:
        made = work([place(inputs, self.device, dtype) for inputs in items or [blank()]])
        return made if items else made[:0]  # of no item nothing is kept, and the gradient is exactly zero


def whole_batch(items: Sequence[Item], ports: Sequence[Port], device: torch.device, dtype: torch.dtype) -> MediaBatch:
    """All items of a prompt, prepared, for a model that is whole: what is made of them has nowhere to go but here."""
    of = {port: [item for item in items if item.port == port] for port in ports}

    def deliver(made: dict[Port, torch.Tensor]) -> dict[Port, Delivered]:
        delivered = {}
        for port, values in made.items():
            runs = [torch.arange(first, first + count) for item in of[port] for first, count in item.spans]
            index = torch.cat([torch.empty(0, dtype=torch.int64), *runs]).to(device)
            delivered[port] = Delivered(Features(values, index), Features(values[:0], index[:0]))
        return delivered

    inputs = {port: [item.inputs for item in own if item.inputs is not None] for port, own in of.items()}
    return MediaBatch(inputs, deliver, device, dtype)


def place(inputs: Inputs, device: torch.device, dtype: torch.dtype) -> Inputs:
    """A prepared item on the device, its floats in the precision of the computation."""
    return {
        name: to_device(tensor, device, dtype if tensor.is_floating_point() else tensor.dtype)
        for name, tensor in inputs.items()
    }
