"""Frozen reference models, and the base class of losses that compare the trained model with one."""

from contextlib import nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from omnizoo.config.errors import UserError
from omnizoo.config.schema import Config
from omnizoo.config.sections.model import ModelSection
from omnizoo.config.sections.optimizer import OptimizerSection
from omnizoo.models.adapters.base_identity import base_identity
from omnizoo.models.adapters.lora import adapter_disabled, attached
from omnizoo.models.build import build_model
from omnizoo.models.check_config_fields import vocabulary_size
from omnizoo.models.interfaces.lm_head import Head, Logits, UnsupportedHeadError
from omnizoo.models.media.hf_model import media_model
from omnizoo.ops.loss.log_probability import log_probabilities
from omnizoo.parallel.errors import sync_errors
from omnizoo.parallel.mesh import Mesh
from omnizoo.parallelize.parallelize import parallelize_model
from omnizoo.training.local_batch import LocalBatch, run_model
from omnizoo.training.losses.base import NextStep
from omnizoo.training.losses.log_probability import ResponseLoss, gather_scores, score_in_chunks

if TYPE_CHECKING:
    from omnizoo.training.losses.reference_cache import ReferenceCache


class ScoringModel:
    """Computes log-probabilities of responses with a model, without gradients or dropout, for `loss`."""

    def __init__(self, model: nn.Module, loss: "ReferenceLoss") -> None:
        self.model = model
        self.loss = loss
        self.head: Head | None = None
        if loss.input_kind == "from_hidden":
            self.head = Head(model, f"train.losses: {loss.kind}")

    @torch.no_grad()
    def sums(self, batch: LocalBatch) -> torch.Tensor:
        """Return the log-probabilities of complete responses, `[samples]`, in fp64.

        Collective: all ranks must call it, even ranks without responses.
        """
        is_training = self.model.training
        self.model.eval()
        text_scores = self._text_scores(batch)
        self.model.train(is_training)
        if batch.preferences is None:
            return text_scores.new_zeros(0, dtype=torch.float64)
        scores, samples = gather_scores(text_scores, batch)
        return self.loss.sum_by_sample(scores[:1], samples, batch.num_samples)[0]

    def _text_scores(self, batch: LocalBatch) -> torch.Tensor:
        """Run the model, and return the log-probabilities of this rank's text targets, `[targets]`."""
        if self.head is None:
            logits, _ = run_model(self.model, batch)
            return log_probabilities(logits, batch.targets)
        results: list[torch.Tensor] = []

        def score(hidden: torch.Tensor, head: Logits) -> None:
            results.append(score_in_chunks(hidden, head, batch.targets))

        with self.head.replaced_by(score) as anchor:
            logits, _ = run_model(self.model, batch)
        try:
            anchor(logits)
        except UnsupportedHeadError:  # raised only in the first forward pass of a run
            if self.loss.chunked:
                raise
            self.head = None
            return self._text_scores(batch)
        return results[0]


class Reference:
    """The frozen model that a loss compares the trained model with.

    The option `reference` of the loss names its folder. Without it, the reference is the base model of the adapter, or
    a frozen copy of the initial model. With the option `reference_cache`, log-probabilities are cached on disk, and the
    reference is built only when a response is not in the cache.
    """

    def __init__(self, loss: "ReferenceLoss", model: nn.Module, mesh: Mesh, config: Config) -> None:
        self.loss = loss
        self.kind = loss.kind
        self.folder = loss.folder
        self.policy = model
        self.mesh = mesh
        adapter = attached(model)
        self.is_base = adapter is not None and not adapter.saved and self.folder is None
        self.config = self._reference_config(config)
        self.is_step_cached = False  # whether the cache has all responses of the current step
        self.cache: ReferenceCache | None = None
        if loss.cache_folder is not None:
            self.cache = self._open_cache(loss.cache_folder, config)
        if self.cache is None:
            _ = self.scorer

    def _open_cache(self, folder: str, config: Config) -> "ReferenceCache":
        """Open the cache of this reference in `folder`. Collective: all ranks must call it."""
        from omnizoo.training.losses.reference_cache import ReferenceCache, cache_name  # imports pyarrow

        mesh = self.mesh
        identity = sync_errors(
            mesh, lambda: base_identity(self.config.model, self.config.train.seed) if mesh.is_first else ""
        )
        name = cache_name(mesh.from_first(identity), config, self.is_base)
        key = f"train.losses: {self.kind}: reference_cache"
        return sync_errors(mesh, lambda: ReferenceCache(folder, name, mesh.sp_rank == 0, key))

    @cached_property
    def scorer(self) -> ScoringModel:
        """The reference model, built on first use.

        It must be built before a step begins, so that the random numbers of the step do not depend on it.
        """
        model = self.policy if self.is_base else self._copy()
        return ScoringModel(model, self.loss)

    def begin_step(self, step: NextStep) -> None:
        """Check whether all responses of the step are cached, and build the reference otherwise.

        Collective: all ranks must call it. All ranks make the same decision, because the reference is sharded over
        them.
        """
        if self.cache is None:
            return
        batches = list(step.batches)
        if step.kto_baseline:
            batches += step.kto_baseline.micro_batches
        num_misses = 0
        for batch in batches:
            if batch.preferences is not None:
                num_misses += sum(key not in self.cache.values for key in batch.preferences.keys)
        self.is_step_cached = not self.mesh.sum([num_misses])[0]
        if not self.is_step_cached:
            _ = self.scorer

    def sums(self, batch: LocalBatch) -> torch.Tensor:
        """Return the log-probabilities of complete responses under the reference, `[samples]`.

        Collective: all ranks must call it. Call it before the forward pass of the trained model, because with an
        adapter, both may be the same module.
        """
        preferences = batch.preferences
        if self.cache is not None and self.is_step_cached:
            keys = [] if preferences is None else preferences.keys
            cached = [self.cache.values[key] for key in keys]
            return torch.tensor(cached, dtype=torch.float64, device=self.mesh.device)
        with adapter_disabled(self.policy) if self.is_base else nullcontext():
            sums = self.scorer.sums(batch)
        if self.cache is not None and preferences is not None:
            self.cache.add(preferences.keys, sums.tolist())
        return sums

    def _reference_config(self, config: Config) -> Config:
        """Return the config of the run, in which the reference replaces the trained model."""
        if not self.is_base and self.folder is None and config.model.init_from is not None:
            raise UserError(
                f"model.init_from: {config.model.init_from}: the reference of {self.kind} is ambiguous. Export that "
                f"checkpoint, and set the option `reference` of {self.kind} to the exported folder."
            )
        spec = config.model.model_copy(update={"adapter": None})
        if self.folder is not None:
            spec = ModelSection(path=self.folder, attention=config.model.attention, recipe=config.model.recipe)
        return config.model_copy(update={"model": spec, "optimizer": OptimizerSection()})

    def _copy(self) -> nn.Module:
        """Build and shard the reference. Raises a `UserError` if its vocabulary or its media do not match the model."""
        copy = build_model(self.config.model, self.config.train.precision).requires_grad_(False)
        num_tokens = vocabulary_size(self.policy)
        reference_tokens = vocabulary_size(copy)
        if num_tokens != reference_tokens:
            raise UserError(
                f"train.losses: the reference {self.folder} has a vocabulary of {reference_tokens} tokens, but the "
                f"model has {num_tokens}. Choose a reference with the vocabulary of the model."
            )
        ports = _listed_ports(self.policy)
        reference_ports = _listed_ports(copy)
        if ports != reference_ports:
            raise UserError(
                f"train.losses: the reference {self.folder} has {reference_ports}, but the model has {ports}. "
                "Choose a reference with the encoders and decoders of the model."
            )
        parallelize_model(copy, self.mesh, self.config)
        return copy.eval()


def _listed_ports(model: nn.Module) -> str:
    """Return the ports of a model, for messages."""
    return ", ".join(str(port) for port in media_model(model).ports) or "no media"


class ReferenceLoss(ResponseLoss):
    """A loss on responses that compares the model with a reference."""

    kind: ClassVar[str]  # name in the config
    is_reference_free = False  # whether there is no reference, so all its log-probabilities count as 0
    # [samples], log-probabilities under the reference, for the current micro-batch.
    reference_scores: torch.Tensor | float

    def __init__(self, reference: str | None = None, reference_cache: str | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.folder = reference
        self.cache_folder = reference_cache

    def set_up(self, model: nn.Module, mesh: Mesh, config: Config) -> None:
        super().set_up(model, mesh, config)
        if not self.is_reference_free:
            self.reference = Reference(self, model, mesh, config)

    def begin_step(self, step: NextStep) -> None:
        if not self.is_reference_free:
            self.reference.begin_step(step)

    def prepare(self, batch: LocalBatch) -> None:
        self.reference_scores = 0.0 if self.is_reference_free else self.reference.sums(batch)
