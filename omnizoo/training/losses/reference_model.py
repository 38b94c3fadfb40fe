"""Frozen reference models, and the base class of losses that compare the trained model with one."""

from contextlib import nullcontext
from functools import cached_property
from typing import Any, ClassVar

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
from omnizoo.training.losses.log_probability import ResponseLoss, gather_scores, in_chunks
from omnizoo.training.losses.reference_cache import ReferenceCache


class ScoringModel:
    """Computes log-probabilities of responses with a model, without gradients and dropout, for `loss`."""

    def __init__(self, model: nn.Module, loss: "ReferenceLoss") -> None:
        self.model, self.loss = model, loss
        self.head = Head(model, f"train.losses: {loss.kind}") if loss.view == "of_hidden" else None

    @torch.no_grad()
    def sums(self, batch: LocalBatch) -> torch.Tensor:
        """Return the log-probabilities of complete responses, `[samples]`, in fp64.

        Collective: all ranks must call it, even those without responses.
        """
        is_training = self.model.training
        self.model.eval()
        each = self._each(batch)
        self.model.train(is_training)
        if batch.preferences is None:
            return each.new_zeros(0, dtype=torch.float64)
        scores, samples = gather_scores(each, batch)
        return self.loss.sums_of(scores[:1], samples, batch.num_samples)[0]

    def _each(self, batch: LocalBatch) -> torch.Tensor:
        if self.head is None:
            return log_probabilities(run_model(self.model, batch)[0], batch.targets)
        found: list[torch.Tensor] = []

        def work(hidden: torch.Tensor, head: Logits) -> None:
            found.append(in_chunks(hidden, head, batch.targets))

        with self.head.replaced_by(work) as anchor:
            logits, _ = run_model(self.model, batch)
        try:
            anchor(logits)
        except UnsupportedHeadError:  # in the first forward pass of a run
            if self.loss.chunked:
                raise
            self.head = None
            return self._each(batch)
        return found[0]


class Reference:
    """The frozen model that a loss compares the trained model with.

    The option `reference` of the loss names its folder. Without it, the reference is the base model of the adapter, or
    a frozen copy of the initial model. With the option `reference_cache`, log-probabilities are cached on disk, and the
    reference is built only when a response is not in the cache.
    """

    def __init__(self, loss: "ReferenceLoss", model: nn.Module, mesh: Mesh, config: Config) -> None:
        self.loss, self.kind, self.folder, self.policy, self.mesh = loss, loss.kind, loss.folder, model, mesh
        adapter = attached(model)
        self.is_base = adapter is not None and not adapter.saved and self.folder is None
        self.config, self.is_known = self._of_reference(config), False
        self.cache: ReferenceCache | None = None
        folder = loss.cache_folder
        if folder is not None:
            identity = sync_errors(mesh, lambda: base_identity(self.config) if mesh.is_first else "")
            # A quantized base has different log-probabilities, so its cache is separate.
            held = config.model.adapter.base if self.is_base and config.model.adapter else None
            name = "-".join(filter(None, (mesh.from_first(identity), config.train.precision, held)))
            key = f"train.losses: {self.kind}: reference_cache"
            self.cache = sync_errors(mesh, lambda: ReferenceCache(folder, name, mesh.sp_rank == 0, key))
        if self.cache is None:
            _ = self.asked

    @cached_property
    def asked(self) -> ScoringModel:
        """The reference model. Build it before a step begins: the step's random numbers must not depend on it."""
        model = self.policy if self.is_base else self._copy()
        return ScoringModel(model, self.loss)

    def begin_step(self, step: NextStep) -> None:
        """Check whether all responses of the step are cached, and build the reference otherwise.

        Collective: all ranks must call it. The result is the same on all ranks, because the reference is sharded over
        them.
        """
        if self.cache is None:
            return
        others = step.kto_baseline.micro_batches if step.kto_baseline else []
        preferences = [batch.preferences for batch in (*step.batches, *others) if batch.preferences is not None]
        num_misses = sum(key not in self.cache.values for each in preferences for key in each.keys)
        self.is_known = not self.mesh.sum([num_misses])[0]
        if not self.is_known:
            _ = self.asked

    def sums(self, batch: LocalBatch) -> torch.Tensor:
        """Return the reference's log-probabilities of complete responses, `[samples]`. Collective.

        Call it before the forward pass of the trained model: with an adapter, both may be the same module.
        """
        preferences = batch.preferences
        if self.cache is not None and self.is_known:
            found = [] if preferences is None else [self.cache.values[key] for key in preferences.keys]
            return torch.tensor(found, dtype=torch.float64, device=self.mesh.device)
        with adapter_disabled(self.policy) if self.is_base else nullcontext():
            sums = self.asked.sums(batch)
        if self.cache is not None and preferences is not None:
            self.cache.add(preferences.keys, sums.tolist())
        return sums

    def _of_reference(self, config: Config) -> Config:
        """Return the config of the run, with the reference in place of the trained model."""
        if not self.is_base and self.folder is None and config.model.init_from is not None:
            raise UserError(
                f"model.init_from: {config.model.init_from}: the reference of {self.kind} is ambiguous. Export that "
                f"checkpoint, and set the option `reference` of {self.kind} to the exported folder."
            )
        spec = config.model.model_copy(update={"adapter": None})
        if self.folder is not None:
            spec = ModelSection(path=self.folder, attention=config.model.attention)
        return config.model_copy(update={"model": spec, "optimizer": OptimizerSection()})

    def _copy(self) -> nn.Module:
        copy = build_model(self.config.model, self.config.train.precision).requires_grad_(False)
        own, other = (vocabulary_size(each) for each in (self.policy, copy))
        if own != other:
            raise UserError(f"train.losses: the reference {self.folder} has {other} tokens, and the model {own}")
        has = [", ".join(map(str, media_model(each).ports)) or "no media" for each in (self.policy, copy)]
        if has[0] != has[1]:
            raise UserError(f"train.losses: the reference {self.folder} has {has[1]}, and the model {has[0]}")
        parallelize_model(copy, self.mesh, self.config)
        return copy.eval()


class ReferenceLoss(ResponseLoss):
    """A loss on responses that compares the model with a reference."""

    kind: ClassVar[str]  # name in the config
    of_reference: torch.Tensor | float  # [samples], log-probabilities of the current micro-batch by the reference

    def __init__(self, reference: str | None = None, reference_cache: str | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.folder, self.cache_folder = reference, reference_cache

    def set_up(self, model: nn.Module, mesh: Mesh, config: Config) -> None:
        super().set_up(model, mesh, config)
        self.reference = Reference(self, model, mesh, config)

    def begin_step(self, step: NextStep) -> None:
        self.reference.begin_step(step)

    def prepare(self, batch: LocalBatch) -> None:
        self.of_reference = self.reference.sums(batch)
