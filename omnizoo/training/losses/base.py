"""The contract of losses (`omnizoo.Loss`), for built-in losses and plugins, and the checks of it.

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
}
INPUT_KINDS = {
    "from_logits": 2,
    "from_hidden": 3,
    "from_routers": 2,
}  # method -> number of arguments; a loss overrides one of them
EXPECTED = (
    "a subclass of omnizoo.Loss with one of from_logits(logits, batch), from_hidden(hidden, head, batch), from_routers"
)


@dataclass(frozen=True)
class NextStep:
    """The data of the step that is about to be trained or evaluated, on this rank."""

    batches: Sequence[Batch]  # micro-batches
    kto_baseline: StepData | None  # mismatched prompt-response pairs, if a loss needs them
    local: Callable[[Batch], LocalBatch]  # returns this rank's part of a micro-batch


class Loss:
    """Base class of losses.

    The constructor takes the `options` of the config. A subclass overrides exactly one of `from_logits`, `from_hidden` and
    `from_routers`, which determines the inputs of the loss. This method returns the loss summed over this rank's part of
    a micro-batch: a scalar tensor with its graph, 0 if the part has no targets.

    A rank may have any part of a pack. The result is the same for every layout only if it is a sum over targets or over
    tokens. `batch.sum(values)` returns such a sum, given one value per target.

    Attributes:
        metrics: Names of additional values to report.
        metric_sums: The sum of each metric over this rank's part of the micro-batch, set by each call.
        required_columns: Names of per-token values that samples must have in `batch.columns`, such as those of `omnizoo.Rollout`.
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

        Default: the sum of the weights of all text targets, which matches `batch.sum`.

        Args:
            totals: Totals of the step over all ranks.
        """
        return totals.weight

    def metric_count(self, metric: str, totals: StepTotals) -> float:
        """Return the denominator of a metric, given the totals of the step. Default: that of the loss."""
        return self.count(totals)

    def begin_step(self, step: NextStep) -> None:
        """Prepare for a step or an evaluation. Called before its first micro-batch, on all ranks, without gradients."""

    def prepare(self, batch: LocalBatch) -> None:
        """Prepare for a micro-batch. Called before the forward pass of the model, on all ranks."""

    def from_logits(self, logits: torch.Tensor, batch: LocalBatch) -> torch.Tensor:
        """Return the loss, given logits.

        Args:
            logits: Logits of the targets, `[targets, vocabulary]`.
            batch: This rank's part of the micro-batch. `batch.targets` are the token ids to predict, `[targets]`.

        Returns:
            The sum over this rank's part of the micro-batch, a scalar tensor.
        """
        raise NotImplementedError

    def from_hidden(self, hidden: torch.Tensor, head: Logits, batch: LocalBatch) -> torch.Tensor:
        """Return the loss, given hidden states. For losses that compute only a few logits at a time.

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
        """Return the loss, given the outputs of MoE routers.

        Args:
            records: Router outputs for this rank's tokens, one record per layer.
            batch: This rank's part of the micro-batch.

        Returns:
            The sum over this rank's part of the micro-batch, a scalar tensor.
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
    method: str  # the method `of_...` that the class overrides; the first if there are several

    @property
    def input_kind(self) -> str:
        """Name of the method `of_...` to call. Built-in losses with several methods choose one in `set_up`."""
        return getattr(self.loss, "input_kind", self.method)

    @property
    def who(self) -> str:
        return f"{self.key}.kind: {self.kind}"

    def metric_sums(self) -> dict[str, torch.Tensor]:
        """Return the sums of the metrics in the last call. Raises a `UserError` if one is missing."""
        found = getattr(self.loss, "metric_sums", {})
        for metric in self.loss.metrics:
            if metric not in found:
                raise UserError(
                    f"{self.who}: {self.input_kind} leaves no {metric!r} in `metric_sums`, which it has in `metrics`"
                )
        return {f"{self.name}/{metric}": found[metric].detach() for metric in self.loss.metrics}

    def count(self, totals: StepTotals) -> float:
        wanted = "expected a number >= 0 that is known from the step's totals, before the forward pass"
        try:
            count = self.loss.count(totals)
        except CODE_ERRORS as error:
            raise UserError(f"{self.who}: count(totals) fails: {named_line(error)}; {wanted}") from error
        if type(count) not in (int, float) or not math.isfinite(count) or count < 0:
            shown = f"a {type(count).__name__}" if type(count) not in (int, float) else count
            raise UserError(f"{self.who}: count(totals) is {shown}; {wanted}")
        return count

    def metric_counts(self, totals: StepTotals) -> dict[str, float]:
        return {f"{self.name}/{metric}": self.loss.metric_count(metric, totals) for metric in self.loss.metrics}

    def sum(self, *seen: Any) -> torch.Tensor:
        total = getattr(self.loss, self.input_kind)(*seen)
        if not isinstance(total, torch.Tensor) or total.ndim or not total.is_floating_point():
            is_tensor = isinstance(total, torch.Tensor)
            shown = f"a tensor {list(total.shape)} of {total.dtype}" if is_tensor else f"a {type(total).__name__}"
            raise UserError(
                f"{self.who}: {self.input_kind} gives {shown}; expected the sum: a tensor of floats, no dimension"
            )
        return total


def build_losses(config: Config) -> list[NamedLoss]:
    """Build the losses of `train.losses`. Needs no model, so mistakes are found before anything is loaded.

    Raises:
        UserError: If a loss cannot be imported, or its options or methods do not match the contract.
    """
    return [_build(f"train.losses.{i}", part) for i, part in enumerate(config.train.losses)]


def losses_of_rows(config: Config) -> list[NamedLoss]:
    """Build the losses of `train.losses` for a run that reads rows.

    Raises:
        UserError: If a loss cannot be built, or needs per-token values that only rollouts have.
    """
    losses = build_losses(config)
    for loss in losses:
        if loss.loss.required_columns:
            raise UserError(
                f"{loss.who} needs {', '.join(loss.loss.required_columns)} of each sample, which rows do not have; it is for "
                "omnizoo.Engine (docs/rl.md)"
            )
    return losses


def name_loss(name: str, loss: Loss) -> NamedLoss:
    """Return a loss that was built in Python, with a name and weight 1."""
    return NamedLoss(loss, "extra_losses", name, name, 1.0, _input_kinds(type(loss))[0])


def _input_kinds(loss_class: type[Loss]) -> list[str]:
    """Return the methods `of_...` that a class overrides."""
    return [view for view in INPUT_KINDS if getattr(loss_class, view) is not getattr(Loss, view)]


def _build(key: str, part: LossSettings) -> NamedLoss:
    kind = part.kind
    found = resolve_class(KINDS.get(kind, kind), f"{key}.kind", Loss, EXPECTED)
    views = _input_kinds(found)
    if len(views) != 1 and kind not in KINDS:
        has = " and ".join(views) if views else "none of them"
        raise UserError(f"{key}.kind: {kind} has {has}; expected {EXPECTED}")
    options = {name: to_tuple(value) for name, value in part.options.items()}
    check_call(found, kind, f"{key}.options", [], options)
    try:
        loss: Loss = found(**options)
    except UserError:
        raise
    except CODE_ERRORS as error:
        raise UserError(f"{key}.options: {kind} does not take them: {named_line(error)}") from error
    calls = {views[0]: INPUT_KINDS[views[0]], "set_up": 3, "count": 1}
    for method, arguments in calls.items():
        check_call(getattr(loss, method), f"{kind}.{method}", f"{key}.kind", [None] * arguments, {})
    return NamedLoss(loss, key, kind, part.label, part.weight, views[0])
