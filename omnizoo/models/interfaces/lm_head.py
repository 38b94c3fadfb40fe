"""Replace a language model's head with a loss, so that the full logits are never in memory.

FSDP2 gathers the head's weights only during the model's forward pass, so the loss must run inside it. Config fields
determine which operations the model applies after the head (softcap, scale). A test replaces the logits with known
numbers, to check that the model applies no other operation.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn
from unittest.mock import patch

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from omnizoo.config.errors import UserError
from omnizoo.models.hf_private import trunk
from omnizoo.ops.loss.linear_cross_entropy import LinearHead


@dataclass(frozen=True)
class Logits:
    """The head of a model: hidden states `[n, width]` -> logits `[n, vocabulary]`, including softcap and scale."""

    forward: Callable[[torch.Tensor], torch.Tensor]
    linear: LinearHead | None  # weights, scale and cap of the head; None if it is not a plain linear layer

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.forward(hidden)


class UnsupportedHeadError(UserError):
    """Raised if the head of a model cannot be called separately from the model's forward."""


HeadWork = Callable[[torch.Tensor, Logits], None]  # receives the hidden states [N, width] for N targets, and the head

CAPS = ("final_logit_softcapping", "logits_soft_cap")
TEST_RANGE = 40.0  # range of the test numbers: large enough for a softcap to change them


class Head:
    """The head of a model. `key` is the config key that requires it, for messages."""

    def __init__(self, model: nn.Module, key: str) -> None:
        find = getattr(model, "get_output_embeddings", None)
        module = find() if callable(find) else None
        self.key = key
        self.model = type(model).__name__.removeprefix("FSDP")
        if not isinstance(module, nn.Module):
            self._raise_unsupported("does not return its head from get_output_embeddings()")
        self.module = module

        config = getattr(model, "config", None)
        text_config = config.get_text_config() if config is not None else None
        multiplier = getattr(text_config, "logit_scale", None) or 1.0
        divisor = getattr(text_config, "logits_scaling", None) or 1.0
        self.scale = float(multiplier / divisor)
        caps = [getattr(text_config, name, None) for name in CAPS]
        self.cap: float | None = next((cap for cap in caps if cap), None)
        self._is_checked = False

    def after(self, logits: torch.Tensor) -> torch.Tensor:
        """Apply the model's scale and softcap to the output of its head."""
        logits = logits if self.scale == 1.0 else logits * self.scale
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap

    def _logits(self, forward: Callable[[torch.Tensor], torch.Tensor]) -> Logits:
        """Return `Logits` that call `forward`, the original forward of the head module."""
        linear = None
        if getattr(forward, "__func__", None) is nn.Linear.forward:  # `forward` is that of a plain linear layer
            assert isinstance(self.module, nn.Linear)
            linear = LinearHead(self.module.weight, self.module.bias, self.scale, self.cap)
        return Logits(lambda rows: self.after(forward(rows)), linear)

    @contextmanager
    def replaced_by(self, work: HeadWork) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
        """Context manager for one forward pass, in which `work` is called instead of the model's head.

        Yields a function that accepts the logits returned by the model and returns a zero that is connected to the
        autograd graph. Add it to the loss, so that the backward pass reaches the model.
        """
        original = self.module.forward
        test_logits: list[torch.Tensor] = []  # one tensor [2, vocabulary] per call of the head

        def replacement(hidden: torch.Tensor) -> torch.Tensor:
            work(hidden.flatten(0, -2), self._logits(original))
            empty = original(hidden[..., :0, :].detach())
            numbers = torch.linspace(-TEST_RANGE, TEST_RANGE, 2 * empty.shape[-1], device=empty.device)
            test_logits.append(numbers.to(empty.dtype).view(2, -1))
            return test_logits[-1].expand(*empty.shape[:-2], 2, -1) + 0 * hidden.sum()

        def anchor(out: torch.Tensor) -> torch.Tensor:
            if len(test_logits) != 1:
                self._raise_unsupported(f"calls its head {len(test_logits)} times in a forward pass")
            if not self._is_checked:
                self._check(out.detach().flatten(0, -2), self.after(test_logits[0]))
            return 0 * out.sum()

        with patch.object(self.module, "forward", replacement):
            yield anchor

    def _check(self, out: torch.Tensor, expected: torch.Tensor) -> None:
        """Check, once per run, that the model returns the test numbers as expected."""
        self._is_checked = True
        tolerance = 8 * torch.finfo(expected.dtype).eps * TEST_RANGE
        if out.shape != expected.shape or not (out.to(expected.dtype) - expected).abs().max() <= tolerance:
            self._raise_unsupported("changes the logits after its head, in a way that its config does not describe")

    def _raise_unsupported(self, reason: str) -> NoReturn:
        """Raise an `UnsupportedHeadError`. `reason` is a verb phrase whose subject is the model."""
        raise UnsupportedHeadError(
            f"{self.key}: this loss uses hidden states and the head, but {self.model} {reason}. "
            "Use a loss that is computed from logits."
        )


def last_hidden_state(model: PreTrainedModel, keep: Callable[[torch.Tensor], None]) -> RemovableHandle:
    """Register a hook that passes the hidden states for the head of a causal language model to `keep`."""
    return trunk(model).register_forward_hook(lambda module, inputs, out: keep(out[0]))
