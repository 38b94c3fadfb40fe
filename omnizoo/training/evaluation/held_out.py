"""Held-out losses, over all sources and for each source.

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
from omnizoo.ops.precision import keep_precision
from omnizoo.parallel.mesh import Mesh
from omnizoo.reporting.run_folder import RunFolder
from omnizoo.training.evaluation.responses import Sampler
from omnizoo.training.local_batch import LocalBatch
from omnizoo.training.losses.base import Loss, NamedLoss
from omnizoo.training.objective import LanguageObjective
from omnizoo.training.recorder import Recorder


class TokenAccuracy(Loss):
    """The share of text targets that have the highest logit, a weighted mean over targets."""

    def from_logits(self, logits: torch.Tensor, batch: LocalBatch) -> torch.Tensor:
        return batch.sum((logits.argmax(-1) == batch.targets).double())


def token_metrics(config: Config) -> list[NamedLoss]:
    """Return the metrics of `evaluation.metrics` that are computed with the losses. Their names begin with a slash."""
    return [
        NamedLoss(
            TokenAccuracy(), "evaluation.metrics", metric.kind, metric.label.removeprefix("eval"), 0.0, "from_logits"
        )
        for metric in config.evaluation.metrics
        if not metric.is_of_answers
    ]


def add_up(totals: Sequence[StepTotals]) -> StepTotals:
    def together(name: str) -> Any:
        values = [getattr(each, name) for each in totals]
        if isinstance(values[0], dict):
            return {key: sum(value.get(key, 0) for value in values) for each in values for key in each}
        return sum(values)

    return StepTotals(**{field.name: together(field.name) for field in fields(StepTotals)})


def read_parts(reader: Reader, mesh: Mesh) -> dict[str, list[Pack]]:
    """Return this rank's packs of held-out data by source. `reader` reads the held-out sources."""
    return {name: read_held_out(own, mesh.rank, mesh.layout.world) for name, own in held_out_parts(reader).items()}


class Evaluator:
    """Computes losses on held-out packs and generates responses to held-out prompts, the same in every evaluation."""

    def __init__(
        self,
        objective: LanguageObjective,
        balancer: Balancer,
        packs: Mapping[str, list[Pack]],
        reader: Reader | None,
        folder: RunFolder,
    ) -> None:
        """Redistribute the held-out packs. Collective: all ranks must call it.

        Args:
            objective: The model and its losses.
            balancer: Assigns packs to ranks.
            packs: This rank's held-out packs by source, from `read_parts`.
            reader: Reads held-out rows; None if the run never evaluates.
            folder: The run folder, where generated media are written.

        Raises:
            UserError: If the held-out data has no targets.
        """
        self.objective, self.folder, self.config = objective, folder, objective.config
        self.sampler: Sampler | None = None
        # Short name of the source -> data; the name is empty if all sources are evaluated together.
        self.parts = {source: balancer(LoadedStep(loaded), micro_batch=1) for source, loaded in packs.items()}
        if reader is None:
            return
        self.totals = add_up([part.totals for part in self.parts.values()])
        if not self.totals.has_targets:
            paths = ", ".join(source.name for source in self.config.data.eval_sources)
            raise UserError(
                f"data.eval_sources ({paths}): {self.totals.packs} pack(s) of {self.totals.tokens} tokens hold nothing "
                "the model is to predict, so there is no held-out loss; give rows with an answer, or set "
                "evaluation.every: 0"
            )
        if self.config.evaluation.samples:
            self.sampler = Sampler(objective, reader)

    def run(self, step: int, recorder: Recorder) -> dict[str, float | None]:
        """Return held-out losses and metrics on responses, and record the responses. Collective.

        Args:
            step: The step after which the model is evaluated.
            recorder: Records responses and prints warnings.
        """
        metrics = self.losses()
        if self.sampler is None:
            return metrics
        with self.objective.phases("evaluation"):
            responses = self.sampler.take(step, self.folder)
        recorder.samples(responses.records)
        for failure in responses.failures:
            recorder.print(f"warning: step {step}: {failure}; this evaluation lacks the metric")
        return metrics | responses.metrics

    def metric_names(self) -> set[str]:
        """Return the names of all metrics that an evaluation returns."""
        names = {metric.label for metric in self.config.evaluation.metrics if metric.is_of_answers}
        for source, counts in self._loss_counts().items():
            names |= {_key(source), *(_key(source, term) for term, count in counts.items() if count)}
        return names

    def _loss_counts(self) -> dict[str, dict[str, float]]:
        """Return the loss counts by source; under an empty name, those of all sources together."""
        totals = {"": self.totals} | {source: part.totals for source, part in self.parts.items()}
        with self.objective.measuring(token_metrics(self.config)):
            return {source: self.objective.loss_counts(of_source) for source, of_source in totals.items()}

    @torch.no_grad()
    def losses(self) -> dict[str, float | None]:
        """Return `eval/loss` and `eval/loss/<term>`; with several sources also `eval/<source>/loss...`.

        Terms without held-out targets are left out. Collective: all ranks must call it.
        """
        objective, counts = self.objective, self._loss_counts()
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
        whole = {name: sum(total for (_, term), total in totals.items() if term == name) for name in counts[""]}
        metrics = _means("", whole, counts[""], weights)
        for source in self.parts if "" not in self.parts else ():
            own = {name: totals[source, name] for name in counts[source]}
            metrics |= _means(source, own, counts[source], weights)
        return metrics

    def describe(self) -> str:
        """Return a description of the held-out data and of the evaluation interval, for the start-up table."""
        config, evaluation = self.config, self.config.evaluation
        paths = "\n".join(source.name for source in config.data.eval_sources)
        if not config.data.eval_sources:
            return "none"
        if not evaluation.every:
            return f"not read, since evaluation.every is 0: {paths}"
        when = f"every {evaluation.every} steps"
        if evaluation.every > config.train.steps:
            when += f", which is never in a run of {config.train.steps}"
        packs = self.totals.packs
        few = "" if packs >= evaluation.packs else f" (all there is; evaluation.packs is {evaluation.packs})"
        prompts = f", {evaluation.samples} question(s)" if evaluation.samples else ""
        return f"{packs} pack(s){few}{prompts}, {when}: {paths}"


def _means(
    source: str, sums: Mapping[str, float], counts: Mapping[str, float], weights: Mapping[str, float]
) -> dict[str, float | None]:
    means = {name: total / counts[name] for name, total in sums.items() if counts[name]}
    loss = sum(weights.get(name, 0.0) * mean for name, mean in means.items())
    return {_key(source): loss, **{_key(source, name): mean for name, mean in means.items()}}


def _key(source: str, term: str = "") -> str:
    """Return the metric name of the loss, of a loss term, or of a token metric, whose name begins with a slash."""
    prefix = f"eval/{source}" if source else "eval"
    if term.startswith("/"):
        return prefix + term
    return f"{prefix}/loss/{term}" if term else f"{prefix}/loss"
