"""KTO: answers judged one by one, by a label, against how far the model has moved from its reference as a whole."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import nn

from omnizoo.config.schema import Config
from omnizoo.data.plan import Totals
from omnizoo.parallel.mesh import Mesh
from omnizoo.training.forward import Local, LocalAnswers
from omnizoo.training.loss_contract import Upcoming
from omnizoo.training.preference_losses import Asked, OfAnswers, Reference

KEY = "train.losses: kto"


class KTO(OfAnswers):
    """Kahneman-Tversky optimisation (Ethayarajh et al., 2024); a mean over answers.

    The baseline `kl` is a mean over prompts with answers of other rows, of the whole step: by how much more likely the
    model finds these than its reference does, at least 0. With `zero` there is none: APO-zero (D'Oosterlinck et al.,
    2024) for single answers. For `reference`, see `Reference`.
    """

    metrics: ClassVar[Sequence[str]] = ("rewards/desirable", "rewards/undesirable", "kl")

    def __init__(
        self,
        beta: float = 0.1,
        desirable_weight: float = 1.0,
        undesirable_weight: float = 1.0,
        baseline: str = "kl",
        reference: str | None = None,
        reference_cache: str | None = None,
        chunked: bool | None = None,
    ) -> None:
        super().__init__(chunked)
        self.beta, self.weights = beta, (desirable_weight, undesirable_weight)
        self.baseline, self.folders = baseline, (reference, reference_cache)

    def set_up(self, model: nn.Module, mesh: Mesh, config: Config) -> None:
        super().set_up(model, mesh, config)
        self.reference = Reference(self, "kto", *self.folders, model, mesh, config)
        self.asked, self.total = Asked(model, self, KEY), mesh.total
        self.kl = torch.zeros((), dtype=torch.float64, device=mesh.device)

    def count(self, totals: Totals) -> float:
        return totals.desirable + totals.undesirable

    def count_of(self, metric: str, totals: Totals) -> float:
        counts = {"rewards/desirable": totals.desirable, "rewards/undesirable": totals.undesirable}
        return counts.get(metric, self.count(totals))

    def begin_step(self, step: Upcoming) -> None:
        self.reference.begin_step(step)
        if self.baseline == "zero":
            return
        assert step.mismatched is not None
        moved = torch.zeros_like(self.kl)
        for batch in step.mismatched.batches:
            local = step.local(batch)
            moved += (self.asked.sums(local) - self.reference.sums(local)).sum() / self.sharing
        self.kl = (self.total(moved) / max(1, step.mismatched.totals.mismatched)).clamp(min=0)

    def prepare(self, batch: Local) -> None:
        self.of_reference = self.reference.sums(batch)

    def of_sums(self, sums: torch.Tensor, answers: LocalAnswers) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        apart = sums[0] - self.of_reference
        good, bad = apart[answers.of_role["desirable"]], apart[answers.of_role["undesirable"]]
        losses = [
            weight * (1 - torch.sigmoid(self.beta * (sign * (each - self.kl)))).sum()
            for weight, sign, each in zip(self.weights, (1, -1), (good, bad), strict=True)
        ]
        judged = len(good) + len(bad)
        measured = (self.beta * good.sum(), self.beta * bad.sum(), judged * self.kl)
        return losses[0] + losses[1], dict(zip(self.metrics, measured, strict=True))
