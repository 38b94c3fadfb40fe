"""One optimizer step: count, forward and backward per micro-batch, one gradient norm, clip, update.

The loss of the step is (sum over all targets of all ranks) / (count of them), counted before the first forward, so
neither the layout nor the number of micro-batches enters it.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from omnizoo.config.errors import UserError
from omnizoo.config.schema import Config
from omnizoo.data.loader import Batch, Loader
from omnizoo.ops.device import causal_pairs
from omnizoo.ops.precision import exact
from omnizoo.parallel.gradients import gradient_norm
from omnizoo.parallel.mesh import Mesh
from omnizoo.parallel.shard import set_gradient_sync
from omnizoo.training.losses import loss_terms
from omnizoo.training.schedule import learning_rate


@dataclass(frozen=True)
class StepData:
    """This rank's micro-batches, and what all ranks' micro-batches hold together."""

    micro_batches: Sequence[Batch]
    targets: int  # positions with a loss
    tokens: int
    pairs: int  # (query, key) pairs of causal attention, for FLOP counting
    imbalance: float  # most tokens on a rank / mean over ranks
    counters: dict[str, int]  # rows skipped, samples dropped or split, since the start of the run
    bad_rows: Sequence[str]  # this rank's, of this step


@dataclass(frozen=True)
class StepResult:
    loss: float
    terms: dict[str, float]  # each term's own mean, before its weight
    grad_norm: float
    lr: float
    finite: bool  # False: the update was skipped
    stop: bool  # some rank was asked to stop


def next_step(loader: Loader, mesh: Mesh) -> StepData:
    """The next step's data. Unusable data on one rank is the same UserError on all, so that none waits for another."""
    error, step = None, None
    try:
        step = loader.next_step()
    except UserError as caught:
        error = caught
    batches = step.micro_batches if step else []
    tokens = sum(batch.tokens for batch in batches)
    targets = sum(batch.targets for batch in batches)
    pairs = sum(causal_pairs(batch.cu_seqlens.diff().tolist()) for batch in batches)
    counters = loader.counters()
    loads = [0] * mesh.dp_size
    loads[mesh.dp_rank] = tokens
    failed, targets, tokens, pairs, *rest = map(
        int, mesh.sum([error is not None, targets, tokens, pairs, *counters.values(), *loads])
    )
    if failed:
        raise_everywhere(error, mesh)
    assert step is not None
    loads = rest[len(counters) :]
    return StepData(
        micro_batches=batches,
        targets=targets,
        tokens=tokens,
        pairs=pairs,
        imbalance=max(loads) * len(loads) / tokens,
        counters=dict(zip(counters, rest, strict=False)),
        bad_rows=step.bad_rows,
    )


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: StepData,
    step: int,
    mesh: Mesh,
    config: Config,
    stop: bool = False,
) -> StepResult:
    """Train on `data`. A non-finite loss or gradient leaves weights and optimizer untouched (`finite` is False)."""
    optimizer.zero_grad()
    sums: dict[str, torch.Tensor] = {}
    for i, batch in enumerate(data.micro_batches):
        last = i == len(data.micro_batches) - 1
        set_gradient_sync(model, last, config.parallel.reduce_each_micro_batch)
        # Dropout depends on the packs, not on the rank or on what ran before: nothing to save for an exact resume.
        torch.manual_seed(_dropout_seed(config.train.seed, step, batch.packs))
        with exact(config.parallel.precision):
            terms = loss_terms(model, batch.to(mesh.device))
            loss = torch.stack([term.weight * term.sum / max(1, data.targets) for term in terms]).sum()
            loss.backward()
        for term in terms:
            sums[term.name] = sums.get(term.name, 0) + term.sum.detach()

    norm = gradient_norm(model.parameters())
    names = sorted(sums)
    *totals, stopping = mesh.sum([*(float(sums[name]) for name in names), float(stop)])
    means = {name: total / max(1, data.targets) for name, total in zip(names, totals, strict=True)}
    loss_value, grad_norm = sum(means.values()), float(norm)
    finite = math.isfinite(loss_value) and math.isfinite(grad_norm)
    lr = learning_rate(config.train, step)
    if finite:
        if config.train.grad_clip:
            torch.nn.utils.clip_grads_with_norm_(model.parameters(), config.train.grad_clip, norm)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
    return StepResult(loss_value, means, grad_norm, lr, finite, stop=stopping > 0)


def raise_everywhere(error: UserError | None, mesh: Mesh) -> None:
    """Raise the first rank's error on every rank."""
    messages = [message for message in mesh.gather(str(error) if error else None) if message]
    raise UserError(mesh.from_first(messages[0] if messages else None))


def _dropout_seed(seed: int, step: int, packs: Sequence[int]) -> int:
    digest = hashlib.blake2b(f"{seed}/{step}/{list(packs)}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
