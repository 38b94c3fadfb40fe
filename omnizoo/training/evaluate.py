"""Held-out loss: the same packs every time, summed over ranks, divided by the global count."""

import torch

from omnizoo.config.errors import UserError
from omnizoo.config.schema import Config
from omnizoo.data.deal import Dealt
from omnizoo.ops.precision import exact
from omnizoo.training.losses import Objective


def check_held_out(objective: Objective, held_out: Dealt) -> None:
    """Held-out rows on which there is no loss cannot be evaluated on; the same on every rank."""
    totals = held_out.totals
    if not any(totals.targets.values()):
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
    return f"{packs} pack(s){few}, {when}: {paths}"


def metric_names(objective: Objective, held_out: Dealt) -> set[str]:
    """What `evaluate` will give."""
    return {"eval/loss"} | {f"eval/loss/{name}" for name, count in objective.counts(held_out.totals).items() if count}


@torch.no_grad()
def evaluate(objective: Objective, held_out: Dealt) -> dict[str, float]:
    """`eval/loss` and `eval/loss/<term>` over all ranks' batches. A term without held-out targets is not there."""
    model, mesh = objective.model, objective.mesh
    counts = objective.counts(held_out.totals)
    sums, weights = dict.fromkeys(counts, 0.0), dict.fromkeys(counts, 0.0)
    model.eval()
    objective.begin_step(held_out.batches, held_out.mismatched)
    for batch in held_out.batches:
        with exact(objective.config.parallel.precision):
            terms = objective.terms(batch)
        for term in terms:
            sums[term.name] += float(term.sum)
            weights[term.name] = term.weight
    model.train()
    objective.take_statistics()
    totals = mesh.sum(list(sums.values()))
    means = {name: total / counts[name] for name, total in zip(sums, totals, strict=True) if counts[name]}
    loss = sum(weights[name] * mean for name, mean in means.items())
    return {"eval/loss": loss} | {f"eval/loss/{name}": mean for name, mean in means.items()}
