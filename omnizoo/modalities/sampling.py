"""Sampling with temperature, top-k and top-p."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Sampling:
    """How to sample the next token or target. With temperature 0, the most likely one is chosen."""

    temperature: float = 1.0
    top_k: int = 0  # number of candidates; 0 for all
    top_p: float = 1.0  # cumulative probability of the candidates
    generator: torch.Generator | None = None  # None for torch's default generator

    def draw(self, logits: torch.Tensor) -> torch.Tensor:
        """Sample one index per distribution.

        Args:
            logits: `[..., V]`.

        Returns:
            Indices `[...]`.
        """
        if self.temperature == 0:
            return logits.argmax(-1)
        logits = logits.float() / self.temperature
        if self.top_k:
            smallest = logits.topk(min(self.top_k, logits.shape[-1])).values[..., -1:]
            logits = logits.masked_fill(logits < smallest, -torch.inf)
        if self.top_p < 1.0:
            sorted_, order = logits.sort(descending=True)
            probability = sorted_.softmax(-1)
            beyond = probability.cumsum(-1) - probability > self.top_p  # the most likely candidate is always kept
            logits = logits.masked_fill(beyond.scatter(-1, order, beyond), -torch.inf)
        drawn = torch.multinomial(logits.softmax(-1).flatten(0, -2), 1, generator=self.generator)
        return drawn.view(logits.shape[:-1])
