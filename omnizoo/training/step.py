"""One optimizer step: forward and backward for each micro-batch, one all-reduce, gradient clipping, weight update.

The loss of a step is (sum over all targets on all ranks) / (number of targets on all ranks). The number of targets is
available before the first forward pass, so the loss depends neither on the layout nor on the number of micro-batches.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from omnizoo.balancing.step_data import StepData
from omnizoo.ops.device import HostCopy
from omnizoo.parallel.fsdp.gradients import clip_divisor, clip_gradients, squared_norm, sum_replicated_gradients
from omnizoo.training.objective import LossSums, Objective
from omnizoo.training.optimizers.build import (
    optimizer_state_offloaded,
    set_learning_rate,
    try_fused_step,
    update_average,
)
from omnizoo.training.optimizers.schedule import learning_rate


@dataclass(frozen=True)
class StepResult:
    """Result of one optimizer step, identical on all ranks."""

    loss: float
    terms: dict[str, float]  # mean of each loss term, before its weight; only terms with targets in this step
    grad_norm: float
    lr: float
    finite: bool  # False if the update was skipped because of a non-finite loss or gradient
    stop: bool  # True if any rank requested to stop
    routers: dict[str, float]  # load and entropy of MoE routers; empty for dense models
    # Mean of the loss on each source, keyed by SOURCE, and of each term, keyed by SOURCE/TERM if there are several.
    # Empty if there is only one source.
    by_source: dict[str, float] = field(default_factory=dict)

    def metrics(self) -> dict[str, float]:
        """Return the metrics under the names used in `metrics.jsonl`."""
        terms = {f"loss/{name}": mean for name, mean in (self.terms | self.by_source).items()}
        return {"loss": self.loss, **terms, "grad_norm": self.grad_norm, "lr": self.lr, **self.routers}


@dataclass(frozen=True)
class StepSums:
    """Sums over all ranks, from a single all-reduce.

    Layout: squared gradient norm | one sum per loss term | stop flag | sums of each loss term by source | router loads
    and probabilities.
    """

    device: torch.Tensor
    host_copy: HostCopy  # asynchronous copy of `device`; reading its values is a host sync
    num_checked: int  # number of leading values that must be finite: squared norm and loss sums
    num_by_source: int  # number of sums by source

    def grad_norm(self) -> torch.Tensor:
        """Return the global gradient norm, on the device."""
        return self.device[0].sqrt()

    def must_skip(self) -> torch.Tensor:
        """Return a boolean tensor on the device: True if the norm or a loss is not finite."""
        return ~self.device[: self.num_checked].isfinite().all()

    def router_sums(self) -> torch.Tensor:
        """Return the router loads and probabilities, on the device."""
        return self.device[self.num_checked + 1 + self.num_by_source :]


def train_step(
    objective: Objective, optimizer: torch.optim.Optimizer, data: StepData, step: int, stop: bool = False
) -> StepResult:
    """Run one optimizer step. Collective: all ranks must call it.

    If the loss or the gradient norm is not finite, weights and optimizer state are not changed.

    Args:
        objective: The model, its mesh and the losses to minimize.
        optimizer: Updates the weights of `objective.model`.
        data: The micro-batches of this rank, from `next_step`.
        step: Number of this step, counted from 1. Determines the learning rate and the dropout seed.
        stop: Whether to stop after this step. The request joins the all-reduce of the losses.

    Returns:
        Losses, gradient norm and flags; identical on all ranks.
    """
    with objective.phases("optimizer"):
        optimizer.zero_grad()
    with optimizer_state_offloaded(optimizer):
        for batch in objective.micro_batches(data, step):
            loss = objective.loss(batch)
            objective.backward(loss)
    return optimizer_step(objective, optimizer, step, stop)


def optimizer_step(objective: Objective, optimizer: torch.optim.Optimizer, step: int, stop: bool = False) -> StepResult:
    """Update the weights from the gradients of the micro-batches so far. Collective: all ranks must call it.

    One all-reduce sums the losses and the gradient norm. Then gradients are clipped and the optimizer updates its
    parameters, unless the norm or a loss is not finite.

    Args:
        objective: The objective, after `loss` and `backward` have run on all micro-batches of the step.
        optimizer: The optimizer to step. Gradient norm and clipping cover only its parameters, so that several
            optimizers can update the model in turn.
        step: Number of this step, counted from 1. Determines the learning rate.
        stop: Whether to stop after this step.

    Returns:
        Losses, gradient norm and flags; identical on all ranks.
    """
    with objective.phases("optimizer"):
        parameters = _parameters_of(optimizer, objective.model)
        losses = objective.pop_loss_sums()
        sum_replicated_gradients(parameters)
        sums = _sum_over_ranks(objective, parameters, losses, stop)
        lr = learning_rate(objective.config.train, step)
        set_learning_rate(optimizer, lr)
        values, is_updated = _update_weights(objective, optimizer, parameters, sums, step)
        first_router = sums.num_checked + 1 + sums.num_by_source
        routers = objective.router_stats.metrics(values[first_router:])
        objective.router_stats.reset()

    squared_norm_value, *loss_values = values[: sums.num_checked]
    means = {}
    for name, loss_value in zip(losses.sums, loss_values, strict=True):
        # Without targets, divide by 1. The sum is then 0, or NaN if the model produced NaN, which must stay visible.
        means[name] = loss_value / (losses.counts[name] or 1)
    return StepResult(
        loss=sum(losses.weights[name] * mean for name, mean in means.items()),
        terms={name: mean for name, mean in means.items() if losses.counts[name]},
        grad_norm=math.sqrt(squared_norm_value) if squared_norm_value >= 0 else math.nan,
        lr=lr,
        finite=is_updated,
        stop=values[sums.num_checked] > 0,
        routers=routers,
        by_source=_means_by_source(losses, objective.source_names, values[sums.num_checked + 1 : first_router]),
    )


def _means_by_source(losses: LossSums, names: Sequence[str], values: Sequence[float]) -> dict[str, float]:
    """Return the mean of the loss on each source that has targets in the step, and of its terms if it has several.

    A term whose loss returns only its sum is excluded.

    Args:
        losses: The loss terms of the step.
        names: Name of each source.
        values: For each term in `losses.by_source`, the sum of each source over all ranks, and the number of ranks and
            micro-batches that did not split their sum.
    """
    means: dict[str, float] = {}
    size = len(names) + 1
    for i, name in enumerate(names):
        counts = losses.counts_by_source.get(name, {})
        terms = {}
        for row, term in enumerate(losses.by_source):
            *sums, num_unsplit = values[row * size : (row + 1) * size]
            if not num_unsplit and counts.get(term):
                terms[term] = sums[i] / counts[term]
        if terms:
            means[name] = sum(losses.weights[term] * mean for term, mean in terms.items())
        if len(losses.by_source) > 1:
            means |= {f"{name}/{term}": mean for term, mean in terms.items()}
    return means


def _parameters_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[nn.Parameter]:
    """Return the optimizer's parameters in the order of the model, so that norms are summed in a fixed order."""
    members = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    return [parameter for parameter in model.parameters() if parameter in members]


def _sum_over_ranks(objective: Objective, parameters: Sequence[nn.Parameter], losses: LossSums, stop: bool) -> StepSums:
    """Sum the norm, losses, stop flag and router statistics over ranks, in one all-reduce without a host sync."""
    local_norm = squared_norm(parameters, objective.mesh.device)
    dtype = local_norm.dtype
    checked = torch.stack([local_norm, *(loss_sum.to(dtype) for loss_sum in losses.sums.values())])
    stop_flag = torch.full((1,), float(stop), dtype=dtype, device=local_norm.device)
    by_source = [sums.to(dtype) for sums in losses.by_source.values()]
    router_sums = [sums.to(dtype) for sums in objective.router_stats.local_sums()]
    total = objective.mesh.total(torch.cat([checked, stop_flag, *by_source, *router_sums]))
    return StepSums(
        device=total, host_copy=HostCopy(total), num_checked=len(checked), num_by_source=sum(map(len, by_source))
    )


def _update_weights(
    objective: Objective,
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[nn.Parameter],
    sums: StepSums,
    step: int,
) -> tuple[list[float], bool]:
    """Clip gradients and update the weights, unless the norm or a loss is not finite.

    A fused optimizer clips gradients and skips a non-finite step on the device. It is launched before the host reads
    the sums, so the device does not idle. Other optimizers run after the host has read the sums.

    Returns:
        The values of `sums` on the host, and whether the weights were updated.
    """
    config = objective.config
    limit = config.train.grad_clip
    grad_norm = sums.grad_norm()
    divisor = clip_divisor(grad_norm, limit) if limit else None
    is_fused = try_fused_step(optimizer, sums.must_skip(), divisor)
    if limit and not is_fused:
        clip_gradients(parameters, limit, grad_norm)

    values = sums.host_copy.values()
    is_finite = all(math.isfinite(value) for value in values[: sums.num_checked])
    if is_finite:
        if not is_fused:
            optimizer.step()
        update_average(optimizer, config.optimizer.ema, step)
        objective.router_stats.update_bias(sums.router_sums())
    return values, is_finite
