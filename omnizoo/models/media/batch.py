"""Media of one forward pass: each rank encodes its items and receives the features of its tokens.

A model calls every encoder and decoder exactly once per forward pass, with or without items. Their weights may be
sharded, so if a rank skipped a call, the other ranks would wait for it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from omnizoo.modalities.base import Decoder, Encoder, Follower, SharedTower
from omnizoo.modalities.item import Inputs, MediaItem, Port
from omnizoo.modalities.precomputed import TARGETS
from omnizoo.models.media.features import MediaFeatures, TargetLikelihood
from omnizoo.ops.device import to_device


class MediaTransport(Protocol):
    """Sends features to the ranks that have their tokens."""

    @property
    def needs_likelihood(self) -> bool:
        """Whether decoders report the likelihood of their targets before the head runs."""

    @property
    def trains_followers(self) -> bool:
        """Whether the losses of followers are computed."""

    def exchange(self, features: Mapping[Port, torch.Tensor]) -> dict[Port, MediaFeatures]:
        """Send this rank's features to the ranks that have their tokens, and return the features of this rank's tokens.

        Collective: all ranks must call it.
        """

    def gather_rows(self, port: Port, states: torch.Tensor) -> torch.Tensor:
        """Return the rows that the follower needs for this rank's items, from `states [tokens, width]` on all ranks."""

    def on_likelihood(self, modality: str, likelihood: TargetLikelihood) -> None:
        """Receive the likelihood of a decoder's targets."""

    def on_losses(self, port: Port, name: str, losses: torch.Tensor, tokens: torch.Tensor | None) -> None:
        """Receive the losses of the targets or items that this rank processes, without gradient.

        Args:
            port: The decoder or follower.
            name: Name of the loss term.
            losses: `[n]`, or a scalar if only their sum is known.
            tokens: `[n]`, the token that predicts each target, in this rank's slice; None for losses of items.
        """


@dataclass(frozen=True)
class MediaBatch:
    """The argument `media` of a model's forward."""

    items: dict[Port, list[Inputs]]  # prepared items, in host memory
    transport: MediaTransport
    device: torch.device
    dtype: torch.dtype  # compute dtype

    def encode(self, ports: Sequence[Port], encoder: Encoder) -> dict[Port, torch.Tensor]:
        """Return the features `[n, width]` of this rank's items, for ports that share one call of `encoder`."""
        items = [item for port in ports for item in self.items[port]]
        features = self._compute(items, encoder.encode, encoder.dummy_input, self.dtype)
        if len(ports) == 1:
            return {ports[0]: features}
        assert isinstance(encoder, SharedTower), f"{type(encoder).__name__} has no `count_placeholders`"
        counts = [sum(map(encoder.count_placeholders, self.items[port])) for port in ports]
        return dict(zip(ports, features.split(counts), strict=True))

    @torch.no_grad()
    def targets(self, port: Port, decoder: Decoder) -> torch.Tensor:
        """Return the targets `[n, values per target]` of this rank's items.

        They are computed in at least fp32, because codes and losses are sensitive to rounding.
        """
        dtype = torch.promote_types(self.dtype, torch.float32)

        def compute(items: Sequence[Inputs]) -> torch.Tensor:
            if not any(TARGETS in item for item in items):
                return decoder.targets(items)
            return torch.cat([item[TARGETS] if TARGETS in item else decoder.targets([item]) for item in items])

        return self._compute(self.items[port], compute, decoder.dummy_input, dtype)

    def _compute(
        self,
        items: Sequence[Inputs],
        compute: Callable[[Sequence[Inputs]], torch.Tensor],
        dummy_input: Callable[[], Inputs],
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Return the rows that `compute` returns for all items. Without items, `compute` runs on the dummy input."""
        inputs_to_run = items or [dummy_input()]
        rows = compute([to_compute(inputs, self.device, dtype) for inputs in inputs_to_run])
        return rows if items else rows[:0]  # an empty slice, so that the dummy input has zero gradient

    def follower_losses(self, port: Port, follower: Follower, states: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the losses of a follower on this rank's items.

        `states [tokens, width]` are the hidden states of this rank's tokens.
        """
        rows = self.transport.gather_rows(port, states)
        items = self.items[port]
        if items:
            return follower.loss(rows, [to_compute(inputs, self.device, self.dtype) for inputs in items])

        dummy = follower.dummy_input()
        # Keep `rows` in the graph: a collective returned them, and other ranks wait for its backward pass.
        rows = torch.cat([rows, rows.new_zeros(follower.rows(dummy), rows.shape[1])])
        losses = follower.loss(rows, [to_compute(dummy, self.device, self.dtype)])
        return {term: 0 * loss for term, loss in losses.items()}


def exchange_media(
    media: MediaBatch,
    ports_by_call: Sequence[Sequence[Port]],
    encoders: Mapping[Port, Encoder],
    decoders: Mapping[Port, Decoder],
) -> dict[Port, MediaFeatures]:
    """Encode this rank's items, with one call per module, and return the features and targets of this rank's tokens.

    Collective: all ranks must call it.
    """
    features: dict[Port, torch.Tensor] = {}
    for ports in ports_by_call:
        encoder = encoders.get(ports[0])
        if encoder is not None:
            features |= media.encode(ports, encoder)
    features = {port: features[port] for port in encoders}  # sorted in the order of the ports

    targets = {port: media.targets(port, decoder) for port, decoder in decoders.items()}
    return media.transport.exchange(features | targets)


@dataclass(frozen=True)
class PromptTransport:
    """Transport for an unsharded model on one device. Features stay on this device, and none are prediction targets."""

    index: Mapping[Port, torch.Tensor]  # placeholder tokens of each port's items, int64
    needs_likelihood: bool = False
    trains_followers: bool = False

    def exchange(self, features: Mapping[Port, torch.Tensor]) -> dict[Port, MediaFeatures]:
        return {port: MediaFeatures.unpredicted(rows, self.index[port]) for port, rows in features.items()}

    def gather_rows(self, port: Port, states: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("followers are trained only with batches from the data loader")

    def on_likelihood(self, modality: str, likelihood: TargetLikelihood) -> None:
        raise NotImplementedError("likelihoods are computed only in training")

    def on_losses(self, port: Port, name: str, losses: torch.Tensor, tokens: torch.Tensor | None) -> None:
        """Ignore the losses, which have no targets."""


def prompt_batch(
    items: Sequence[MediaItem], ports: Sequence[Port], device: torch.device, dtype: torch.dtype
) -> MediaBatch:
    """Return a batch with all prepared items of a prompt, for an unsharded model on one device."""
    inputs: dict[Port, list[Inputs]] = {}
    index = {}
    for port in ports:
        port_items = [item for item in items if item.port == port]
        spans = [torch.arange(first, first + count) for item in port_items for first, count in item.spans]
        index[port] = torch.cat([torch.empty(0, dtype=torch.int64), *spans]).to(device)
        inputs[port] = [item.inputs for item in port_items if item.inputs is not None]
    return MediaBatch(inputs, PromptTransport(index), device, dtype)


def to_compute(inputs: Inputs, device: torch.device, dtype: torch.dtype) -> Inputs:
    """Return a prepared item on the device, with floating-point tensors in `dtype`."""
    moved = {}
    for name, tensor in inputs.items():
        target_dtype = dtype if tensor.is_floating_point() else tensor.dtype
        moved[name] = to_device(tensor, device, target_dtype)
    return moved
