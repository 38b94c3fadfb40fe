"""Losses of decoders on the hidden states of the language model, computed during its forward pass."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from omnizoo.modalities.base import Decoder, HeadDecoder, LikelihoodDecoder, losses_by_term, term_name
from omnizoo.modalities.item import Port
from omnizoo.models.interfaces.lm_head import last_hidden_state
from omnizoo.models.media.batch import MediaTransport
from omnizoo.models.media.features import MediaFeatures, TargetLikelihood


class DecoderLosses:
    """The decoder losses of one forward pass, summed over targets.

    1. At the end of the trunk, the hidden states are stored. With `before_head`, the decoders run at this point.
    2. At the head, the decoders that use its weights run, because FSDP has gathered these weights at this point.
    3. `finish` runs the other decoders.
    """

    def __init__(
        self, decoders: Mapping[Port, Decoder], received: Mapping[Port, MediaFeatures], transport: MediaTransport
    ) -> None:
        self.received, self.transport = received, transport
        self.at_head = {port: d for port, d in decoders.items() if isinstance(d, HeadDecoder)}
        self.others = {port: d for port, d in decoders.items() if port not in self.at_head}
        self.hidden: torch.Tensor | None = None  # [1, tokens, width]
        self.losses: dict[str, torch.Tensor] = {}

    @contextmanager
    def watching(self, language_model: PreTrainedModel, before_head: bool = False) -> Iterator[None]:
        """Context manager for a forward pass of `language_model`: run decoders after the trunk and at the head."""
        if not self.at_head and not self.others:
            yield
            return

        def keep(hidden: torch.Tensor) -> None:
            self.hidden = hidden
            if before_head:
                self._run(self.others)

        with ExitStack() as stack:
            stack.enter_context(last_hidden_state(language_model, keep))
            if self.at_head:
                head = language_model.get_output_embeddings()
                stack.enter_context(head.register_forward_pre_hook(self._run_at_head))
            yield
        if before_head:
            self.others = {}

    def finish(self, logits: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return all losses, keyed by name. Called after the forward pass."""
        if self.at_head:
            # Backward gathers the head's weights when it reaches the logits. The anchor makes these losses depend on
            # the logits, so their backward does not start earlier.
            anchor = 0 * logits[..., :1].sum()
            self.losses = {name: loss + anchor for name, loss in self.losses.items()}
        self._run(self.others)
        return self.losses

    def _run_at_head(self, _: nn.Module, args: tuple[Any, ...]) -> None:
        # FSDP frees the head's weights in backward once the gradient of the head's input is complete. The anchor makes
        # the losses depend on this input, so its gradient is complete only after their backward.
        self._run(self.at_head, anchor=0 * args[0].sum())

    def _run(self, decoders: Mapping[Port, Decoder], anchor: torch.Tensor | None = None) -> None:
        """Compute the losses of `decoders` and store them under their names."""
        for port, decoder in decoders.items():
            tokens, losses = self._losses(port, decoder, anchor)
            for term, loss in losses.items():
                name = term_name(port.modality, term)
                self.losses[name] = loss.sum()
                self.transport.on_losses(port, name, loss.detach(), tokens)

    def _losses(
        self, port: Port, decoder: Decoder, anchor: torch.Tensor | None
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the tokens that predict the targets of one decoder, and its losses, keyed by term.

        Report the likelihood of its targets if the transport needs it.
        """
        assert self.hidden is not None, "the trunk runs before the head"
        targets = self.received[port].predicted
        trained_rows = self.received[port].trained
        hidden = self.hidden[0, targets.index]
        if anchor is not None:
            hidden = hidden + anchor

        if isinstance(decoder, LikelihoodDecoder) and self.transport.needs_likelihood:
            log_likelihood, num_values = decoder.log_likelihood(hidden, targets.values)
            likelihood = TargetLikelihood(log_likelihood, num_values, targets.index)
            self.transport.on_likelihood(port.modality, likelihood)

        if trained_rows is None:
            return targets.index, losses_by_term(decoder, hidden, targets.values)
        losses = losses_by_term(decoder, hidden[trained_rows], targets.values[trained_rows])
        return targets.index[trained_rows], losses
