"""The head of a language model as a door: work is done where the model calls its head, and logits need never be whole.

Only there are the head's weights at hand (FSDP2 gathers them for the model's own forward pass), and its hidden states
those that the head is given. What models do to logits after the head (a cap, a scale) is known by the names that their
configs have for it; whether that is all is tried, with numbers that go the same way.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import nn

from omnizoo.config.errors import UserError
from omnizoo.ops.linear_cross_entropy import LinearHead


@dataclass(frozen=True)
class Logits:
    """The head of a model: hidden states `[n, width]` -> logits `[n, V]`, with all that the model does to them."""

    forward: Callable[[torch.Tensor], torch.Tensor]
    linear: LinearHead | None  # the same as weights and numbers; None: it is more than that

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.forward(hidden)


class OddHeadError(UserError):
    """A model whose head cannot be called from outside as the model would."""


Work = Callable[[torch.Tensor, Logits], None]  # is given all hidden states [N, width] at targets, and the head

SCALES = {"logit_scale": 1, "logits_scaling": -1}  # by config field: times it to this power
CAPS = ("final_logit_softcapping", "logits_soft_cap")
TRIED = 40.0  # numbers up to this go the way of logits: beyond what caps leave as it is


class Head:
    """`key` is the config key that asks for it."""

    def __init__(self, model: nn.Module, key: str) -> None:
        find = getattr(model, "get_output_embeddings", None)
        module = find() if callable(find) else None
        self.model = type(model).__name__.removeprefix("FSDP")
        if not isinstance(module, nn.Module):
            raise OddHeadError(
                f"{key} works on hidden states and the head, but {self.model} does not tell which module its head is "
                "(get_output_embeddings); use a loss that sees logits"
            )
        self.module, self.key = module, key
        config = getattr(model, "config", None)
        settings = config.get_text_config() if config is not None else None
        scales = {power: getattr(settings, name, None) or 1.0 for name, power in SCALES.items()}
        self.scale = float(scales[1] / scales[-1])
        self.cap: float | None = next((cap for name in CAPS if (cap := getattr(settings, name, None))), None)
        self._is_tried = False

    def after(self, logits: torch.Tensor) -> torch.Tensor:
        """What the model makes of its head's output."""
        logits = logits if self.scale == 1.0 else logits * self.scale
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap

    def _logits(self, forward: Callable[[torch.Tensor], torch.Tensor]) -> Logits:
        module, linear = self.module, None
        if getattr(forward, "__func__", None) is nn.Linear.forward:  # and not what a class or somebody else made of it
            assert isinstance(module, nn.Linear)
            linear = LinearHead(module.weight, module.bias, self.scale, self.cap)
        return Logits(lambda rows: self.after(forward(rows)), linear)

    @contextmanager
    def doing(self, work: Work) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
        """Around one forward pass of the model: `work` takes the place of its head. Call what this gives with the
        model's logits afterwards: it gives 0, with a graph that a backward pass has to begin at."""
        own = self.module.forward
        made: list[torch.Tensor] = []

        def take_place(hidden: torch.Tensor) -> torch.Tensor:
            work(hidden.flatten(0, -2), self._logits(own))
            empty = own(hidden[..., :0, :].detach())
            numbers = torch.linspace(-TRIED, TRIED, 2 * empty.shape[-1], device=empty.device).to(empty.dtype)
            made.append(numbers.view(2, -1))
            return made[-1].expand(*empty.shape[:-2], 2, -1) + 0 * hidden.sum()

        def anchor(out: torch.Tensor) -> torch.Tensor:
            if len(made) != 1:
                self._refuse(f"calls its head {len(made)} times in a forward pass")
            if not self._is_tried:
                self._try(out.detach().flatten(0, -2), self.after(made[0]))
            return 0 * out.sum()

        attributes = vars(self.module)
        before = {"forward": attributes["forward"]} if "forward" in attributes else {}
        attributes["forward"] = take_place
        try:
            yield anchor
        finally:
            del attributes["forward"]
            attributes.update(before)

    def _try(self, out: torch.Tensor, expected: torch.Tensor) -> None:
        """Once per run: what came out must be what is expected to."""
        self._is_tried = True
        within = 8 * torch.finfo(expected.dtype).eps * TRIED
        if out.shape != expected.shape or not (out.to(expected.dtype) - expected).abs().max() <= within:
            self._refuse("changes logits after its head in a way that its config does not tell")

    def _refuse(self, why: str) -> NoReturn:
        raise OddHeadError(
            f"{self.key} works on hidden states and the head, but {self.model} {why}; use a loss that sees logits"
        )
