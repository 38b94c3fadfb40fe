"""Loss terms: everything a model is trained on has the shape (name, weight, sum, count).

Counts are known from the data before the forward pass and summed over all ranks and micro-batches of the step, so each
term is a plain mean over the whole step, whatever the layout.
"""

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from omnizoo.assembly.flops import count_flops
from omnizoo.assembly.published import media_model
from omnizoo.config.schema import Config
from omnizoo.data.deal import Batch
from omnizoo.data.plan import TEXT, Known, Totals
from omnizoo.models.routing import RouterRecorder
from omnizoo.ops.cross_entropy import cross_entropy_sum
from omnizoo.parallel.mesh import Mesh
from omnizoo.training.forward import forward, localize
from omnizoo.training.routers import RouterStatistics, balance_terms, update_bias

BALANCE, ROUTER_Z = "balance", "router_z"


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
        self.ports = media_model(model).ports
        self.flops = count_flops(model)
        self.weights = {name: m.decoder.weight for name, m in config.model.modalities.items() if m.decoder}
        self.statistics = RouterStatistics()

    def cost(self, pack: Known) -> float:
        """FLOPs of a pack, but for those of encoders; ranks share packs by it."""
        return self.flops.of(pack.lengths, pack.labels, pack.places(is_predicted=False), pack.places(is_predicted=True))

    def counts(self, totals: Totals) -> dict[str, int]:
        """What each term's sum runs over, all ranks together."""
        produced = [port.modality for port in self.ports if port.role == "decoder"]
        counts = {name: totals.targets.get(name, 0) for name in (TEXT, *produced)}
        if self.config.train.balance_loss:
            counts[BALANCE] = totals.packs
        if self.config.train.router_z_loss:
            counts[ROUTER_Z] = totals.tokens * len(self.recorder.routers)
        return counts

    def terms(self, batch: Batch) -> list[LossTerm]:
        """Forward one packed micro-batch on this rank."""
        train = self.config.train
        local = localize(batch, self.mesh, self.config.parallel, self.ports)
        with self.recorder.recording() as records:
            logits, losses = forward(self.model, local)
        terms = [LossTerm(TEXT, 1.0, cross_entropy_sum(logits, local.targets))]
        terms += [LossTerm(name, self.weights.get(name, 1.0), loss) for name, loss in losses.items()]
        if local.is_filler:
            records = [replace(record, logits=record.logits[:0], index=record.index[:0]) for record in records]
        self.statistics.add(records)
        if records and (train.balance_loss or train.router_z_loss):
            add_up = partial(self.mesh.sum_along, "sp")
            balance, router_z = balance_terms(records, local.pack_of_token, len(batch.packs), add_up)
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
