"""Loss terms: everything a model is trained on has the shape (name, weight, sum, count).

Counts are known from the data before the forward pass and summed over all ranks and micro-batches of the step, so each
term is a plain mean over the whole step, whatever the layout.
"""

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from omnizoo.assembly.flops import count_flops
from omnizoo.assembly.published import media_model
from omnizoo.config.errors import UserError
from omnizoo.config.schema import Config
from omnizoo.data.deal import Batch, Dealt, deal
from omnizoo.data.flat_pack import FlatPack
from omnizoo.data.mismatched import apart
from omnizoo.data.plan import TEXT, Totals
from omnizoo.data.told import Known
from omnizoo.modalities.base import Item, term_name
from omnizoo.models.head import Head, Logits, OddHeadError
from omnizoo.models.routing import RouterRecorder
from omnizoo.models.stateful import has_states
from omnizoo.ops.offload import StateAway
from omnizoo.ops.precision import exact
from omnizoo.parallel.exchange import ProcessGroup
from omnizoo.parallel.mesh import Mesh
from omnizoo.training.built_in_losses import give_way
from omnizoo.training.forward import Local, forward, localize
from omnizoo.training.loss_contract import NamedLoss, Upcoming, losses_of_rows
from omnizoo.training.routers import RouterStatistics, update_bias

log = logging.getLogger(__name__)


def without_text(losses: Sequence[NamedLoss], model: str) -> list[NamedLoss]:
    """Of the losses of a run, those that a model has which writes no text: the one on text, a default, is left out."""
    for loss in losses:
        if loss.view != "of_routers" and loss.kind != "cross_entropy":
            raise UserError(f"{loss.who} is a loss on text, and {model} writes none; leave train.losses out")
    return [loss for loss in losses if loss.view == "of_routers"]


@dataclass(frozen=True)
class LossTerm:
    name: str
    weight: float
    sum: torch.Tensor  # over this rank's part of a micro-batch, with its graph


class Objective:
    """What is minimised: a model on a mesh and the terms its config asks for, or others that are given here."""

    def __init__(self, model: nn.Module, mesh: Mesh, config: Config, losses: Sequence[NamedLoss] | None = None) -> None:
        self.model, self.mesh, self.config = model, mesh, config
        # Around each phase of a step, by its name: for a profiler to see (training/profiler.py).
        self.mark: Callable[[str], AbstractContextManager[Any]] = nullcontext
        media = media_model(model)
        self.calls = media.calls
        self.ports = [port for call in self.calls for port in call]
        self.has_states, self.mutual = has_states(model), media_model(model).mutual
        self.flops = count_flops(model)
        self.weights = {name: m.decoder.weight for name, m in config.model.modalities.items() if m.decoder}
        self.produced: list[str] = []
        for name in [port.modality for port in self.ports if port.role != "encoder"]:
            modality, weighted = media.modalities(config.model)[name], self.weights.get(name, 1.0)
            maker = modality.decoder or modality.follower
            assert maker is not None
            terms = {term_name(name, term): weighted * own for term, own in maker.terms.items()}
            self.produced, self.weights = [*self.produced, *terms], self.weights | terms
        losses = losses_of_rows(config) if losses is None else losses
        if media.turns is not None:
            losses = without_text(losses, type(model).__name__.removeprefix("FSDP"))
        for loss in losses:
            loss.loss.set_up(model, mesh, config)
        self.of_text = [loss for loss in losses if loss.view != "of_routers"]
        self.of_routers = [loss for loss in losses if loss.view == "of_routers"]
        if not self.of_text and not self.produced:
            raise UserError(
                "train.losses: none of them is on what the model predicts; expected cross_entropy, or your own"
            )
        self.head = self._find_head()
        is_needed = bool(self.of_routers or config.router.bias_rate)
        self.recorder = RouterRecorder(model, is_needed, without=list(media.followers.values()))
        for loss in self.of_routers if not self.recorder.routers else ():
            log.warning("%s is of routers, and the model has none: it is left out", loss.who)
        self.statistics = RouterStatistics()
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        # While the terms are computed, the optimizer's state may be on the host.
        moved = config.parallel.offload
        is_away = "optimizer" in moved and "parameters" not in moved  # with these it is there all the time
        self.state_away = StateAway(mesh.device, ranks) if is_away else None
        some = dict.fromkeys((TEXT, *self.produced), 1)
        # A count that cannot be known fails now rather than in the first step.
        self.counts(Totals(tokens=2, packs=1, targets=some, weight=1, flops=0.0))

    @contextmanager
    def measuring(self, measures: Sequence[NamedLoss]) -> Iterator[None]:
        """For the length of the block, terms of weight 0 besides: of an evaluation, say."""
        own = self.of_text
        self.of_text = [*own, *measures]
        try:
            yield
        finally:
            self.of_text = own

    def _find_head(self) -> Head | None:
        """For losses that see hidden states."""
        at_head = [loss for loss in self.of_text if loss.view == "of_hidden"]
        return Head(self.model, at_head[0].who) if at_head else None

    def cost(self, pack: Known) -> float:
        """FLOPs of a pack, but for those of encoders; ranks share packs by it."""
        produced, predicted = pack.places(is_predicted=False), pack.places(is_predicted=True)
        return self.flops.of(pack.lengths, pack.labels, produced, predicted, self.ahead(pack.items))

    def ahead(self, items: Iterable[Item]) -> int:
        """Pairs of tokens of which the first sees the second, later one."""
        runs = ((item.port.modality, count) for item in items for _, count in item.spans)
        return 0 if self.mutual is None else self.mutual.pairs_ahead(runs)

    def counts(self, totals: Totals) -> dict[str, float]:
        """What each term's sum runs over, all ranks together."""
        counts: dict[str, float] = {}
        for loss in self.of_text:
            counts |= {loss.name: loss.count(totals)} | loss.metric_counts(totals)
        counts |= {name: totals.targets.get(name, 0) for name in self.produced}
        return counts | {loss.name: loss.count(totals) for loss in self.of_routers}

    def deal(
        self, packs: Sequence[FlatPack], micro_batch: int, note: Any = None, group: ProcessGroup | None = None
    ) -> Dealt:
        """Deal out the packs that all ranks have read; every rank must call. `group`: of the thread that calls."""
        if not self.config.mismatched_answers:
            return deal(packs, self.mesh, micro_batch, self.calls, self.cost, note, group)
        own, others = apart(packs)
        dealt = deal(own, self.mesh, micro_batch, self.calls, self.cost, note, group)
        return replace(dealt, mismatched=deal(others, self.mesh, micro_batch, self.calls, self.cost, group=group))

    @torch.no_grad()
    def begin_step(self, batches: Sequence[Batch], mismatched: Dealt | None) -> None:
        """Before the first of a step's micro-batches, for losses that have to know something of all of them."""
        with exact(self.config.parallel.precision):
            for loss in self.of_text:
                loss.loss.begin_step(Upcoming(batches, mismatched, self.localize))

    def localize(self, batch: Batch) -> Local:
        asks_likelihood = self.config.preference_pairs != "refused"
        how = (self.config.parallel, self.ports, self.has_states, self.mutual, asks_likelihood)
        return localize(batch, self.mesh, *how)

    def terms(self, batch: Batch) -> list[LossTerm]:
        """Forward one packed micro-batch on this rank."""
        with self.mark("localize"):
            local = self.localize(batch)
        with self.mark("forward"):  # other models may run in it: a teacher, a reference
            for loss in self.of_text:
                loss.loss.prepare(local)
        with self.mark("forward"), self.recorder.recording() as records:
            sums, losses = self._forward(local)
        terms = [LossTerm(loss.name, loss.weight, sums[loss.name]) for loss in self.of_text]
        for loss in self.of_text:
            terms += [LossTerm(name, 0.0, measured) for name, measured in loss.measured().items()]
        terms += [LossTerm(name, self.weights.get(name, 1.0), loss) for name, loss in losses.items()]
        if local.is_filler:
            records = [replace(record, logits=record.logits[:0], index=record.index[:0]) for record in records]
        with self.mark("router statistics"):
            counted = records
            if (batch.pack_of_token < 0).any():  # packs that only keep ranks in step
                own = local.pack_of_token >= 0
                counted = [replace(record, logits=record.logits[own], index=record.index[own]) for record in records]
            self.statistics.add(counted)
        with self.mark("forward"):
            for loss in self.of_routers if records else ():
                terms.append(LossTerm(loss.name, loss.weight, loss.sum(records, local)))
        return terms

    def _forward(self, local: Local) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """The sums of all losses on what the model predicts, by name: those of the config, and those of decoders."""
        if self.head is None:
            logits, losses = forward(self.model, local)
            sums = {loss.name: loss.sum(logits, local) for loss in self.of_text}
            for name, total in sums.items():
                if torch.is_grad_enabled() and not total.requires_grad:
                    sums[name] = total + 0 * logits.sum()  # a rank without targets: others wait for it in backward
            return sums, losses
        sums = {}

        def at_head(hidden: torch.Tensor, head: Logits) -> None:
            logits = head(hidden) if any(loss.view == "of_logits" for loss in self.of_text) else None
            for loss in self.of_text:
                seen = (hidden, head) if loss.view == "of_hidden" else (logits,)
                sums[loss.name] = loss.sum(*seen, local)

        with self.head.doing(at_head) as anchor:
            logits, losses = forward(self.model, local)
        try:
            start = anchor(logits)
        except OddHeadError:  # in the first forward pass of a run
            if not all(give_way(loss.loss) for loss in self.of_text if loss.view == "of_hidden"):
                raise
            self.head = self._find_head()
            return self._forward(local)
        return {name: total + start for name, total in sums.items()}, losses

    def take_statistics(self) -> RouterStatistics:
        """Of the routers, in the micro-batches since the last call."""
        statistics, self.statistics = self.statistics, RouterStatistics()
        return statistics

    def balance(self, loads: dict[str, torch.Tensor]) -> None:
        """After an update: moves correction biases where asked to, by how often experts were chosen on all ranks."""
        if self.config.router.bias_rate:
            update_bias(self.recorder.routers, loads, self.config.router.bias_rate)
