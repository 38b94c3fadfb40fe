"""KTO, a loss on labeled responses. It compares them with a baseline: the estimated divergence from the reference."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from omnizoo.balancing.step_plan import StepTotals
from omnizoo.config.schema import Config
from omnizoo.parallel.mesh import Mesh
from omnizoo.training.local_batch import LocalBatch
from omnizoo.training.losses.base import NextStep
from omnizoo.training.losses.reference_model import ReferenceLoss, ScoringModel


class KTO(ReferenceLoss):
    """Kahneman-Tversky optimization (Ethayarajh et al., 2024), averaged over responses.

    With `baseline="kl"`, the baseline is the mean log-ratio of model and reference over the mismatched prompt-response
    pairs of the step, clamped to at least 0. With `baseline="zero"`, the baseline is 0. For labeled responses, this is
    APO-zero (D'Oosterlinck et al., 2024). For the option `reference`, see `Reference`.
    """

    kind = "kto"
    metrics: ClassVar[Sequence[str]] = ("rewards/desirable", "rewards/undesirable", "kl")

    def __init__(
        self,
        beta: float = 0.1,
        desirable_weight: float = 1.0,
        undesirable_weight: float = 1.0,
        baseline: str = "kl",
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.beta = beta
        self.desirable_weight = desirable_weight
        self.undesirable_weight = undesirable_weight
        self.baseline = baseline

    def set_up(self, model: nn.Module, mesh: Mesh, config: Config) -> None:
        super().set_up(model, mesh, config)
        self.policy = ScoringModel(model, self)
        self.total = mesh.total
        self.kl = torch.zeros((), dtype=torch.float64, device=mesh.device)

    def count(self, totals: StepTotals) -> float:
        return totals.desirable + totals.undesirable

    def metric_count(self, metric: str, totals: StepTotals) -> float:
        counts = {"rewards/desirable": totals.desirable, "rewards/undesirable": totals.undesirable}
        return counts.get(metric, self.count(totals))

    def begin_step(self, step: NextStep) -> None:
        super().begin_step(step)
        if self.baseline == "zero":
            return
        assert step.kto_baseline is not None
        log_ratio = torch.zeros_like(self.kl)
        for batch in step.kto_baseline.micro_batches:
            local = step.local(batch)
            log_ratio += (self.policy.sums(local) - self.reference.sums(local)).sum() / self.num_sharing
        num_pairs = max(1, step.kto_baseline.totals.mismatched)
        self.kl = (self.total(log_ratio) / num_pairs).clamp(min=0)

    def loss_of_sums(self, sums: torch.Tensor, batch: LocalBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        log_ratios = sums[0] - self.reference_scores
        desirable_samples = batch.samples_by_role["desirable"]
        undesirable_samples = batch.samples_by_role["undesirable"]
        desirable = log_ratios[desirable_samples]
        undesirable = log_ratios[undesirable_samples]

        desirable_losses = self.desirable_weight * self._losses(desirable, 1)
        undesirable_losses = self.undesirable_weight * self._losses(undesirable, -1)
        total = desirable_losses.sum() + undesirable_losses.sum()
        losses = torch.cat([desirable_losses, undesirable_losses])
        batch.source_sums.add(total, losses, torch.cat([desirable_samples, undesirable_samples]))

        num_responses = len(desirable) + len(undesirable)
        metric_sums = {
            "rewards/desirable": self.beta * desirable.sum(),
            "rewards/undesirable": self.beta * undesirable.sum(),
            "kl": num_responses * self.kl,
        }
        return total, metric_sums

    def _losses(self, log_ratios: torch.Tensor, sign: int) -> torch.Tensor:
        """Return the loss of each response, `[responses]`. `sign` is 1 for desirable responses, otherwise -1."""
        return 1 - torch.sigmoid(self.beta * (sign * (log_ratios - self.kl)))
