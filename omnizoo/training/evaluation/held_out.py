"""Losses on held-out data, over all sources and for each source.

Every evaluation uses the same packs. Losses are summed over ranks and divided by the global loss count.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch

from omnizoo.balancing.balancer import Balancer
from omnizoo.balancing.step_plan import StepTotals
from omnizoo.config.errors import UserError
from omnizoo.config.schema import Config
from omnizoo.data.loading.held_out import held_out_parts, read_held_out
from omnizoo.data.loading.lane_stream import LoadedStep
from omnizoo.data.loading.reader import Reader
from omnizoo.data.packing.pack import Pack
from omnizoo.models.diffusion.recipe import denoiser_recipe
from omnizoo.ops.precision import keep_precision
from omnizoo.parallel.mesh import Mesh
from omnizoo.reporting.plural import plural
from omnizoo.reporting.run_folder import RunFolder
from omnizoo.training.evaluation.pipeline_samples import PipelineSampler
from omnizoo.training.evaluation.responses import Sampler
from omnizoo.training.local_batch import LocalBatch
from omnizoo.training.losses.base import Loss, NamedLoss
from omnizoo.training.losses.scores import LabelCounts, macro_f1
from omnizoo.training.objective import Objective
from omnizoo.training.recorder import Recorder

F1 = "/f1"  # metric of a classification run, the mean F1 score of all labels


class TokenAccuracy(Loss):
    """The share of text targets whose token has the highest logit, as a weighted mean over targets."""

    def from_logits(self, logits: torch.Tensor, batch: LocalBatch) -> torch.Tensor:
        """Return the weighted number of targets that have the highest logit."""
        return batch.sum((logits.argmax(-1) == batch.targets).double())


def token_metrics(config: Config) -> list[NamedLoss]:
    """Return the metrics of `evaluation.metrics` that are computed from logits, along with the losses.

    Their names begin with a slash, to distinguish them from loss terms (see `_key`).
    """
    metrics = []
    for settings in config.evaluation.metrics:
        if settings.is_of_answers:
            continue
        metric = NamedLoss(
            loss=TokenAccuracy(),
            key="evaluation.metrics",
            kind=settings.kind,
            name=settings.label.removeprefix("eval"),
            weight=0.0,
            method="from_logits",
        )
        metrics.append(metric)
    head = config.model.score_head
    if head is not None and head.problem != "reward":
        counts = LabelCounts(head.labels, head.problem)
        metric = NamedLoss(
            loss=counts,
            key="train.losses",
            kind="classification",
            name=F1,
            weight=0.0,
            method="from_logits",
        )
        metrics.append(metric)
    return metrics


def sum_totals(totals: Sequence[StepTotals]) -> StepTotals:
    """Return the sum of `totals`. Each of them belongs to one part of the held-out data."""
    sums: dict[str, Any] = {}
    for field in fields(StepTotals):
        values = [getattr(part, field.name) for part in totals]
        if isinstance(values[0], dict):
            keys = dict.fromkeys(key for value in values for key in value)
            sums[field.name] = {key: sum(value.get(key, 0) for value in values) for key in keys}
        else:
            sums[field.name] = sum(values)
    return StepTotals(**sums)


def read_parts(reader: Reader, mesh: Mesh) -> dict[str, list[Pack]]:
    """Return this rank's packs of held-out data, keyed by source. `reader` reads the held-out sources."""
    packs = {}
    for name, part_reader in held_out_parts(reader).items():
        packs[name] = read_held_out(part_reader, mesh.rank, mesh.layout.world)
    return packs


class Evaluator:
    """Computes losses on held-out packs and generates responses to held-out prompts, the same in every evaluation."""

    def __init__(
        self,
        objective: Objective,
        balancer: Balancer,
        packs: Mapping[str, list[Pack]],
        reader: Reader | None,
        folder: RunFolder,
    ) -> None:
        """Redistribute the held-out packs. Collective: all ranks must call it.

        Args:
            objective: The model and its losses.
            balancer: Assigns packs to ranks.
            packs: This rank's held-out packs, keyed by source, from `read_parts`.
            reader: Reads held-out rows; None if the run never evaluates.
            folder: The run folder, where generated media are written.

        Raises:
            UserError: If the held-out data has no targets.
        """
        self.objective = objective
        self.folder = folder
        self.config = objective.config
        self.sampler: Sampler | PipelineSampler | None = None
        self._printed_problem = ""
        # Keyed by the short name of the source. If all sources are evaluated together, the only key is empty.
        self.parts = {source: balancer(LoadedStep(loaded), micro_batch=1) for source, loaded in packs.items()}
        if reader is None:
            return
        self.totals = sum_totals([part.totals for part in self.parts.values()])
        if not self.totals.has_targets:
            paths = ", ".join(source.name for source in self.config.data.eval_sources)
            raise UserError(
                f"data.eval_sources: {paths}: no targets in {plural(self.totals.packs, 'pack')} of "
                f"{self.totals.tokens} tokens, so there is no held-out loss. Add rows with a response, or set "
                "evaluation.every: 0."
            )
        if self.config.evaluation.samples:
            is_denoiser = denoiser_recipe(objective.model) is not None
            self.sampler = (PipelineSampler if is_denoiser else Sampler)(objective, reader)

    def run(self, step: int, recorder: Recorder) -> dict[str, float | None]:
        """Compute losses and response metrics, and record the responses. Collective: all ranks must call it.

        Args:
            step: The step after which the model is evaluated.
            recorder: Records responses and prints warnings.
        """
        metrics = self.losses()
        if self.sampler is None:
            return metrics
        with self.objective.phases("evaluation"):
            responses = self.sampler.respond(step, self.folder)
        recorder.samples(responses.records)
        problem = responses.failed_prompts()
        if problem and problem != self._printed_problem:  # print the same problem once, not in each evaluation
            recorder.print(f"warning: step {step}: {problem}")
            self._printed_problem = problem
        for failure in responses.failures:
            recorder.print(f"warning: step {step}: {failure} The metric is missing in this evaluation.")
        return metrics | responses.metrics

    def metric_names(self) -> set[str]:
        """Return the names of all metrics that an evaluation returns."""
        names = {metric.label for metric in self.config.evaluation.metrics if metric.is_of_answers}
        for source, counts in self._loss_counts().items():
            names.add(_key(source))
            names.update(_key(source, term) for term, count in counts.items() if count)
        return names

    def _loss_counts(self) -> dict[str, dict[str, float]]:
        """Return the loss counts, keyed by source. The empty name stands for all sources together."""
        totals = {"": self.totals} | {source: part.totals for source, part in self.parts.items()}
        with self.objective.measuring(token_metrics(self.config)):
            return {source: self.objective.loss_counts(source_totals) for source, source_totals in totals.items()}

    @torch.no_grad()
    def losses(self) -> dict[str, float | None]:
        """Return `eval/loss` and `eval/loss/<term>`. With several sources, also return `eval/<source>/loss...`.

        Terms without held-out targets are omitted. Collective: all ranks must call it.
        """
        objective = self.objective
        counts = self._loss_counts()
        sums = {(source, term): 0.0 for source in self.parts for term in counts[source]}
        weights: dict[str, float] = {}
        objective.model.eval()
        with objective.phases("evaluation"), objective.measuring(token_metrics(self.config)):
            for source, part in self.parts.items():
                objective.begin_step(part)
                for batch in part.micro_batches:
                    with keep_precision(self.config.train.precision):
                        terms = objective.terms(batch)
                    for term in terms:
                        sums[source, term.name] += float(term.sum)
                        weights[term.name] = term.weight
        objective.model.train()
        objective.router_stats.reset()
        totals = dict(zip(sums, objective.mesh.sum(list(sums.values())), strict=True))

        sums_of_all = dict.fromkeys(counts[""], 0.0)
        for (_, name), total in totals.items():
            sums_of_all[name] += total
        metrics = self._means("", sums_of_all, counts[""], weights)
        if "" not in self.parts:  # the sources are evaluated separately
            for source in self.parts:
                source_sums = {term: totals[source, term] for term in counts[source]}
                metrics |= self._means(source, source_sums, counts[source], weights)
        return metrics

    def _means(
        self, source: str, sums: Mapping[str, float], counts: Mapping[str, float], weights: Mapping[str, float]
    ) -> dict[str, float | None]:
        """Return the metrics of a source: the mean of each loss term that has targets, their weighted sum, and F1."""
        means = {name: total / counts[name] for name, total in sums.items() if counts[name]}
        loss = sum(weights.get(name, 0.0) * mean for name, mean in means.items())
        if means.get(F1) is not None:
            assert self.config.model.score_head is not None
            means[F1] = macro_f1(sums, F1, len(self.config.model.score_head.labels))
        return {_key(source): loss, **{_key(source, name): mean for name, mean in means.items()}}

    def describe(self) -> str:
        """Return a description of the held-out data and of the evaluation interval, for the start-up table."""
        config = self.config
        evaluation = config.evaluation
        if not config.data.eval_sources:
            return "none"
        paths = "\n".join(source.name for source in config.data.eval_sources)
        if not evaluation.every:
            return f"not evaluated, because evaluation.every is 0: {paths}"

        amount = plural(self.totals.packs, "pack")
        if self.totals.packs < evaluation.packs:
            amount += f" (all available; evaluation.packs is {evaluation.packs})"
        if evaluation.samples:
            amount += f", {plural(evaluation.samples, 'prompt')}"
        interval = f"every {evaluation.every} steps"
        if evaluation.every > config.train.steps:
            interval += f", so never in a run of {config.train.steps}"
        return f"{amount}, {interval}: {paths}"


def _key(source: str, term: str = "") -> str:
    """Return the name of a metric of a source.

    Args:
        source: Short name of the source; empty for all sources together.
        term: Name of a loss term, or name of a token metric with its slash; empty for the loss.
    """
    prefix = f"eval/{source}" if source else "eval"
    if term.startswith("/"):
        return prefix + term
    return f"{prefix}/loss/{term}" if term else f"{prefix}/loss"
