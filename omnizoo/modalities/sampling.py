"""Sampling with temperature, top-k and top-p."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Sampling:
    """Options for sampling the next token or target. With temperature 0, the most likely candidate is chosen.

    Args:
        temperature: Divisor of the logits.
        top_k: Maximum number of candidates; 0 for no limit.
        top_p: Cumulative probability of the most likely candidates to sample from; 1 for all.
        generator: Random generator. If None, torch's default generator is used.

    Example:
        index = Sampling(temperature=0.7, top_p=0.9).draw(logits)
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    generator: torch.Generator | None = None

    def draw(self, logits: torch.Tensor) -> torch.Tensor:
        """Sample one index per distribution.

        Args:
            logits: `[..., candidates]`.

        Returns:
            Indices `[...]`.
        """
        if self.temperature == 0:
            return logits.argmax(-1)
        logits = logits.float() / self.temperature
        if self.top_k:
            num_candidates = min(self.top_k, logits.shape[-1])
            smallest = logits.topk(num_candidates).values[..., -1:]
            logits = logits.masked_fill(logits < smallest, -torch.inf)
        if self.top_p < 1.0:
            sorted_logits, order = logits.sort(descending=True)
            probability = sorted_logits.softmax(-1)
            is_excluded = probability.cumsum(-1) - probability > self.top_p  # the most likely candidate is always kept
            logits = logits.masked_fill(is_excluded.scatter(-1, order, is_excluded), -torch.inf)
        probabilities = logits.softmax(-1).flatten(0, -2)
        indices = torch.multinomial(probabilities, 1, generator=self.generator)
        return indices.view(logits.shape[:-1])
