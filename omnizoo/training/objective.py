"""The objective of a run: the loss terms of a batch, each with a name, a weight, a sum and a count.

Loss counts are computed from the data before the forward pass, over all ranks and micro-batches of the step. Each term
is therefore a plain mean over the whole step, for any layout.
"""

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import nn
from transformers import PreTrainedModel

from omnizoo.balancing.batch import Batch
from omnizoo.balancing.step_data import StepData
from omnizoo.balancing.step_plan import TEXT, StepTotals
from omnizoo.config.errors import UserError
from omnizoo.config.schema import Config
from omnizoo.config.sections.loss_options import SCORE_LOSSES
from omnizoo.data.loading.held_out import short_names
from omnizoo.modalities.base import term_name, weights_by_term
from omnizoo.modalities.item import Port
from omnizoo.models.diffusion.recipe import denoiser_recipe
from omnizoo.models.hf_private import has_score_head
from omnizoo.models.interfaces.lm_head import Head, Logits, UnsupportedHeadError
from omnizoo.models.interfaces.recurrent import has_states
from omnizoo.models.interfaces.routers import RouterRecord, RouterRecorder
from omnizoo.models.media.hf_model import media_model
from omnizoo.models.media.media_model import MediaModel
from omnizoo.ops.device import is_host
from omnizoo.ops.precision import keep_precision
from omnizoo.parallel.fsdp.shard import set_gradient_sync
from omnizoo.parallel.mesh import Mesh
from omnizoo.training.local_batch import LocalBatch, localize, run_model
from omnizoo.training.losses.base import Loss, NamedLoss, NextStep, losses_of_rows, name_loss
from omnizoo.training.losses.text import fall_back_to_logits
from omnizoo.training.profiling.phases import Phases
from omnizoo.training.router_stats import RouterStats

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LossTerm:
    """One summand of the loss."""

    name: str
    weight: float
    sum: torch.Tensor  # scalar with its autograd graph; the sum over this rank's part of a micro-batch
    by_source: torch.Tensor | None = None  # [sources + 1], the sum of each source (see `SourceSums.pop`)


@dataclass
class LossSums:
    """Loss terms of the micro-batches since the last optimizer step, keyed by name."""

    counts: dict[str, float] = field(default_factory=dict)  # denominators, over all ranks and micro-batches
    sums: dict[str, torch.Tensor] = field(default_factory=dict)  # over this rank's micro-batches
    weights: dict[str, float] = field(default_factory=dict)
    by_source: dict[str, torch.Tensor] = field(default_factory=dict)  # [sources + 1] for each term that may be split
    counts_by_source: dict[str, dict[str, float]] = field(default_factory=dict)  # denominators, by name of the source

    def add(self, term: LossTerm) -> None:
        """Add the sum of a loss term in a micro-batch."""
        self.sums[term.name] = self.sums.get(term.name, 0) + term.sum.detach()
        self.weights[term.name] = term.weight
        if term.by_source is not None:
            self.by_source[term.name] = self.by_source.get(term.name, 0) + term.by_source


class Objective:
    """Base class of objectives. An objective defines the loss terms of a batch, and the count that divides each term.

    A subclass implements `loss_counts` and `terms`. This class computes gradients from both:

        for batch in objective.micro_batches(data, step):
            loss = objective.loss(batch)
            objective.backward(loss)
        result = omnizoo.optimizer_step(objective, optimizer, step)
    """

    def __init__(self, model: nn.Module, mesh: Mesh, config: Config) -> None:
        """Store the parts of the run.

        Args:
            model: The model, sharded and with weights.
            mesh: The mesh that the model is distributed over.
            config: The config of the run.
        """
        self.model = model
        self.mesh = mesh
        self.config = config
        self.source_names: Sequence[str] = ()  # names of `data.sources` in metrics; empty if losses are not split
        self.phases = Phases()
        self.router_stats = RouterStats({}, bias_rate=0.0)
        self.ports: Sequence[Port] = ()  # encoders, decoders and followers of the model
        self._loss_sums = LossSums()
        self._terms: Sequence[LossTerm] = ()  # terms of the loss that is passed to `backward` next

    def loss_counts(self, totals: StepTotals) -> dict[str, float]:
        """Return the denominator of each loss term, keyed by name.

        Args:
            totals: Totals of the step over all ranks.

        Returns:
            A non-negative number for each loss term that `terms` returns.
        """
        raise NotImplementedError

    def terms(self, batch: Batch) -> list[LossTerm]:
        """Run the model on this rank's part of a micro-batch. Collective: all ranks must call it.

        Args:
            batch: The micro-batch of this rank's sequence-parallel group.

        Returns:
            The loss terms.
        """
        raise NotImplementedError

    @contextmanager
    def measuring(self, measures: Sequence[NamedLoss]) -> Iterator[None]:
        """Context manager that also computes `measures`, losses with weight 0, for example during evaluation.

        Args:
            measures: The losses. This class supports none.
        """
        if measures:
            raise UserError(f"{measures[0].who} does not apply to this objective. Remove it.")
        yield

    def begin_step(self, data: StepData) -> None:
        """Prepare for a step or an evaluation. Called before its first micro-batch, on all ranks.

        Args:
            data: The micro-batches of this rank, and totals over all ranks.
        """

    def micro_batches(self, data: StepData, step: int) -> Iterator[Batch]:
        """Yield the micro-batches of a step.

        Set the loss counts once, and the gradient synchronization and the dropout seed before each micro-batch.

        Args:
            data: The data of the step, from `next_step`.
            step: Number of the step, counted from 1. Determines the dropout seed.

        Yields:
            The micro-batches of this rank's sequence-parallel group.
        """
        config = self.config
        self._loss_sums = LossSums(
            counts=self.loss_counts(data.totals), counts_by_source=self._counts_by_source(data.totals_by_source)
        )
        reduces_each = config.parallel.reduce_each_micro_batch
        if reduces_each is None:  # True on accelerators, where unsharded fp32 gradients may not fit in memory
            reduces_each = not is_host(self.mesh.device)
        with self.phases("forward"):  # some losses run a model over all micro-batches first, such as KTO's baseline
            self.begin_step(data)
        for i, batch in enumerate(data.micro_batches):
            is_last = i == len(data.micro_batches) - 1
            set_gradient_sync(self.model, is_last, reduces_each)
            # The seed depends only on the step and its packs, so a resumed run needs no generator state.
            seed = _dropout_seed(config.train.seed, step, batch.packs, self.mesh.sp_rank)
            if is_host(self.mesh.device):
                torch.default_generator.manual_seed(seed)  # torch.manual_seed formats a stack for each accelerator
            else:
                torch.manual_seed(seed)
            yield batch

    def _counts_by_source(self, totals_by_source: Mapping[int, StepTotals]) -> dict[str, dict[str, float]]:
        """Return the denominators of each source in the step, by its name; empty if there is only one source."""
        counts = {}
        for number, name in enumerate(self.source_names):
            if number in totals_by_source:
                counts[name] = self.loss_counts(totals_by_source[number])
        return counts

    def loss(self, batch: Batch) -> torch.Tensor:
        """Return the loss of a micro-batch. Collective: all ranks must call it.

        Args:
            batch: A micro-batch, from `micro_batches`.

        Returns:
            The weighted sum of the loss terms, each divided by its count in the step. A scalar tensor.
        """
        counts = self._loss_sums.counts
        with keep_precision(self.config.train.precision):
            terms = self.terms(batch)
            with self.phases("forward"):
                weighted_means = [term.weight * term.sum / (counts[term.name] or 1) for term in terms]
                loss = torch.stack(weighted_means).sum()
        self._terms = terms
        return loss

    def backward(self, loss: torch.Tensor) -> None:
        """Accumulate the gradients of a loss, and add its terms to the results of the step.

        Args:
            loss: The last result of `loss`.
        """
        with keep_precision(self.config.train.precision), self.phases("backward"):
            loss.backward()
        for term in self._terms:
            self._loss_sums.add(term)
        self._terms = ()

    def pop_loss_sums(self) -> LossSums:
        """Return the loss terms since the last call, and reset them. `optimizer_step` calls this method."""
        loss_sums = self._loss_sums
        self._loss_sums = LossSums()
        return loss_sums


class LanguageObjective(Objective):
    """The losses of `train.losses` on text and routers, and the losses of decoders and followers."""

    def __init__(self, model: nn.Module, mesh: Mesh, config: Config, losses: Sequence[NamedLoss]) -> None:
        super().__init__(model, mesh, config)
        media = media_model(model)
        self.ports = [port for call in media.ports_by_call for port in call]
        self._has_states = has_states(model)
        self._bidirectional = media.bidirectional
        self._decoder_weights = _decoder_weights(media, config)
        _check_scores(model, config)
        if media.speaker_format is not None:
            losses = without_text(losses, type(model).__name__.removeprefix("FSDP"))
        for loss in losses:
            if loss.input_kind == "from_prediction":
                raise UserError(f"{loss.who} needs a diffusion transformer. Use cross_entropy or another loss on text.")
            loss.loss.set_up(model, mesh, config)
        self.token_losses = [loss for loss in losses if loss.input_kind != "from_routers"]
        self._router_losses = [loss for loss in losses if loss.input_kind == "from_routers"]
        if not self.token_losses and not self._decoder_weights:
            raise UserError(
                "train.losses: no loss applies to the predictions of the model. Add cross_entropy or a loss plugin."
            )
        if len(config.data.sources) > 1:
            taken = [loss.name for loss in self.token_losses + self._router_losses]
            self.source_names = short_names(config.data.sources, [*taken, *self._decoder_weights])
        self._head = self._find_head()
        self._recorder = self._record_routers(media)
        self.router_stats = RouterStats(self._recorder.routers, config.train.router_bias_rate)
        # Compute the counts once, so that an error in a plugin is raised now and not in the first step.
        targets = dict.fromkeys((TEXT, *self._decoder_weights), 1)
        self.loss_counts(StepTotals(tokens=2, packs=1, targets=targets, weight=1, flops=0.0))

    def _find_head(self) -> Head | None:
        """Return the head of the model if a loss uses hidden states, otherwise None."""
        hidden_losses = [loss for loss in self.token_losses if loss.input_kind == "from_hidden"]
        return Head(self.model, hidden_losses[0].who) if hidden_losses else None

    def _record_routers(self, media: MediaModel) -> RouterRecorder:
        """Return a recorder of the model's routers, except routers of followers.

        Warn if a loss needs routers but none exist.
        """
        is_needed = bool(self._router_losses or self.config.train.router_bias_rate)
        followers = [module.module for module in media.modules_of("follower")]
        recorder = RouterRecorder(self.model, is_needed, without=followers)
        if not recorder.routers:
            for loss in self._router_losses:
                log.warning("%s is not used, because the model has no routers.", loss.who)
        return recorder

    @contextmanager
    def measuring(self, measures: Sequence[NamedLoss]) -> Iterator[None]:
        """Context manager that also computes `measures`, losses with weight 0, for example during evaluation."""
        token_losses = self.token_losses
        self.token_losses = [*token_losses, *measures]
        try:
            yield
        finally:
            self.token_losses = token_losses

    def loss_counts(self, totals: StepTotals) -> dict[str, float]:
        """Return the denominator of each loss term and metric, keyed by name. `totals` cover all ranks."""
        counts: dict[str, float] = {}
        for loss in self.token_losses:
            counts[loss.name] = loss.count(totals)
            counts |= loss.metric_counts(totals)
        counts |= {name: totals.targets.get(name, 0) for name in self._decoder_weights}
        return counts | {loss.name: loss.count(totals) for loss in self._router_losses}

    @torch.no_grad()
    def begin_step(self, data: StepData) -> None:
        """Call `begin_step` of all losses, with all micro-batches of the step."""
        step = NextStep(data.micro_batches, data.kto_baseline, self._localize)
        with keep_precision(self.config.train.precision):
            for loss in self.token_losses:
                loss.loss.begin_step(step)

    def _localize(self, batch: Batch) -> LocalBatch:
        """Return this rank's part of a micro-batch."""
        return localize(
            batch,
            self.mesh,
            self.config,
            self.ports,
            has_states=self._has_states,
            bidirectional=self._bidirectional,
            num_sources=len(self.source_names) if torch.is_grad_enabled() else 1,  # evaluations are not split
        )

    def terms(self, batch: Batch) -> list[LossTerm]:
        """Run the model on this rank's part of a micro-batch. Collective: all ranks must call it."""
        with self.phases("localize"):
            local = self._localize(batch)
        with self.phases("forward"):  # a loss may run another model here, such as a reference
            for loss in self.token_losses:
                loss.loss.prepare(local)
        splits: dict[str, torch.Tensor | None] = {}
        with self.phases("forward"), self._recorder.recording() as records:
            sums, decoder_sums = self._forward(local, splits)
        terms = [LossTerm(loss.name, loss.weight, sums[loss.name], splits[loss.name]) for loss in self.token_losses]
        for loss in self.token_losses:
            terms += [LossTerm(name, 0.0, metric) for name, metric in loss.metric_sums().items()]
        for name, decoder_sum in decoder_sums.items():
            weight = self._decoder_weights.get(name, 1.0)
            terms.append(LossTerm(name, weight, decoder_sum, local.split_of_media(name, decoder_sum)))
        return terms + self._router_terms(records, batch, local)

    def _router_terms(self, records: list[RouterRecord], batch: Batch, local: LocalBatch) -> list[LossTerm]:
        """Add the choices of the routers to the statistics, and return the losses on routers."""
        if local.is_empty:
            records = [_select_tokens(record, slice(0)) for record in records]
        with self.phases("router statistics"):
            counted = records
            if (batch.columns["pack_of_token"] < 0).any():  # dummy packs are excluded
                is_counted = local.pack_of_token >= 0
                counted = [_select_tokens(record, is_counted) for record in records]
            self.router_stats.add(counted)
        if not records:
            return []
        with self.phases("forward"):
            return [LossTerm(loss.name, loss.weight, loss.sum(records, local)) for loss in self._router_losses]

    def _forward(
        self, local: LocalBatch, splits: dict[str, torch.Tensor | None]
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Run the model, and store the split of each loss on tokens by source in `splits`.

        Returns:
            The summed losses on tokens and the summed losses of decoders, both keyed by name.
        """
        if self._head is None:
            logits, decoder_sums = run_model(self.model, local)
            sums = {}
            for loss in self.token_losses:
                sums[loss.name] = loss.sum(logits, local)
                splits[loss.name] = local.source_sums.pop(sums[loss.name], len(local.targets))
            for name, total in sums.items():
                if torch.is_grad_enabled() and not total.requires_grad:
                    # A rank without targets must join the collectives of the backward pass.
                    sums[name] = total + 0 * logits.sum()
            return sums, decoder_sums
        sums = {}
        needs_logits = any(loss.input_kind == "from_logits" for loss in self.token_losses)

        def compute_losses(hidden: torch.Tensor, head: Logits) -> None:
            logits = head(hidden) if needs_logits else None
            for loss in self.token_losses:
                if loss.input_kind == "from_hidden":
                    sums[loss.name] = loss.sum(hidden, head, local)
                else:
                    sums[loss.name] = loss.sum(logits, local)
                splits[loss.name] = local.source_sums.pop(sums[loss.name], len(local.targets))

        with self._head.replaced_by(compute_losses) as anchor:
            logits, decoder_sums = run_model(self.model, local)
        try:
            start = anchor(logits)
        except UnsupportedHeadError:  # raised only in the first forward pass of a run
            hidden_losses = [loss.loss for loss in self.token_losses if loss.input_kind == "from_hidden"]
            if not all(fall_back_to_logits(loss) for loss in hidden_losses):
                raise
            self._head = self._find_head()
            return self._forward(local, splits)
        return {name: total + start for name, total in sums.items()}, decoder_sums


def build_objective(
    model: nn.Module,
    mesh: Mesh,
    config: Config,
    losses: Sequence[NamedLoss] | None = None,
    extra_losses: Mapping[str, Loss] | None = None,
) -> Objective:
    """Build the objective of a run, which depends on the model. Collective: all ranks must call it.

    Args:
        model: The model, sharded and with weights.
        mesh: The mesh that the model is distributed over.
        config: The config of the run.
        losses: Losses to use instead of `train.losses`.
        extra_losses: Losses in addition to `train.losses`, keyed by name. Their weight is 1.

    Returns:
        The objective, for `train_step` or for a custom loop.

    Raises:
        UserError: If a loss cannot be used with this model.
    """
    losses = losses_of_rows(config) if losses is None else losses
    extra = [name_loss(name, loss) for name, loss in (extra_losses or {}).items()]
    if denoiser_recipe(model) is not None:
        from omnizoo.training.denoising.objective import DenoiseObjective  # it is a subclass of `Objective`

        return DenoiseObjective(model, mesh, config, [*losses, *extra])
    return LanguageObjective(model, mesh, config, [*losses, *extra])


def _check_scores(model: nn.Module, config: Config) -> None:
    """Raise a `UserError` if the model scores samples, but no loss uses scores."""
    has_scores = isinstance(model, PreTrainedModel) and has_score_head(model.config)
    if has_scores and config.model.score_head is None:
        name = type(model).__name__.removeprefix("FSDP")
        raise UserError(f"train.losses: the model is a {name}. Add {' or '.join(SCORE_LOSSES)}, or use another model.")


def _decoder_weights(media: MediaModel, config: Config) -> dict[str, float]:
    """Return the weight of each loss term of the model's decoders and followers."""
    weights: dict[str, float] = {}
    for port in (port for port in media.ports if port.role != "encoder"):
        settings = config.model.modalities.get(port.modality)
        weight = settings.decoder.weight if settings is not None and settings.decoder else 1.0
        modality = media.modalities(config.model)[port.modality]
        decoder = modality.decoder or modality.follower
        assert decoder is not None
        for term, term_weight in weights_by_term(decoder).items():
            weights[term_name(port.modality, term)] = weight * term_weight
    return weights


def without_text(losses: Sequence[NamedLoss], model_class: str) -> list[NamedLoss]:
    """Return the losses of a model that generates no text, without the default loss on text.

    Raises:
        UserError: If the config sets another loss on text.
    """
    for loss in losses:
        if loss.input_kind != "from_routers" and loss.kind != "cross_entropy":
            raise UserError(f"{loss.who} is a loss on text, but {model_class} generates no text. Remove train.losses.")
    return [loss for loss in losses if loss.input_kind == "from_routers"]


def _select_tokens(record: RouterRecord, index: torch.Tensor | slice) -> RouterRecord:
    """Return the part of a router record that belongs to the tokens at `index`."""
    return replace(record, logits=record.logits[index], index=record.index[index])


def _dropout_seed(seed: int, step: int, packs: Sequence[int], sp_rank: int) -> int:
    """Return a seed that depends only on the run's seed, the step, the packs and the sequence-parallel rank."""
    digest = hashlib.blake2b(f"{seed}/{step}/{list(packs)}/{sp_rank}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
