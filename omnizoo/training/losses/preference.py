"""Losses on preference pairs: DPO and its variants, ORPO and SimPO.

Both responses of a pair are in the same pack. With sequence parallelism, several ranks have tokens of a response
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
    """Base class of losses on preference pairs, averaged over pairs.

    Responses are compared by their log-probability, divided by their length if `is_normalized`. The reward of a
    response is `beta` times this value.
    """

    metrics: ClassVar[Sequence[str]] = ("rewards/chosen", "rewards/rejected", "margin", "accuracy")
    is_normalized = True
    reference_scores: torch.Tensor | float = 0.0  # [samples], log-probabilities under the reference, to be subtracted

    def __init__(self, beta: float = 0.1, **options: Any) -> None:
        super().__init__(**options)
        self.beta = beta

    def pair_losses(self, chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
        """Return the loss of each pair, `[pairs]`, given the log-probabilities of both responses, `[pairs]` each."""
        raise NotImplementedError

    def count(self, totals: StepTotals) -> float:
        return totals.pairs

    def loss_of_sums(self, sums: torch.Tensor, batch: LocalBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        scores = sums[0] - self.reference_scores
        if self.is_normalized:
            scores = scores / sums[1].clamp(min=1)
        chosen_samples = batch.samples_by_role["chosen"]
        chosen = scores[chosen_samples]
        rejected = scores[chosen_samples + 1]

        chosen_rewards = self.beta * chosen
        rejected_rewards = self.beta * rejected
        metric_sums = {
            "rewards/chosen": chosen_rewards.sum(),
            "rewards/rejected": rejected_rewards.sum(),
            "margin": (chosen_rewards - rejected_rewards).sum(),
            "accuracy": (chosen_rewards > rejected_rewards).double().sum(),
        }
        losses = self.pair_losses(chosen, rejected)
        total = losses.sum()
        batch.source_sums.add(total, losses, chosen_samples)
        return total, metric_sums


class DPO(ReferenceLoss, PairLoss):
    """Direct preference optimization (Rafailov et al., 2023), on the log-ratios of model and reference.

    The option `loss` is `sigmoid`, with `label_smoothing` as in conservative DPO; `ipo` (Azar et al., 2023); or `hinge`
    (Zhao et al., 2023). If `length_normalized` (default: only for `ipo`), log-probabilities are divided by the length
    of their response. For the option `reference`, see `Reference`. With `reference_free`, the loss is computed on
    log-probabilities, without a reference.
    """

    kind = "dpo"

    def __init__(
        self,
        loss: str = "sigmoid",
        label_smoothing: float = 0.0,
        length_normalized: bool | None = None,
        reference_free: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if reference_free and (self.folder is not None or self.cache_folder is not None):
            name = "reference" if self.folder is not None else "reference_cache"
            raise UserError(f"reference_free: true cannot be combined with {name}. Remove one of them.")
        if label_smoothing and loss != "sigmoid":
            raise UserError(
                f"label_smoothing: {label_smoothing:g} cannot be combined with loss: {loss}. Use loss: sigmoid, or set "
                "label_smoothing to 0."
            )
        self.loss = loss
        self.label_smoothing = label_smoothing
        self.is_normalized = loss == "ipo" if length_normalized is None else length_normalized
        self.is_reference_free = reference_free

    def pair_losses(self, chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
        margin = chosen - rejected
        if self.loss == "ipo":
            return (margin - 1 / (2 * self.beta)).square()
        if self.loss == "hinge":
            return F.relu(1 - self.beta * margin)
        return preference_nll(self.beta * margin, self.label_smoothing)


class SimPO(PairLoss):
    """Simple preference optimization (Meng et al., 2024), on mean log-probabilities of tokens, without a reference.

    `gamma` is the target margin between the rewards of the chosen and the rejected response.
    """

    def __init__(self, beta: float = 2.0, gamma: float = 1.0, label_smoothing: float = 0.0, **options: Any) -> None:
        super().__init__(beta, **options)
        self.gamma = gamma
        self.label_smoothing = label_smoothing

    def pair_losses(self, chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
        margin = self.beta * (chosen - rejected) - self.gamma
        return preference_nll(margin, self.label_smoothing)


class ORPO(PairLoss):
    """Odds ratio preference optimization (Hong et al., 2024), on mean log-probabilities of tokens, without a reference.

    The loss is the negative log-likelihood of the chosen response plus `beta` times the odds ratio loss of the pair.
    """

    def pair_losses(self, chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
        log_odds_ratio = _log_odds(chosen) - _log_odds(rejected)
        return -chosen + self.beta * preference_nll(log_odds_ratio)


def _log_odds(log_probability: torch.Tensor) -> torch.Tensor:
    """Return log(p / (1 - p)), given log p."""
    return log_probability - torch.log(-torch.expm1(log_probability))


def preference_nll(margin: torch.Tensor, label_smoothing: float = 0.0) -> torch.Tensor:
    """Return the negative log-likelihood of preferences. A fraction `label_smoothing` of them is assumed to be
    wrong."""
    return -(1 - label_smoothing) * F.logsigmoid(margin) - label_smoothing * F.logsigmoid(-margin)
