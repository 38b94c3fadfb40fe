"""Held-out loss: the same packs every time, summed over ranks, divided by the global count."""

from collections.abc import Sequence

import torch

from omnizoo.data.loader import Batch
from omnizoo.ops.precision import exact
from omnizoo.training.losses import Objective


@torch.no_grad()
def evaluate(objective: Objective, batches: Sequence[Batch]) -> dict[str, float]:
    """`eval/loss` and `eval/loss/<term>` over all ranks' batches; every rank must bring equally many."""
    model, mesh = objective.model, objective.mesh
    counts = {name: count * (mesh.sp_rank == 0) for name, count in objective.counts(batches).items()}
    sums, weights = dict.fromkeys(counts, 0.0), dict.fromkeys(counts, 0.0)
    model.eval()
    for batch in batches:
        with exact(objective.config.parallel.precision):
            terms = objective.terms(batch)
        for term in terms:
            sums[term.name] += float(term.sum)
            weights[term.name] = term.weight
    model.train()
    objective.end_step(update=False)
    totals = mesh.sum([*sums.values(), *counts.values()])
    means = {name: totals[i] / max(1.0, totals[i + len(sums)]) for i, name in enumerate(sums)}
    loss = sum(weights[name] * mean for name, mean in means.items())
    return {"eval/loss": loss} | {f"eval/loss/{name}": mean for name, mean in means.items()}
