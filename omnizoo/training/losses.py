"""Loss terms: everything a model is trained on has the shape (name, weight, sum, count).

Counts are known from the data before the forward pass and summed over all ranks and micro-batches of the step, so each
term is a plain mean over the whole step, whatever the layout.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from omnizoo.config.schema import Config
from omnizoo.data.loader import Batch
from omnizoo.models.routing import RouterRecorder
from omnizoo.ops.cross_entropy import cross_entropy_sum
from omnizoo.parallel.mesh import Mesh
from omnizoo.training.balance import RouterStatistics, balance_terms, update_bias
from omnizoo.training.forward import forward, localize

TEXT, BALANCE, ROUTER_Z = "text", "balance", "router_z"


@dataclass(frozen=True)
class LossTerm:
    name: str
    weight: float
    sum: torch.Tensor  # over this rank's part of a micro-batch, with its graph


class Objective:
    """What is minimised: a model on a mesh and the terms its config asks for."""

    def __init__(self, model: nn.Module, mesh: Mesh, config: Config) -> None:
        self.model, self.mesh, self.config = model, mesh, config
        train = config.train
        losses = (train.balance_loss, train.router_z_loss, train.router_bias_rate)
        self.recorder = RouterRecorder(model, required=any(losses))
        self.statistics = RouterStatistics()

    def counts(self, batches: Sequence[Batch]) -> dict[str, int]:
        """What each term's sum runs over; ranks that share a pack agree, so one of them is to be counted."""
        counts = {TEXT: sum(batch.targets for batch in batches)}
        if self.config.train.balance_loss:
            counts[BALANCE] = sum(len(batch.packs) for batch in batches)
        if self.config.train.router_z_loss:
            counts[ROUTER_Z] = sum(batch.tokens for batch in batches) * len(self.recorder.routers)
        return counts

    def terms(self, batch: Batch) -> list[LossTerm]:
        """Forward one packed micro-batch on this rank."""
        train = self.config.train
        local = localize(batch, self.mesh, self.config.parallel.overlap)
        with self.recorder.recording() as records:
            logits = forward(self.model, local)
        terms = [LossTerm(TEXT, 1.0, cross_entropy_sum(logits, local.targets))]
        if local.is_filler:
            records = [replace(record, logits=record.logits[:0], index=record.index[:0]) for record in records]
        self.statistics.add(records)
        if records and (train.balance_loss or train.router_z_loss):
            group = self.mesh.group("sp") if self.mesh.layout.sp > 1 else None
            balance, router_z = balance_terms(records, local.pack_of_token, len(batch.packs), group)
            terms += [LossTerm(BALANCE, train.balance_loss, balance)] if train.balance_loss else []
            terms += [LossTerm(ROUTER_Z, train.router_z_loss, router_z)] if train.router_z_loss else []
        return terms

    def end_step(self, update: bool) -> dict[str, float]:
        """Router statistics of the micro-batches since the last call; moves correction biases where asked to."""
        statistics, self.statistics = self.statistics, RouterStatistics()
        metrics = statistics.reduce(self.mesh.sum)
        if update and self.config.train.router_bias_rate:
            update_bias(self.recorder.routers, statistics.loads, self.config.train.router_bias_rate)
        return metrics
