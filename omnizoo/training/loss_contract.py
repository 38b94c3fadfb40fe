"""What a loss is: the contract that the built-in ones and a user's own (`omnizoo.Loss`) fulfil, and its checks.

A loss gives a sum over this rank's part of a micro-batch. What that is divided by, its count, is known from the totals
of the step before the first forward pass. So each loss is a plain mean over the whole step, whatever the layout.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from omnizoo.config.doors import CODE_ERRORS, check_call, resolve_class
from omnizoo.config.errors import UserError, named_line
from omnizoo.config.options import tuple_of
from omnizoo.config.schema import Config
from omnizoo.data.deal import Batch, Dealt
from omnizoo.data.plan import Totals
from omnizoo.models.head import Logits
from omnizoo.models.routing import RouterRecord
from omnizoo.parallel.mesh import Mesh
from omnizoo.training.forward import Local

KINDS = {
    "cross_entropy": "omnizoo.training.built_in_losses:CrossEntropy",
    "balance": "omnizoo.training.built_in_losses:Balance",
    "router_z": "omnizoo.training.built_in_losses:RouterZ",
    "dpo": "omnizoo.training.preference_losses:DPO",
    "kto": "omnizoo.training.kto:KTO",
    "grpo": "omnizoo.training.policy_losses:GRPO",
    "gspo": "omnizoo.training.policy_losses:GSPO",
    "orpo": "omnizoo.training.preference_losses:ORPO",
    "simpo": "omnizoo.training.preference_losses:SimPO",
}
VIEWS = {"of_logits": 2, "of_hidden": 3, "of_routers": 2}  # methods, of which a loss has one, and their arguments
EXPECTED = "a subclass of omnizoo.Loss with one of of_logits(logits, batch), of_hidden(hidden, head, batch), of_routers"


@dataclass(frozen=True)
class Upcoming:
    """The step that comes next, on this rank."""

    batches: Sequence[Batch]
    mismatched: Dealt | None  # answers to other prompts, if a loss has asked for them
    local: Callable[[Batch], Local]


class Loss:
    """A loss. Its constructor takes the `options` of the config; one of the methods `of_...` says what it sees.

    That method gives the loss summed over this rank's part of a micro-batch: a tensor of no dimension with its graph,
    0 where there is nothing. `batch` has the targets `[N]` (token ids) and their weights, the inputs of the model, and
    of each token `[T]` which pack it is of. A rank may have any part of a pack, so nothing but sums over targets or
    tokens comes out the same on every layout: `batch.sum(values)` of a value for each target is one.

    `metrics` names further figures, sums as the loss is one, which each call leaves in `measured`, by name. `needs`
    names numbers for each token that samples have to come with, in `batch.given.extra`: those of `omnizoo.Rollout`.
    """

    metrics: ClassVar[Sequence[str]] = ()
    measured: dict[str, torch.Tensor]
    needs: Sequence[str] = ()

    def set_up(self, model: nn.Module, mesh: Mesh, config: Config) -> None:
        """Called once before the first step, on all ranks. `model` is sharded already."""

    def count(self, totals: Totals) -> float:
        """What the sum over all ranks and micro-batches is divided by: here, the number of the text's targets, each by
        its weight, as `batch.sum` adds them up."""
        return totals.weight

    def count_of(self, metric: str, totals: Totals) -> float:
        """What the sum of a metric is divided by."""
        return self.count(totals)

    def begin_step(self, step: Upcoming) -> None:
        """Called before the first micro-batch of a step or an evaluation, on all ranks and without gradients."""

    def prepare(self, batch: Local) -> None:
        """Called before the model's forward pass of each micro-batch, on all ranks."""

    def of_logits(self, logits: torch.Tensor, batch: Local) -> torch.Tensor:
        """`logits [N, V]` are those that predict `batch.targets [N]`."""
        raise NotImplementedError

    def of_hidden(self, hidden: torch.Tensor, head: Logits, batch: Local) -> torch.Tensor:
        """In place of the model's head: `head(rows [n, width])` gives the logits `[n, V]` of any rows of
        `hidden [N, width]`, as the model would. For losses that never want all of them at once. `head.linear` are its
        weights, if it is a matrix product."""
        raise NotImplementedError

    def of_routers(self, records: Sequence[RouterRecord], batch: Local) -> torch.Tensor:
        """What the routers of a mixture of experts gave, one record per layer, for this rank's tokens."""
        raise NotImplementedError


@dataclass(frozen=True)
class NamedLoss:
    """A loss as the config has it: `key` is where."""

    loss: Loss
    key: str
    kind: str
    name: str
    weight: float
    method: str  # the one `of_...` that it has, or the first of several

    @property
    def view(self) -> str:
        """Which method of it is called. A built-in loss with several says so once it is set up."""
        return getattr(self.loss, "view", self.method)

    @property
    def who(self) -> str:
        return f"{self.key}.kind: {self.kind}"

    @property
    def metrics(self) -> list[str]:
        return [f"{self.name}/{metric}" for metric in self.loss.metrics]

    def measured(self) -> dict[str, torch.Tensor]:
        """The sums of its metrics in the last call."""
        found = getattr(self.loss, "measured", {})
        for metric in self.loss.metrics:
            if metric not in found:
                raise UserError(
                    f"{self.who}: {self.view} leaves no {metric!r} in `measured`, which it has in `metrics`"
                )
        return {f"{self.name}/{metric}": found[metric].detach() for metric in self.loss.metrics}

    def count(self, totals: Totals) -> float:
        wanted = "expected a number >= 0 that is known from the step's totals, before the forward pass"
        try:
            count = self.loss.count(totals)
        except CODE_ERRORS as error:
            raise UserError(f"{self.who}: count(totals) fails: {named_line(error)}; {wanted}") from error
        if type(count) not in (int, float) or not math.isfinite(count) or count < 0:
            shown = f"a {type(count).__name__}" if type(count) not in (int, float) else count
            raise UserError(f"{self.who}: count(totals) is {shown}; {wanted}")
        return count

    def metric_counts(self, totals: Totals) -> dict[str, float]:
        return {f"{self.name}/{metric}": self.loss.count_of(metric, totals) for metric in self.loss.metrics}

    def sum(self, *seen: Any) -> torch.Tensor:
        total = getattr(self.loss, self.view)(*seen)
        if not isinstance(total, torch.Tensor) or total.ndim or not total.is_floating_point():
            is_tensor = isinstance(total, torch.Tensor)
            shown = f"a tensor {list(total.shape)} of {total.dtype}" if is_tensor else f"a {type(total).__name__}"
            raise UserError(
                f"{self.who}: {self.view} gives {shown}; expected the sum: a tensor of floats, no dimension"
            )
        return total


def build_losses(config: Config) -> list[NamedLoss]:
    """The losses of `train.losses`; refuses what cannot be, before anything is loaded."""
    return [_build(f"train.losses.{i}", part.kind, part) for i, part in enumerate(config.train.losses)]


def losses_of_rows(config: Config) -> list[NamedLoss]:
    """The same, for a run that reads rows: they come with nothing that a loss could need besides."""
    losses = build_losses(config)
    for loss in losses:
        if loss.loss.needs:
            raise UserError(
                f"{loss.who} needs {', '.join(loss.loss.needs)} of each sample, which rows do not have; it is for "
                "omnizoo.Engine (docs/rl.md)"
            )
    return losses


def _build(key: str, kind: str, part: Any) -> NamedLoss:
    found = resolve_class(KINDS.get(kind, kind), f"{key}.kind", Loss, EXPECTED)
    views = [view for view in VIEWS if getattr(found, view) is not getattr(Loss, view)]
    if len(views) != 1 and kind not in KINDS:
        has = " and ".join(views) if views else "none of them"
        raise UserError(f"{key}.kind: {kind} has {has}; expected {EXPECTED}")
    options = {name: tuple_of(value) for name, value in part.options.items()}
    check_call(found, kind, f"{key}.options", [], options)
    try:
        loss: Loss = found(**options)
    except UserError:
        raise
    except CODE_ERRORS as error:
        raise UserError(f"{key}.options: {kind} does not take them: {named_line(error)}") from error
    calls = {views[0]: VIEWS[views[0]], "set_up": 3, "count": 1}
    for method, arguments in calls.items():
        check_call(getattr(loss, method), f"{kind}.{method}", f"{key}.kind", [None] * arguments, {})
    return NamedLoss(loss, key, kind, part.label, part.weight, views[0])
