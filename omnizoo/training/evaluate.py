"""Held-out losses: the same packs every time, summed over ranks, divided by the global count; of all sources together
and of each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from omnizoo.config.errors import UserError
from omnizoo.config.schema import Config
from omnizoo.data.deal import Dealt
from omnizoo.data.flat_pack import FlatPack
from omnizoo.data.held_out import held_out_parts, read_held_out
from omnizoo.data.plan import Totals
from omnizoo.data.reader import Reader
from omnizoo.ops.precision import exact
from omnizoo.parallel.mesh import Mesh
from omnizoo.training.forward import Local
from omnizoo.training.loss_contract import Loss, NamedLoss
from omnizoo.training.losses import Objective

ACCURACY = "/accuracy"  # among the names of terms, none of which has a slash in front


@dataclass(frozen=True)
class HeldOut:
    """The packs of an evaluation on this rank, by the short name of their source; empty: of all of them."""

    parts: Mapping[str, Dealt]

    @property
    def totals(self) -> Totals:
        return add_up([part.totals for part in self.parts.values()])

    @property
    def packs(self) -> int:
        return sum(part.totals.packs for part in self.parts.values())


class TokenAccuracy(Loss):
    """How often the likeliest next token of the text is the right one; a mean over targets, by their weights."""

    def of_logits(self, logits: torch.Tensor, batch: Local) -> torch.Tensor:
        return batch.sum((logits.argmax(-1) == batch.targets).double())


def measures(config: Config) -> list[NamedLoss]:
    """Of `evaluation.metrics`, those that are taken with the losses."""
    if not any(metric.kind == "accuracy" for metric in config.evaluation.metrics):
        return []
    return [NamedLoss(TokenAccuracy(), "evaluation.metrics", "accuracy", ACCURACY, 0.0, "of_logits")]


def add_up(totals: Sequence[Totals]) -> Totals:
    def together(name: str) -> Any:
        values = [getattr(each, name) for each in totals]
        if isinstance(values[0], dict):
            return {key: sum(value.get(key, 0) for value in values) for each in values for key in each}
        return sum(values)

    return Totals(**{field.name: together(field.name) for field in fields(Totals)})


def read_parts(reader: Reader, mesh: Mesh) -> dict[str, list[FlatPack]]:
    """This rank's packs of the held-out data that `reader` is of, by source."""
    return {name: read_held_out(own, mesh.rank, mesh.layout.world) for name, own in held_out_parts(reader).items()}


def deal_held_out(objective: Objective, packs: Mapping[str, Sequence[FlatPack]]) -> HeldOut:
    """Deal out what all ranks have read, source by source; every rank must call."""
    return HeldOut({name: objective.deal(own, 1) for name, own in packs.items()})


def check_held_out(objective: Objective, held_out: HeldOut) -> None:
    """Held-out rows on which there is no loss cannot be evaluated on; the same on every rank."""
    totals = held_out.totals
    if not totals.is_learnt:
        paths = ", ".join(source.name for source in objective.config.data.eval_sources)
        raise UserError(
            f"data.eval_sources ({paths}): {totals.packs} pack(s) of {totals.tokens} tokens hold nothing the model is "
            "to predict, so there is no held-out loss; give rows with an answer, or set train.eval_every: 0"
        )


def describe_held_out(config: Config, packs: int) -> str:
    """For the start-up table: what is evaluated on and when; or why it never is."""
    train, paths = config.train, "\n".join(source.name for source in config.data.eval_sources)
    if not config.data.eval_sources:
        return "none"
    if not train.eval_every:
        return f"not read, since train.eval_every is 0: {paths}"
    when = f"every {train.eval_every} steps"
    if train.eval_every > train.steps:
        when += f", which is never in a run of {train.steps}"
    few = "" if packs >= train.eval_packs else f" (all there is; train.eval_packs is {train.eval_packs})"
    asked = f", {config.evaluation.samples} question(s)" if config.evaluation.samples else ""
    return f"{packs} pack(s){few}{asked}, {when}: {paths}"


def metric_names(objective: Objective, held_out: HeldOut) -> set[str]:
    """What evaluations will give."""
    config, names = objective.config, set()
    with objective.measuring(measures(config)):
        for source, totals in {"": held_out.totals, **{n: p.totals for n, p in held_out.parts.items()}}.items():
            terms = [name for name, count in objective.counts(totals).items() if count]
            names |= {_key(source, None), *(_key(source, name) for name in terms)}
    names |= {metric.label for metric in config.evaluation.metrics if metric.is_of_answers}
    return {_label(config, name) for name in names}


@torch.no_grad()
def evaluate(objective: Objective, held_out: HeldOut) -> dict[str, float]:
    """`eval/loss` and `eval/loss/<term>` over all ranks' batches, and of several sources `eval/<source>/loss...`. A
    term without held-out targets is not there."""
    model, mesh, config = objective.model, objective.mesh, objective.config
    sums: dict[tuple[str, str], float] = {}  # by source and term
    counts: dict[str, dict[str, float]] = {}
    weights: dict[str, float] = {}
    model.eval()
    with objective.mark("evaluation"), objective.measuring(measures(config)):
        counts[""] = objective.counts(held_out.totals)
        for source, part in held_out.parts.items():
            counts[source] = objective.counts(part.totals)
            sums |= {(source, name): 0.0 for name in counts[source]}
            objective.begin_step(part.batches, part.mismatched)
            for batch in part.batches:
                with exact(config.parallel.precision):
                    terms = objective.terms(batch)
                for term in terms:
                    sums[source, term.name] += float(term.sum)
                    weights[term.name] = term.weight
    model.train()
    objective.take_statistics()
    totals = dict(zip(sums, mesh.sum(list(sums.values())), strict=True))
    whole = {name: sum(total for (_, term), total in totals.items() if term == name) for name in counts[""]}
    found = _means("", whole, counts[""], weights)
    for source in held_out.parts if "" not in held_out.parts else ():
        own = {name: totals[source, name] for name in counts[source]}
        found |= _means(source, own, counts[source], weights)
    return {_label(config, name): value for name, value in found.items()}


def _means(
    source: str, sums: Mapping[str, float], counts: Mapping[str, float], weights: Mapping[str, float]
) -> dict[str, float]:
    means = {name: total / counts[name] for name, total in sums.items() if counts[name]}
    loss = sum(weights.get(name, 0.0) * mean for name, mean in means.items())
    return {_key(source, None): loss} | {_key(source, name): mean for name, mean in means.items()}


def _key(source: str, term: str | None) -> str:
    prefix = f"eval/{source}" if source else "eval"
    if term == ACCURACY:
        return prefix + ACCURACY
    return f"{prefix}/loss" if term is None else f"{prefix}/loss/{term}"


def _label(config: Config, name: str) -> str:
    """The accuracy by the name that the config gives it."""
    own = next((metric.label for metric in config.evaluation.metrics if metric.kind == "accuracy"), "")
    return name.removesuffix(ACCURACY) + own.removeprefix("eval") if own and name.endswith(ACCURACY) else name
