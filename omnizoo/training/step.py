"""One optimizer step: count, forward and backward per micro-batch, one gradient norm, clip, update.

The loss of the step is (sum over all targets of all ranks) / (count of them), counted before the first forward, so
neither the layout nor the number of micro-batches enters it.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from omnizoo.config.errors import UserError
from omnizoo.data.deal import Batch, Dealt
from omnizoo.data.flat_pack import FlatPack
from omnizoo.data.loader import Loader
from omnizoo.data.plan import Totals
from omnizoo.ops.device import Reading, is_host
from omnizoo.ops.precision import exact
from omnizoo.parallel.agree import raise_first
from omnizoo.parallel.exchange import ProcessGroup
from omnizoo.parallel.gradients import clip_gradients, excess_of, squared_norm, sum_of_whole
from omnizoo.parallel.shard import set_gradient_sync
from omnizoo.training.losses import Objective
from omnizoo.training.optimizer import set_learning_rate, state_on_host, step_unless, update_average
from omnizoo.training.schedule import learning_rate


@dataclass(frozen=True)
class StepData:
    """This rank's micro-batches, and what all ranks' micro-batches hold together."""

    micro_batches: Sequence[Batch]
    totals: Totals
    counts: dict[str, float]  # of each loss term
    imbalance: dict[str, float]  # busiest rank / mean over ranks: of tokens, and of each encoder and decoder
    counters: dict[str, int]  # rows skipped, samples dropped or split, since the start of the run
    bad_rows: Sequence[str]  # of this step, on all ranks
    mismatched: Dealt | None = None  # answers to other prompts, which are only looked at

    @property
    def tokens(self) -> int:
        return self.totals.tokens


@dataclass(frozen=True)
class StepResult:
    loss: float
    terms: dict[str, float]  # each term's own mean, before its weight; only of terms with targets in this step
    grad_norm: float
    lr: float
    finite: bool  # False: the update was skipped
    stop: bool  # some rank was asked to stop
    routers: dict[str, float]  # load and entropy of the routers; empty for dense models

    def metrics(self) -> dict[str, float]:
        """By the names that they are logged under."""
        terms = {f"loss/{name}": mean for name, mean in self.terms.items()}
        return {"loss": self.loss, **terms, "grad_norm": self.grad_norm, "lr": self.lr, **self.routers}


@dataclass(frozen=True)
class StepRead:
    """What this rank has read for a step: packs, or why there are none."""

    packs: Sequence[FlatPack]
    note: dict[str, Any]  # told to all ranks: error, counters, bad rows


def next_step(loader: Loader, objective: Objective) -> StepData:
    """The next step's data. Unusable data on one rank is the same UserError on all, so that none waits for another."""
    return deal_step(read_step(loader), objective)


def read_step(loader: Loader) -> StepRead:
    error, step = None, None
    try:
        step = loader.next_step()
    except UserError as caught:
        error = str(caught)
    note = {"error": error, "counters": loader.counters(), "bad_rows": step.bad_rows if step else []}
    return StepRead(step.packs if step else [], note)


def deal_step(read: StepRead, objective: Objective, group: ProcessGroup | None = None) -> StepData:
    """What all ranks have read becomes what each trains on; all must call. `group`: of the thread that calls."""
    note = read.note
    dealt = objective.deal(read.packs, objective.config.train.micro_batch, note, group)
    raise_first(told["error"] for told in dealt.notes)
    return StepData(
        micro_batches=dealt.batches,
        totals=dealt.totals,
        counts=objective.counts(dealt.totals),
        imbalance=dealt.imbalance,
        counters={name: sum(told["counters"][name] for told in dealt.notes) for name in note["counters"]},
        bad_rows=[message for told in dealt.notes for message in told["bad_rows"]],
        mismatched=dealt.mismatched,
    )


def train_step(
    objective: Objective, optimizer: torch.optim.Optimizer, data: StepData, step: int, stop: bool = False
) -> StepResult:
    """Train on `data`. A non-finite loss or gradient leaves weights and optimizer untouched (`finite` is False)."""
    model, mesh, config = objective.model, objective.mesh, objective.config
    asked = config.parallel.reduce_each_micro_batch
    reduce_each = not is_host(mesh.device) if asked is None else asked  # whole gradients would not fit in its memory
    with objective.mark("optimizer"):
        optimizer.zero_grad()
    sums: dict[str, torch.Tensor] = {}
    weights: dict[str, float] = {}
    with state_on_host(optimizer, objective.state_away):
        with objective.mark("forward"):  # losses may run models over all of the step's micro-batches
            objective.begin_step(data.micro_batches, data.mismatched)
        for i, batch in enumerate(data.micro_batches):
            last = i == len(data.micro_batches) - 1
            set_gradient_sync(model, last, reduce_each)
            # Dropout depends on the packs, not on what ran before: nothing to save for an exact resume.
            torch.manual_seed(_dropout_seed(config.train.seed, step, batch.packs, mesh.sp_rank))
            with exact(config.parallel.precision):
                terms = objective.terms(batch)
                with objective.mark("forward"):
                    loss = torch.stack([term.weight * term.sum / (data.counts[term.name] or 1) for term in terms]).sum()
                with objective.mark("backward"):
                    loss.backward()
            for term in terms:
                sums[term.name] = sums.get(term.name, 0) + term.sum.detach()
                weights[term.name] = term.weight

    with objective.mark("optimizer"):
        sum_of_whole(model.parameters())
        # Of all ranks at once, and on the device: squared norm, sums of losses, whether to stop, what routers chose.
        square, routed = squared_norm(model.parameters(), mesh.device), objective.take_statistics()
        numbers = torch.stack([square, *(value.to(square.dtype) for value in sums.values())])
        flag = torch.full((1,), float(stop), dtype=square.dtype, device=square.device)
        total = mesh.total(torch.cat([numbers, flag, *(part.to(square.dtype) for part in routed.sums())]))
        must, seen = len(numbers), Reading(total)
        lr = learning_rate(config.train, step)
        set_learning_rate(optimizer, lr)
        norm, limit = total[0].sqrt(), config.train.grad_clip
        is_updated = step_unless(optimizer, ~total[:must].isfinite().all(), excess_of(norm, limit) if limit else None)
        if limit and not is_updated:
            clip_gradients(model.parameters(), limit, norm)

        values = seen.values()
        finite = all(map(math.isfinite, values[:must]))
        if finite:
            if not is_updated:
                optimizer.step()
            update_average(optimizer, config.optimizer.ema, step)
            objective.balance(routed.loads(total[must + 1 :]))
    # A sum over no target is 0 times the outputs: nothing, or the NaN of a broken model, which must be seen.
    means = {name: value / (data.counts[name] or 1) for name, value in zip(sums, values[1:must], strict=True)}
    return StepResult(
        loss=sum(weights[name] * mean for name, mean in means.items()),
        terms={name: mean for name, mean in means.items() if data.counts[name]},
        grad_norm=math.sqrt(values[0]) if values[0] >= 0 else math.nan,
        lr=lr,
        finite=finite,
        stop=values[must] > 0,
        routers=routed.metrics(values[must + 1 :]),
    )


def _dropout_seed(seed: int, step: int, packs: Sequence[int], sp_rank: int) -> int:
    digest = hashlib.blake2b(f"{seed}/{step}/{list(packs)}/{sp_rank}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
