"""Policy-gradient losses with clipped ratios on rollouts: GRPO with its variants, and GSPO.

Each token of a response in a rollout (`omnizoo.Rollout`) has an advantage, the log-probability under the policy that
generated it (`old`), and optionally the log-probability under a frozen reference (`reference`).
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from omnizoo.balancing.step_plan import TEXT, StepTotals
from omnizoo.config.errors import UserError
from omnizoo.training.local_batch import LocalBatch
from omnizoo.training.losses.log_probability import LogProbabilityLoss

ADVANTAGE = "advantage"
OLD = "old"
REFERENCE = "reference"


class Policy(LogProbabilityLoss):
    """Base class of policy-gradient losses.

    Metrics: the `ratio` of new to old probabilities, the share of targets that are `clipped`, and estimates of the
    divergence from the old policy (`kl`) and from the reference (`reference_kl`, 0 for rollouts without a reference).
    """

    metrics: ClassVar[Sequence[str]] = ("ratio", "clipped", "kl", "reference_kl")
    is_by_answer = True  # average the values of tokens within each response first

    def __init__(self, clip_low: float = 0.2, clip_high: float = 0.2, beta: float = 0.0, **options: Any) -> None:
        super().__init__(**options)
        self.clip_low = clip_low
        self.clip_high = clip_high
        self.beta = beta
        self.required_columns = (ADVANTAGE, OLD, REFERENCE) if beta else (ADVANTAGE, OLD)

    def loss_of_tokens(self, scores: torch.Tensor, batch: LocalBatch) -> torch.Tensor:
        if OLD not in batch.columns:  # all packs are dummy packs, on all ranks of the sequence-parallel group
            self.metric_sums = {name: scores.new_zeros(()) for name in self.metrics}
            return 0 * scores.sum()
        dtype = scores.dtype
        scores = scores.double()
        token_weights = torch.ones_like(scores)
        if self.is_by_answer:
            token_weights = 1 / self.lengths(batch)
        total, token_metrics = self.loss_of_ratios(scores - batch.columns[OLD], batch, token_weights)

        reference_kl = torch.zeros_like(scores)
        if REFERENCE in batch.columns:
            reference_kl = divergence(batch.columns[REFERENCE] - scores)
        if self.beta:
            total = total + self.beta * (reference_kl * token_weights).sum()

        self.metric_sums = {}
        for name, values in zip(self.metrics, [*token_metrics, reference_kl], strict=True):
            self.metric_sums[name] = (values.detach() * token_weights).sum().to(dtype)
        return total.to(dtype)

    def loss_of_ratios(
        self, log_ratio: torch.Tensor, batch: LocalBatch, token_weights: torch.Tensor
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the sum of the loss and the metrics of each target, both without the divergence from the reference.

        Args:
            log_ratio: Log-ratio of new to old probability of each target, `[targets]`.
            batch: This rank's part of the micro-batch.
            token_weights: Weight of each target in sums, `[targets]`.
        """
        raise NotImplementedError

    def lengths(self, batch: LocalBatch) -> torch.Tensor:
        """Return the number of targets in the sample of each target, summed over ranks, `[targets]`."""
        ones = torch.ones_like(batch.columns[OLD])[None]
        lengths = self.sum_by_sample(ones, batch.sample_of_target, batch.num_samples)[0]
        return lengths[batch.sample_of_target]

    def clip_loss(self, ratio: torch.Tensor, advantage: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the clipped loss, and a mask with 1 where the loss is clipped and has no gradient."""
        unclipped = ratio * advantage
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high) * advantage
        is_clipped = clipped < unclipped
        return -torch.minimum(unclipped, clipped), is_clipped.double()


class GRPO(Policy):
    """Group relative policy optimization (Shao et al., 2024), with one ratio per token. The caller sets the advantages.

    The option `aggregation` selects how token losses are averaged. `token` averages over all tokens of the step (DAPO,
    Yu et al., 2025). `sample` averages over the tokens of each response and then over responses, as in the original
    paper. `constant` divides the sum of each response by a fixed `length` (Dr. GRPO, Liu et al., 2025). `beta` is the
    weight of the divergence from the reference (Schulman's k3 estimate).
    """

    def __init__(self, aggregation: str = "token", length: int | None = None, **options: Any) -> None:
        super().__init__(**options)
        if aggregation == "constant" and length is None:
            raise UserError("length: not set, but aggregation is constant. Set length to a number of tokens.")
        if aggregation != "constant" and length is not None:
            raise UserError(
                f"length: {length} has no effect with aggregation: {aggregation}. Remove it, or set aggregation: "
                "constant."
            )
        self.length = length
        self.is_by_answer = aggregation == "sample"

    def count(self, totals: StepTotals) -> float:
        if self.length is None:
            return self.metric_count("", totals)
        return totals.answers * self.length

    def metric_count(self, metric: str, totals: StepTotals) -> float:
        return totals.answers if self.is_by_answer else totals.targets.get(TEXT, 0)

    def loss_of_ratios(
        self, log_ratio: torch.Tensor, batch: LocalBatch, token_weights: torch.Tensor
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        ratio = log_ratio.exp()
        loss, is_clipped = self.clip_loss(ratio, batch.columns[ADVANTAGE])
        return (loss * token_weights).sum(), [ratio, is_clipped, divergence(log_ratio)]


class GSPO(Policy):
    """Group sequence policy optimization (Zheng et al., 2025), averaged over responses.

    The ratio of a response is the geometric mean of its token ratios. Its advantage is the mean of its token
    advantages.
    """

    def __init__(self, clip_low: float = 3e-4, clip_high: float = 4e-4, **options: Any) -> None:
        super().__init__(clip_low, clip_high, **options)

    def count(self, totals: StepTotals) -> float:
        return totals.answers

    def loss_of_ratios(
        self, log_ratio: torch.Tensor, batch: LocalBatch, token_weights: torch.Tensor
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        values = torch.stack([log_ratio, batch.columns[ADVANTAGE], torch.ones_like(log_ratio)])
        sums = self.sum_by_sample(values, batch.sample_of_target, batch.num_samples)
        num_targets = sums[2].clamp(min=1)  # a sample without targets has an advantage of 0
        log_ratio, advantage = sums[:2] / num_targets

        ratio = log_ratio.exp()
        loss, is_clipped = self.clip_loss(ratio, advantage)
        sample_metrics = (ratio, is_clipped, divergence(log_ratio))
        token_metrics = [values[batch.sample_of_target] for values in sample_metrics]
        total = loss.sum()  # equal on all ranks of the sequence-parallel group
        share = total.detach() / self.num_sharing
        return share + (total - total.detach()), token_metrics


def divergence(log_ratio: torch.Tensor) -> torch.Tensor:
    """Return a non-negative estimate of the divergence, Schulman's k3.

    Its mean is KL(q || p) if `log_ratio` is log p - log q on samples from q.
    """
    return torch.expm1(log_ratio) - log_ratio


class LogProbabilityRecorder(LogProbabilityLoss):
    """Stores the log-probability of each target in `values`, at the index in the column `PLACE`. The loss is 0."""

    PLACE: ClassVar[str] = "place"
    values: torch.Tensor  # set by the caller before the forward passes

    def loss_of_tokens(self, scores: torch.Tensor, batch: LocalBatch) -> torch.Tensor:
        if self.PLACE in batch.columns:
            index = batch.columns[self.PLACE].long()
            self.values[index] = scores.to(self.values.dtype)
        return scores.new_zeros(())
