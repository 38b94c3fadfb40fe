"""Held-out loss: the same packs every time, summed over ranks, divided by the global count."""

from collections.abc import Sequence

import torch
from torch import nn

from omnizoo.data.loader import Batch
from omnizoo.parallel.mesh import Mesh
from omnizoo.training.losses import loss_terms


@torch.no_grad()
def evaluate(model: nn.Module, batches: Sequence[Batch], mesh: Mesh) -> dict[str, float]:
    """`eval/loss` and `eval/loss/<term>` over all ranks' batches; every rank must bring equally many."""
    model.eval()
    sums: dict[str, float] = {}
    count = 0
    for batch in batches:
        count += batch.targets
        for term in loss_terms(model, batch.to(mesh.device)):
            sums[term.name] = sums.get(term.name, 0.0) + float(term.sum)
    model.train()
    names = sorted(sums)
    *totals, targets = mesh.sum([*(sums[name] for name in names), float(count)])
    means = {name: total / max(1.0, targets) for name, total in zip(names, totals, strict=True)}
    return {"eval/loss": sum(means.values())} | {f"eval/loss/{name}": mean for name, mean in means.items()}
