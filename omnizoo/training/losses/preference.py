"""Losses on preference pairs: DPO and variants, ORPO and SimPO.

Both responses of a pair are in the same pack. With sequence parallelism, several ranks have tokens of them
(`training/losses/log_probability.py`).
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from omnizoo.balancing.step_plan import StepTotals
from omnizoo.config.errors import UserError
from omnizoo.training.local_batch import LocalBatch
from omnizoo.training.losses.log_probability import ResponseLoss
from omnizoo.training.losses.reference_model import ReferenceLoss


class PairLoss(ResponseLoss):
    """Base class of losses on preference pairs, a mean over pairs.

    Responses are compared by their log-probability, divided by their length if `is_normalized`. The reward of a
    response is `beta` times this value.
    """

    metrics: ClassVar[Sequence[str]] = ("rewards/chosen", "rewards/rejected", "margin", "accuracy")
    is_normalized = True
    of_reference: torch.Tensor | float = 0.0  # [samples], log-probabilities by the reference, which are subtracted

    def __init__(self, beta: float = 0.1, **options: Any) -> None:
        super().__init__(**options)
        self.beta = beta

    def of_pairs(self, chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
        """Return the loss of each pair, `[pairs]`, given the log-probabilities of both responses, `[pairs]` each."""
        raise NotImplementedError

    def count(self, totals: StepTotals) -> float:
        return totals.pairs

    def of_sums(self, sums: torch.Tensor, batch: LocalBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        each = sums[0] - self.of_reference
        each = each / sums[1].clamp(min=1) if self.is_normalized else each
        chosen, rejected = each[batch.samples_by_role["chosen"]], each[batch.samples_by_role["chosen"] + 1]
        good, bad = self.beta * chosen, self.beta * rejected
        metric_sums = (good.sum(), bad.sum(), (good - bad).sum(), (good > bad).double().sum())
        return self.of_pairs(chosen, rejected).sum(), dict(zip(self.metrics, metric_sums, strict=True))


class DPO(ReferenceLoss, PairLoss):
    """Direct preference optimization (Rafailov et al., 2023), on the log-ratios of model and reference.

    The option `loss` is `sigmoid`, with `label_smoothing` as in conservative DPO; `ipo` (Azar et al., 2023), on means
    over tokens unless `length_normalized` is false; or `hinge` (Zhao et al., 2023). For the option `reference`, see
    `Reference`.
    """

    kind = "dpo"

    def __init__(
        self,
        loss: str = "sigmoid",
        label_smoothing: float = 0.0,
        length_normalized: bool | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if label_smoothing and loss != "sigmoid":
            raise UserError(f"label_smoothing: {label_smoothing:g} is for the loss sigmoid, not for {loss}")
        self.loss, self.label_smoothing = loss, label_smoothing
        self.is_normalized = loss == "ipo" if length_normalized is None else length_normalized

    def of_pairs(self, chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
        apart = chosen - rejected
        if self.loss == "ipo":
            return (apart - 1 / (2 * self.beta)).square()
        if self.loss == "hinge":
            return F.relu(1 - self.beta * apart)
        return unlikeliness(self.beta * apart, self.label_smoothing)


class SimPO(PairLoss):
    """Simple preference optimization (Meng et al., 2024), on means over tokens, without a reference.

    `gamma` is the target margin between the rewards of the chosen and the rejected response.
    """

    def __init__(self, beta: float = 2.0, gamma: float = 1.0, label_smoothing: float = 0.0, **options: Any) -> None:
        super().__init__(beta, **options)
        self.gamma, self.label_smoothing = gamma, label_smoothing

    def of_pairs(self, chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
        return unlikeliness(self.beta * (chosen - rejected) - self.gamma, self.label_smoothing)


class ORPO(PairLoss):
    """Odds ratio preference optimization (Hong et al., 2024), on means over tokens, without a reference.

    The loss is the negative log-likelihood of the chosen response plus `beta` times the odds ratio loss of the pair.
    """

    def of_pairs(self, chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
        log_odds = [answer - torch.log(-torch.expm1(answer)) for answer in (chosen, rejected)]
        return -chosen + self.beta * unlikeliness(log_odds[0] - log_odds[1])


def unlikeliness(apart: torch.Tensor, label_smoothing: float = 0.0) -> torch.Tensor:
    """Return the negative log-likelihood of the preferences, if the share `label_smoothing` of them is wrong."""
    return -(1 - label_smoothing) * F.logsigmoid(apart) - label_smoothing * F.logsigmoid(-apart)
