"""Held-out loss: the same packs every time, summed over ranks, divided by the global count."""

import torch

from omnizoo.data.deal import Dealt
from omnizoo.ops.precision import exact
from omnizoo.training.losses import Objective


@torch.no_grad()
def evaluate(objective: Objective, held_out: Dealt) -> dict[str, float]:
    """`eval/loss` and `eval/loss/<term>` over all ranks' batches."""
    model, mesh = objective.model, objective.mesh
    counts = objective.counts(held_out.totals)
    sums, weights = dict.fromkeys(counts, 0.0), dict.fromkeys(counts, 0.0)
    model.eval()
    for batch in held_out.batches:
        with exact(objective.config.parallel.precision):
            terms = objective.terms(batch)
        for term in terms:
            sums[term.name] += float(term.sum)
            weights[term.name] = term.weight
    model.train()
    objective.end_step(update=False)
    totals = mesh.sum(list(sums.values()))
    means = {name: total / max(1, counts[name]) for name, total in zip(sums, totals, strict=True)}
    loss = sum(weights[name] * mean for name, mean in means.items())
    return {"eval/loss": loss} | {f"eval/loss/{name}": mean for name, mean in means.items()}
