"""Policy-gradient losses of what a model itself has written: GRPO and its kin, with clipped ratios.

What a rollout comes with, for each token of an answer (`omnizoo.Rollout`): its advantage, the log-probability that the
policy gave it when it wrote it (`old`), and that of a frozen reference (`reference`).
"""

from collections.abc import Sequence
from typing import ClassVar

import torch

from omnizoo.config.errors import UserError
from omnizoo.data.plan import TEXT, Totals
from omnizoo.training.forward import Local, LocalGiven
from omnizoo.training.likelihood import OfLogProbabilities

ADVANTAGE, OLD, REFERENCE = "advantage", "old", "reference"


class Policy(OfLogProbabilities):
    """Metrics: `ratio` of new to old probabilities, the share that is `clipped`, and two estimates of a divergence,
    `kl` from the old policy and `reference_kl` from the reference (0 where rollouts do not come with one)."""

    metrics: ClassVar[Sequence[str]] = ("ratio", "clipped", "kl", "reference_kl")
    is_by_answer = True  # values of tokens are averaged in each answer first

    def __init__(
        self, clip_low: float, clip_high: float, beta: float, temperature: float, chunked: bool | None
    ) -> None:
        super().__init__(chunked, temperature)
        self.clip_low, self.clip_high, self.beta = clip_low, clip_high, beta
        self.needs = (ADVANTAGE, OLD, REFERENCE) if beta else (ADVANTAGE, OLD)

    def of_tokens(self, each: torch.Tensor, batch: Local) -> torch.Tensor:
        given = batch.given
        if given is None:  # nothing but fillers, on all ranks that share them
            self.measured = {name: each.new_zeros(()) for name in self.metrics}
            return 0 * each.sum()
        wide = each.double()
        parts = 1 / self.lengths(given) if self.is_by_answer else torch.ones_like(wide)
        total, measured = self.of_rollouts(wide - given.extra[OLD], given, parts)
        reference_kl = torch.zeros_like(wide)
        if REFERENCE in given.extra:
            reference_kl = divergence(given.extra[REFERENCE] - wide)
        if self.beta:
            total = total + self.beta * (reference_kl * parts).sum()
        sums = [(value.detach() * parts).sum().to(each.dtype) for value in (*measured, reference_kl)]
        self.measured = dict(zip(self.metrics, sums, strict=True))
        return total.to(each.dtype)

    def of_rollouts(
        self, log_ratio: torch.Tensor, given: LocalGiven, parts: torch.Tensor
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """By the log-ratio of new to old probability of each target `[N]`, and what a value of it is multiplied by: the
        sum, but for the divergence from the reference; and for each target its metrics, but for that one."""
        raise NotImplementedError

    def lengths(self, given: LocalGiven) -> torch.Tensor:
        """Targets in the sample of each target, those of other ranks included, `[N]`."""
        ones = torch.ones_like(given.extra[OLD])[None]
        return self.sums_of(ones, given)[0, given.sample_of_target]

    def clipped(self, ratio: torch.Tensor, advantage: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss, and whether it is one that a change of the ratio does nothing to."""
        free = ratio * advantage
        bound = ratio.clamp(1 - self.clip_low, 1 + self.clip_high) * advantage
        return -torch.minimum(free, bound), (bound < free).double()


class GRPO(Policy):
    """Group relative policy optimisation (Shao et al., 2024), a ratio for each token; its advantages are the caller's.

    `aggregation`: `token` is a mean over all tokens of the step (DAPO, Yu et al., 2025); `sample` a mean over answers
    of means over their tokens, as published first; `constant` divides the sum of an answer by a fixed `length` instead
    (Dr. GRPO, Liu et al., 2025). With `beta`, a divergence from the reference is added (Schulman's k3 estimate).
    """

    def __init__(
        self,
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        beta: float = 0.0,
        aggregation: str = "token",
        length: int | None = None,
        temperature: float = 1.0,
        chunked: bool | None = None,
    ) -> None:
        super().__init__(clip_low, clip_high, beta, temperature, chunked)
        if (length is None) == (aggregation == "constant"):
            expected = "expected a number of tokens" if length is None else "it is for aggregation: constant"
            raise UserError(f"length: {length} with aggregation: {aggregation}; {expected}")
        self.length, self.is_by_answer = length, aggregation == "sample"

    def count(self, totals: Totals) -> float:
        return self.count_of("", totals) if self.length is None else totals.answers * self.length

    def count_of(self, metric: str, totals: Totals) -> float:
        return totals.answers if self.is_by_answer else totals.targets.get(TEXT, 0)

    def of_rollouts(
        self, log_ratio: torch.Tensor, given: LocalGiven, parts: torch.Tensor
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        ratio = log_ratio.exp()
        loss, is_clipped = self.clipped(ratio, given.extra[ADVANTAGE])
        return (loss * parts).sum(), [ratio, is_clipped, divergence(log_ratio)]


class GSPO(Policy):
    """Group sequence policy optimisation (Zheng et al., 2025): one ratio for an answer, the geometric mean of those of
    its tokens, and one advantage, the mean of theirs. A mean over answers."""

    def __init__(
        self,
        clip_low: float = 3e-4,
        clip_high: float = 4e-4,
        beta: float = 0.0,
        temperature: float = 1.0,
        chunked: bool | None = None,
    ) -> None:
        super().__init__(clip_low, clip_high, beta, temperature, chunked)

    def count(self, totals: Totals) -> float:
        return totals.answers

    def of_rollouts(
        self, log_ratio: torch.Tensor, given: LocalGiven, parts: torch.Tensor
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        values = torch.stack([log_ratio, given.extra[ADVANTAGE], torch.ones_like(log_ratio)])
        sums = self.sums_of(values, given)
        log_ratio, advantage = sums[:2] / sums[2].clamp(min=1)  # a sample without targets has an advantage of 0
        ratio = log_ratio.exp()
        loss, is_clipped = self.clipped(ratio, advantage)
        measured = [value[given.sample_of_target] for value in (ratio, is_clipped, divergence(log_ratio))]
        total = loss.sum()  # which all ranks that share these samples have
        return total.detach() / self.sharing + (total - total.detach()), measured


def divergence(log_ratio: torch.Tensor) -> torch.Tensor:
    """An estimate, never below 0: with `log_ratio` = log p - log q of what q has drawn, its mean is KL(q || p)."""
    return torch.expm1(log_ratio) - log_ratio


class Recorded(OfLogProbabilities):
    """No loss: keeps the log-probability of each target at the `PLACE` that its sample has for it."""

    PLACE: ClassVar[str] = "place"

    def __init__(self, temperature: float, chunked: bool | None) -> None:
        super().__init__(chunked, temperature)
        self.values = torch.empty(0)

    def of_tokens(self, each: torch.Tensor, batch: Local) -> torch.Tensor:
        if batch.given is not None:
            self.values[batch.given.extra[self.PLACE].long()] = each.to(self.values.dtype)
        return each.new_zeros(())
