"""Losses on the scores of a sequence classification model. The model scores the last token of each sample."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from omnizoo.balancing.step_plan import StepTotals
from omnizoo.data.token_fields import CLASSES, MARGIN, unpack_labels
from omnizoo.ops.precision import at_least_fp32
from omnizoo.training.local_batch import LocalBatch
from omnizoo.training.losses.base import Loss
from omnizoo.training.losses.preference import PairLoss, preference_nll


class Reward(PairLoss):
    """Bradley-Terry loss of a reward model, averaged over pairs.

    If a row has a `margin`, the reward of the chosen response should exceed that of the rejected response by the margin
    (Touvron et al., 2023). `centering` is the weight of a term that keeps the mean reward near 0 (Eisenstein et al.,
    2023).
    """

    is_normalized = False

    def __init__(self, centering: float = 0.0) -> None:
        super().__init__(beta=1.0, chunked=False)
        self.centering = centering
        self.margins: torch.Tensor | float = 0.0  # [pairs]

    def from_logits(self, logits: torch.Tensor, batch: LocalBatch) -> torch.Tensor:
        self.margins = self._margins(batch)
        return self.loss_of_tokens(logits.squeeze(1), batch)

    def _margins(self, batch: LocalBatch) -> torch.Tensor | float:
        """Return the margin of each pair, `[pairs]`, or 0 if no row has one.

        Collective: all ranks of the sequence-parallel group must call it.
        """
        margins = batch.columns.get(MARGIN)
        if margins is None or batch.preferences is None:
            return 0.0
        by_sample = self.sum_by_sample(margins[None], batch.sample_of_target, batch.num_samples)[0]
        return by_sample[batch.samples_by_role["chosen"]]

    def pair_losses(self, chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
        losses = preference_nll(chosen - rejected - self.margins)
        return losses + self.centering * (chosen + rejected).square() if self.centering else losses


class Classification(Loss):
    """Cross-entropy of the label (`single`), or binary cross-entropy of each label (`multi`), averaged over samples.

    A prediction of several labels is accurate if all labels are right.
    """

    metrics: ClassVar[Sequence[str]] = ("accuracy",)

    def __init__(self, labels: Sequence[str], problem: str = "single") -> None:
        self.num_labels = len(labels)
        self.is_multi = problem == "multi"

    def count(self, totals: StepTotals) -> float:
        return totals.answers

    def from_logits(self, logits: torch.Tensor, batch: LocalBatch) -> torch.Tensor:
        logits = at_least_fp32(logits)
        is_true = true_labels(batch, self.num_labels, self.is_multi)
        is_right = (predicted_labels(logits, self.is_multi) == is_true).all(1)
        self.metric_sums = {"accuracy": is_right.to(logits.dtype).sum()}
        if self.is_multi:
            losses = F.binary_cross_entropy_with_logits(logits, is_true.to(logits.dtype), reduction="none")
            return losses.mean(1).sum()
        return F.cross_entropy(logits, is_true.int().argmax(1), reduction="sum")


class LabelCounts(Loss):
    """Counts of an evaluation from which the F1 score of each label is computed.

    Metric `hits/N` counts samples that have label N and are predicted to have it. Metric `misses/N` counts samples for
    which only one of these is true.
    """

    def __init__(self, labels: Sequence[str], problem: str) -> None:
        self.num_labels = len(labels)
        self.is_multi = problem == "multi"
        kinds = ("hits", "misses")
        self.metrics = [f"{kind}/{i}" for kind in kinds for i in range(self.num_labels)]  # type: ignore[misc]

    def count(self, totals: StepTotals) -> float:
        return totals.answers

    def metric_count(self, metric: str, totals: StepTotals) -> float:
        return 0  # `eval/f1` is reported instead

    def from_logits(self, logits: torch.Tensor, batch: LocalBatch) -> torch.Tensor:
        is_true = true_labels(batch, self.num_labels, self.is_multi)
        is_predicted = predicted_labels(logits, self.is_multi)
        hits = (is_true & is_predicted).sum(0).double()
        misses = (is_true ^ is_predicted).sum(0).double()
        self.metric_sums = dict(zip(self.metrics, torch.cat([hits, misses]), strict=True))
        return logits.double().sum() * 0


def true_labels(batch: LocalBatch, num_labels: int, is_multi: bool) -> torch.Tensor:
    """Return whether each sample has each label, `[samples, labels]`."""
    classes: Any = batch.columns.get(CLASSES)
    if classes is None:  # all packs are dummy packs
        return torch.zeros(len(batch.targets), num_labels, dtype=torch.bool, device=batch.targets.device)
    if is_multi:
        return unpack_labels(classes, num_labels)
    return F.one_hot(classes, num_labels).bool()


def predicted_labels(logits: torch.Tensor, is_multi: bool) -> torch.Tensor:
    """Return whether each label is predicted, `[samples, labels]`."""
    if is_multi:
        return logits > 0
    return F.one_hot(logits.argmax(1), logits.shape[1]).bool()


def macro_f1(sums: Mapping[str, float], prefix: str, num_labels: int) -> float:
    """Return the mean F1 score of the labels that occur or are predicted.

    Args:
        sums: Sums of the metrics of `LabelCounts` over all samples.
        prefix: Beginning of their names.
        num_labels: Number of labels.
    """
    scores = []
    for i in range(num_labels):
        hits = sums[f"{prefix}/hits/{i}"]
        misses = sums[f"{prefix}/misses/{i}"]
        if hits + misses:
            scores.append(2 * hits / (2 * hits + misses))
    return sum(scores) / max(1, len(scores))
