"""What a published model produces among its tokens: targets are embedded in their places, and the loss of each decoder
is on the hidden states before them, as in composed models."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from omnizoo.modalities.base import Decoder, Port, term_name
from omnizoo.models.hf_private import trunk
from omnizoo.models.media_batch import Delivered, Features, MediaBatch
from omnizoo.models.omni import OmniOutput


class Producing:
    """Hooks on a model that is sharded already: what they run, they run while its weights are gathered."""

    def __init__(self, model: PreTrainedModel, decoders: Mapping[str, Decoder]) -> None:
        self.decoders = {Port(name, "decoder"): decoder for name, decoder in decoders.items()}
        self.labels: dict[Port, Features] = {}  # of the forward pass that is under way
        self.hidden: list[torch.Tensor] = []
        self.losses: dict[str, torch.Tensor] = {}  # made at the head
        trunk(model).register_forward_hook(self._keep)
        model.get_output_embeddings().register_forward_pre_hook(self._at_head)
        model.register_forward_hook(self._finish, prepend=True)  # ahead of FSDP's own

    def targets(self, media: MediaBatch) -> dict[Port, torch.Tensor]:
        return {port: media.targets(port, decoder) for port, decoder in self.decoders.items()}

    def place(
        self, arrived: Mapping[Port, Delivered], placed: dict[str, Features], dtype: torch.dtype
    ) -> dict[str, Features]:
        """`placed`, by modality, with what decoders make of targets that have a place here; ids stay ids."""
        self.labels = {port: arrived[port].predicted for port in self.decoders}
        for port, decoder in self.decoders.items():
            made = arrived[port].placed
            if not decoder.in_vocabulary:
                values = made.values.to(dtype) if made.values.is_floating_point() else made.values
                made = Features(decoder.embed(values), made.index)
            read = placed.get(port.modality)
            if read is not None:
                made = Features(
                    torch.cat([read.values, made.values.to(read.values.dtype)]), torch.cat([read.index, made.index])
                )
            placed = placed | {port.modality: made}
        return placed

    def forget(self) -> None:
        """No forward pass follows that is to predict what was placed."""
        self.labels = {}

    def _keep(self, _: nn.Module, args: Any, out: Any) -> None:
        self.hidden[:] = [out[0]] if self.labels else []

    def _at_head(self, _: nn.Module, args: Any) -> None:
        """Once the head's weights are gathered. FSDP takes what it does with them after backward to be due when the
        gradient of the head's input is known: so these losses depend on it, too."""
        for port, target in self.labels.items():
            decoder = self.decoders[port]
            if decoder.in_vocabulary or decoder.uses_head:
                hidden = self.hidden[0][0, target.index] + 0 * args[0].sum()
                self.losses |= self._losses(port, hidden, target.values)

    def _losses(self, port: Port, hidden: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        made = self.decoders[port].losses(hidden, targets)
        return {term_name(port.modality, term): loss for term, loss in made.items()}

    def _finish(self, _: nn.Module, args: Any, out: Any) -> Any:
        if not self.labels:
            return None
        hidden = self.hidden[0]
        # A backward pass gathers the head's weights where it comes to the logits: these losses wait for that.
        start = 0 * out.logits[..., :1].sum()
        losses = {name: loss + start for name, loss in self.losses.items()}
        for port, decoder in self.decoders.items():
            if not (decoder.in_vocabulary or decoder.uses_head):
                losses |= self._losses(port, hidden[0, self.labels[port].index], self.labels[port].values)
        self.labels, self.hidden, self.losses = {}, [], {}
        return OmniOutput(out.logits, losses, out.get("past_key_values"), hidden)
