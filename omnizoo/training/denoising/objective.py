"""The objective of a diffusion transformer: predict the noise, or the velocity, of noisy latents."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from omnizoo.balancing.batch import Batch
from omnizoo.balancing.step_data import StepData
from omnizoo.balancing.step_plan import TEXT, StepTotals
from omnizoo.config.errors import UserError
from omnizoo.config.schema import Config
from omnizoo.data.loading.held_out import short_names
from omnizoo.modalities.item import Inputs
from omnizoo.modalities.scheduler_config import read_noise_schedule
from omnizoo.models.diffusion.denoiser import noise_range
from omnizoo.models.diffusion.predict import predict
from omnizoo.models.diffusion.recipe import denoiser_recipe
from omnizoo.models.diffusion.samples import SampleSizes, pipeline_of
from omnizoo.models.media.hf_model import media_model
from omnizoo.parallel.mesh import Mesh
from omnizoo.parallel.sequence.sequence_parallel import SequenceParallel
from omnizoo.training.denoising.encoding import encode_step
from omnizoo.training.denoising.frozen_encoders import FrozenEncoders
from omnizoo.training.denoising.noisy_batch import NoisyBatch, add_noise
from omnizoo.training.losses.base import NamedLoss
from omnizoo.training.losses.denoise import Denoise
from omnizoo.training.losses.source_sums import SourceSums
from omnizoo.training.objective import LossTerm, Objective

PREDICTION = "from_prediction"  # kind of losses on the prediction of a denoiser


class DenoiseObjective(Objective):
    """The loss `denoise` of `train.losses`, and plugins on the same prediction."""

    def __init__(self, model: nn.Module, mesh: Mesh, config: Config, losses: Sequence[NamedLoss]) -> None:
        super().__init__(model, mesh, config)
        self.ports = media_model(model).ports
        self.losses = losses
        denoise = _check_losses(losses, type(model).__name__.removeprefix("FSDP"))
        folder = pipeline_of(config.model)
        recipe = denoiser_recipe(model)
        assert recipe is not None, "a diffusion transformer has a recipe"
        self.recipe = recipe
        self.sizes = SampleSizes.of(config.model)
        self.encoder = FrozenEncoders(folder, mesh.device, config.data.text_tokens, recipe.trims_text)
        self.guidance = denoise.guidance
        scheduler = folder.component("scheduler")
        schedule = read_noise_schedule(
            scheduler.class_name, scheduler.config, folder.key, denoise.prediction, denoise.shift
        )
        self.noise = denoise.noise_options(schedule, config.train.seed, noise_range(model))
        if len(config.data.sources) > 1:
            self.source_names = short_names(config.data.sources, [loss.name for loss in losses])
        for loss in losses:
            loss.loss.set_up(model, mesh, config)
        # Compute the counts once, so that an error in a plugin is raised now and not in the first step.
        self.loss_counts(StepTotals(tokens=2, packs=1, targets={TEXT: 0, "": 1}, weight=0, flops=0.0))
        self._batches: Sequence[Batch] = ()  # micro-batches whose items are encoded
        self._encoded: Sequence[Mapping[int, Inputs]] = ()

    @contextmanager
    def measuring(self, measures: Sequence[NamedLoss]) -> Iterator[None]:
        """Context manager that also computes `measures`, losses with weight 0, for example during evaluation."""
        losses = self.losses
        for measure in measures:
            _check_input(measure, type(self.model).__name__)
        self.losses = [*losses, *measures]
        try:
            yield
        finally:
            self.losses = losses

    def loss_counts(self, totals: StepTotals) -> dict[str, float]:
        """Return the denominator of each loss term and metric, keyed by name. `totals` are those of all ranks."""
        counts: dict[str, float] = {}
        for loss in self.losses:
            counts[loss.name] = loss.count(totals)
            counts |= loss.metric_counts(totals)
        return counts

    @torch.no_grad()
    def begin_step(self, data: StepData) -> None:
        """Encode the items of all micro-batches of the step. Collective: all ranks must call it."""
        self._encode(data.micro_batches)

    def _encode(self, batches: Sequence[Batch]) -> None:
        self._encoded = self.encode_samples(batches)
        self._batches = batches

    def encode_samples(self, batches: Sequence[Batch]) -> Sequence[Mapping[int, Inputs]]:
        """Return the encoded samples of each micro-batch by index. Collective: all ranks must call it."""
        return encode_step(batches, self.ports, self.encoder, self.mesh)

    def terms(self, batch: Batch) -> list[LossTerm]:
        """Run the model on a micro-batch. Collective: all ranks must call it."""
        if not any(batch is encoded for encoded in self._batches):  # not part of a step, such as in `verify`
            self._encode([batch])
        with self.phases("localize"):
            noisy_batch = self._add_noise(batch)
        with self.phases("forward"):
            prediction = self._predict(noisy_batch)
            terms = []
            for loss in self.losses:
                total = loss.sum(prediction, noisy_batch)
                by_source = noisy_batch.source_sums.pop(total, len(noisy_batch.shares))
                terms.append(LossTerm(loss.name, loss.weight, total, by_source))
                terms += [LossTerm(name, 0.0, metric) for name, metric in loss.metric_sums().items()]
        return terms

    def _add_noise(self, batch: Batch) -> NoisyBatch:
        """Return the noisy samples of a micro-batch."""
        number = next(i for i, encoded in enumerate(self._batches) if encoded is batch)
        by_index = self._encoded[number]
        samples = [by_index[index] for index in sorted(by_index)]
        shape = batch.batch_shape or self.sizes.dummy_shape
        if not batch.sample_ids:
            samples = [self.sizes.zero_sample(shape)]
        assert len(samples) == max(1, len(batch.sample_ids)), "one item for each sample"
        return add_noise(
            samples,
            sample_ids=batch.sample_ids,
            tokens=self.sizes.latent_tokens(shape[:-1]),
            normalization=self.encoder.normalization,
            options=self.noise,
            device=self.mesh.device,
            dtype=torch.float64 if self.config.train.precision == "fp64" else torch.float32,
            num_ranks=self.mesh.layout.sp,
            source_sums=self._source_sums(batch),
        )

    def _source_sums(self, batch: Batch) -> SourceSums:
        """Return what splits the losses of a micro-batch by source. Evaluations are not split."""
        if not self.source_names or not torch.is_grad_enabled():
            return SourceSums()
        sources = torch.tensor(batch.sources, device=self.mesh.device)
        return SourceSums(len(self.source_names), sources)

    def _predict(self, batch: NoisyBatch) -> torch.Tensor:
        """Run the model."""
        sequence = None
        if self.mesh.layout.sp > 1:
            sequence = partial(SequenceParallel, self.mesh, overlap=self.config.parallel.overlap)
        condition = dict(batch.condition)
        if self.sizes.takes_guidance:
            condition["guidance"] = torch.full_like(batch.shares, self.guidance)
        return predict(self.model, self.recipe, batch.noisy, batch.shares, condition, sequence)


def _check_losses(losses: Sequence[NamedLoss], model_class: str) -> Denoise:
    """Return the loss `denoise`. Raise a `UserError` if there is not exactly one, or a loss needs other inputs."""
    denoising = [loss.loss for loss in losses if isinstance(loss.loss, Denoise)]
    for loss in losses:
        _check_input(loss, model_class)
    if len(denoising) != 1:
        raise UserError(
            f"train.losses: {model_class} is a diffusion transformer, which needs the loss denoise exactly once. Set "
            "train.losses: [{kind: denoise}]."
        )
    return denoising[0]


def _check_input(loss: NamedLoss, model_class: str) -> None:
    """Raise a `UserError` if a loss is not computed from the prediction of a denoiser."""
    if loss.input_kind != PREDICTION:
        raise UserError(
            f"{loss.who} does not apply to {model_class}, a diffusion transformer. Set "
            "train.losses: [{kind: denoise}]."
        )
