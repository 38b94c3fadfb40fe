"""The contract of built-in losses and loss plugins (`omnizoo.Loss`), and checks that a loss fulfills it.

A loss returns a sum over this rank's part of a micro-batch. Its denominator, the loss count, is computed from the
totals of the step before the first forward pass. Each loss is therefore a plain mean over the whole step, for any
layout.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from omnizoo.balancing.batch import Batch
from omnizoo.balancing.step_data import StepData
from omnizoo.balancing.step_plan import StepTotals
from omnizoo.config.errors import UserError, named_line
from omnizoo.config.plugins import CODE_ERRORS, check_call, resolve_class
from omnizoo.config.schema import Config
from omnizoo.config.sections.built_in_options import to_tuple
from omnizoo.config.sections.train import LossSettings
from omnizoo.models.interfaces.lm_head import Logits
from omnizoo.models.interfaces.routers import RouterRecord
from omnizoo.parallel.mesh import Mesh
from omnizoo.training.denoising.noisy_batch import NoisyBatch
from omnizoo.training.local_batch import LocalBatch

KINDS = {
    "cross_entropy": "omnizoo.training.losses.text:CrossEntropy",
    "balance": "omnizoo.training.losses.routers:Balance",
    "router_z": "omnizoo.training.losses.routers:RouterZ",
    "dpo": "omnizoo.training.losses.preference:DPO",
    "kto": "omnizoo.training.losses.kto:KTO",
    "grpo": "omnizoo.training.losses.policy:GRPO",
    "gspo": "omnizoo.training.losses.policy:GSPO",
    "orpo": "omnizoo.training.losses.preference:ORPO",
    "simpo": "omnizoo.training.losses.preference:SimPO",
    "reward": "omnizoo.training.losses.scores:Reward",
    "classification": "omnizoo.training.losses.scores:Classification",
    "denoise": "omnizoo.training.losses.denoise:Denoise",
}
INPUT_KINDS = {  # method -> number of arguments; a loss overrides one of them
    "from_logits": 2,
    "from_hidden": 3,
    "from_routers": 2,
    "from_prediction": 2,
}
EXPECTED = (
    "a subclass of omnizoo.Loss with one of from_logits(logits, batch), from_hidden(hidden, head, batch), "
    "from_routers(records, batch), from_prediction(prediction, batch)"
)
COUNT_EXPECTED = "a number >= 0 that depends only on the totals of the step"


@dataclass(frozen=True)
class NextStep:
    """The data of the step that is about to be trained or evaluated, on this rank."""

    batches: Sequence[Batch]  # micro-batches
    kto_baseline: StepData | None  # mismatched prompt-response pairs, if a loss needs them
    local: Callable[[Batch], LocalBatch]  # returns this rank's part of a micro-batch


class Loss:
    """Base class of losses.

    The constructor accepts the `options` of the config. A subclass overrides exactly one of `from_logits`,
    `from_hidden`, `from_routers` and `from_prediction`. The choice determines the inputs of the loss. The method
    returns the loss summed over this rank's part of a micro-batch: a scalar tensor with its autograd graph, 0 if the
    part has no targets.

    A rank may have any part of a pack. The result is independent of the layout only if it is a sum over targets or over
    tokens. `batch.sum(values)` returns such a sum, given one value per target.

    Example:
        >>> class FocalLoss(omnizoo.Loss):
        ...     def from_logits(self, logits, batch):
        ...         losses = F.cross_entropy(logits.float(), batch.targets, reduction="none")
        ...         return batch.sum((1 - (-losses).exp()) ** 2 * losses)

    Attributes:
        metrics: Names of additional values to report.
        metric_sums: The sum of each metric over this rank's part of the micro-batch, set by each call.
        required_columns: Names of per-token values that samples must have in `batch.columns`, such as the values of
            `omnizoo.Rollout`.
    """

    metrics: ClassVar[Sequence[str]] = ()
    metric_sums: dict[str, torch.Tensor]
    required_columns: Sequence[str] = ()

    def set_up(self, model: nn.Module, mesh: Mesh, config: Config) -> None:
        """Prepare the loss. Called once before the first step, on all ranks.

        Args:
            model: The model, sharded.
            mesh: The mesh that the model is distributed over.
            config: The config of the run.
        """

    def count(self, totals: StepTotals) -> float:
        """Return the denominator of the sum over all ranks and micro-batches.

        Default: the sum of the weights of all text targets. This matches `batch.sum`.

        Args:
            totals: Totals of the step over all ranks.

        Returns:
            A non-negative number.
        """
        return totals.weight

    def metric_count(self, metric: str, totals: StepTotals) -> float:
        """Return the denominator of a metric. Default: the denominator of the loss.

        Args:
            metric: A name in `metrics`.
            totals: Totals of the step over all ranks.

        Returns:
            A non-negative number.
        """
        return self.count(totals)

    def begin_step(self, step: NextStep) -> None:
        """Prepare for a step or an evaluation. Called before its first micro-batch, on all ranks, without gradients.

        Args:
            step: The micro-batches of this rank.
        """

    def prepare(self, batch: LocalBatch) -> None:
        """Prepare for a micro-batch. Called before the forward pass of the model, on all ranks.

        Args:
            batch: This rank's part of the micro-batch.
        """

    def from_logits(self, logits: torch.Tensor, batch: LocalBatch) -> torch.Tensor:
        """Compute the loss from logits.

        Args:
            logits: Logits of the targets, `[targets, vocabulary]`.
            batch: This rank's part of the micro-batch. `batch.targets` are the token ids to predict, `[targets]`.

        Returns:
            The sum over this rank's part of the micro-batch, a scalar tensor.
        """
        raise NotImplementedError

    def from_hidden(self, hidden: torch.Tensor, head: Logits, batch: LocalBatch) -> torch.Tensor:
        """Compute the loss from hidden states. Intended for losses that compute a few logits at a time.

        Args:
            hidden: Hidden states of the targets, `[targets, width]`.
            head: The head of the model: `head(rows)` returns the logits `[n, vocabulary]` of hidden states
                `[n, width]`. `head.linear` has its weights if the head is a matrix product.
            batch: This rank's part of the micro-batch.

        Returns:
            The sum over this rank's part of the micro-batch, a scalar tensor.
        """
        raise NotImplementedError

    def from_routers(self, records: Sequence[RouterRecord], batch: LocalBatch) -> torch.Tensor:
        """Compute the loss from the outputs of MoE routers.

        Args:
            records: Router outputs for this rank's tokens, one record per layer.
            batch: This rank's part of the micro-batch.

        Returns:
            The sum over this rank's part of the micro-batch, a scalar tensor.
        """
        raise NotImplementedError

    def from_prediction(self, prediction: torch.Tensor, batch: NoisyBatch) -> torch.Tensor:
        """Compute the loss of a diffusion transformer.

        Args:
            prediction: Output of the model for `batch.noisy`, of the same shape.
            batch: The noisy samples. `batch.target` is what the model should predict.

        Returns:
            The sum over samples, a scalar tensor, from `batch.sum(values)` with one value per sample.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class NamedLoss:
    """A loss with its settings. Checks the return values of plugins."""

    loss: Loss
    key: str  # config key, for messages
    kind: str
    name: str  # name of the loss term
    weight: float
    method: str  # `from_...` method that the class overrides; the first one if there are several

    @property
    def input_kind(self) -> str:
        """Name of the `from_...` method to call. Built-in losses with several methods choose one in `set_up`."""
        return getattr(self.loss, "input_kind", self.method)

    @property
    def who(self) -> str:
        """Config key and kind of the loss, for messages."""
        return f"{self.key}.kind: {self.kind}"

    def metric_sums(self) -> dict[str, torch.Tensor]:
        """Return the sums of the metrics in the last call. Raises a `UserError` if one is missing."""
        sums = getattr(self.loss, "metric_sums", {})
        for metric in self.loss.metrics:
            if metric not in sums:
                raise UserError(
                    f"{self.who}: {metric!r} is in `metrics`, but {self.input_kind} did not set it in `metric_sums`. "
                    f"Set it in {self.input_kind}."
                )
        return {f"{self.name}/{metric}": sums[metric].detach() for metric in self.loss.metrics}

    def count(self, totals: StepTotals) -> float:
        """Return the denominator of the loss. Raises a `UserError` if it is not a finite number of at least 0."""
        try:
            count = self.loss.count(totals)
        except CODE_ERRORS as error:
            raise UserError(
                f"{self.who}: count(totals) raised {named_line(error)}. Expected {COUNT_EXPECTED}."
            ) from error
        if type(count) not in (int, float):
            raise UserError(f"{self.who}: count(totals) returned a {type(count).__name__}. Expected {COUNT_EXPECTED}.")
        if not math.isfinite(count) or count < 0:
            raise UserError(f"{self.who}: count(totals) returned {count}. Expected {COUNT_EXPECTED}.")
        return count

    def metric_counts(self, totals: StepTotals) -> dict[str, float]:
        """Return the denominator of each metric, keyed by name."""
        return {f"{self.name}/{metric}": self.loss.metric_count(metric, totals) for metric in self.loss.metrics}

    def sum(self, *inputs: Any) -> torch.Tensor:
        """Call the loss with the inputs of `input_kind`. Raises a `UserError` if the result is not a float scalar."""
        total = getattr(self.loss, self.input_kind)(*inputs)
        if isinstance(total, torch.Tensor) and total.ndim == 0 and total.is_floating_point():
            return total
        result = f"a {type(total).__name__}"
        if isinstance(total, torch.Tensor):
            result = f"a tensor {list(total.shape)} of {total.dtype}"
        raise UserError(
            f"{self.who}: {self.input_kind} returned {result}. Expected the sum of the loss: a float tensor without "
            "dimensions."
        )


def build_losses(config: Config) -> list[NamedLoss]:
    """Build the losses of `train.losses`. No model is needed, so mistakes are found before weights are loaded.

    Raises:
        UserError: If a loss cannot be imported, or its options or methods do not match the contract.
    """
    return [_build(f"train.losses.{i}", settings) for i, settings in enumerate(config.train.losses)]


def losses_of_rows(config: Config) -> list[NamedLoss]:
    """Build the losses of `train.losses` for a run that reads rows.

    Raises:
        UserError: If a loss cannot be built, or needs per-token values that only rollouts have.
    """
    losses = build_losses(config)
    for loss in losses:
        columns = loss.loss.required_columns
        if columns:
            raise UserError(
                f"{loss.who} requires the columns {', '.join(columns)}, which rows do not have. Use this loss with "
                "omnizoo.Engine (docs/how-to/rl.md)."
            )
    return losses


def name_loss(name: str, loss: Loss) -> NamedLoss:
    """Return a named loss with weight 1 for a loss that was built in Python."""
    return NamedLoss(
        loss=loss,
        key="extra_losses",
        kind=name,
        name=name,
        weight=1.0,
        method=_overridden(type(loss))[0],
    )


def _overridden(loss_class: type[Loss]) -> list[str]:
    """Return the `from_...` methods that a class overrides."""
    return [method for method in INPUT_KINDS if getattr(loss_class, method) is not getattr(Loss, method)]


def _build(key: str, settings: LossSettings) -> NamedLoss:
    """Build the loss at the config key `key`, and check that it matches the contract of `Loss`."""
    kind = settings.kind
    loss_class = resolve_class(KINDS.get(kind, kind), f"{key}.kind", Loss, EXPECTED)
    methods = _overridden(loss_class)
    if len(methods) != 1 and kind not in KINDS:
        listed = " and ".join(methods) if methods else "none of the methods"
        raise UserError(f"{key}.kind: {kind} has {listed}. Expected {EXPECTED}.")

    options = {name: to_tuple(value) for name, value in settings.options.items()}
    check_call(loss_class, kind, f"{key}.options", [], options)
    try:
        loss: Loss = loss_class(**options)
    except UserError:
        raise
    except CODE_ERRORS as error:
        raise UserError(f"{key}.options: {kind} raised {named_line(error)}. Change the options.") from error

    num_arguments = {methods[0]: INPUT_KINDS[methods[0]], "set_up": 3, "count": 1}
    for method, count in num_arguments.items():
        check_call(getattr(loss, method), f"{kind}.{method}", f"{key}.kind", [None] * count, {})
    return NamedLoss(
        loss=loss,
        key=key,
        kind=kind,
        name=settings.label,
        weight=settings.weight,
        method=methods[0],
    )
