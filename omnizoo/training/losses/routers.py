"""Losses on MoE routers. They do not depend on the layout or on the number of micro-batches.

The balance loss is a product of two means over tokens, so the set of tokens must be fixed: one pack. Its value for a
pack equals `load_balancing_loss_func` of transformers on the tokens of this pack, over all layers. The value for a step
is the mean over packs.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn

from omnizoo.balancing.step_plan import StepTotals
from omnizoo.config.schema import Config
from omnizoo.models.hf_private import routers
from omnizoo.models.interfaces.routers import RouterRecord
from omnizoo.ops.precision import at_least_fp32
from omnizoo.parallel.mesh import Mesh
from omnizoo.training.local_batch import LocalBatch
from omnizoo.training.losses.base import Loss


def balance_sum(
    records: Sequence[RouterRecord],
    pack_of_token: torch.Tensor,
    packs: int,
    sum_shares: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Return the balance loss, summed over packs.

    With sequence parallelism, each rank has a part of the tokens of a pack and returns a part of the sum. The ranks
    communicate only the loads, `[packs, experts]`.

    Args:
        records: Router outputs for this rank's tokens, one record per layer.
        pack_of_token: Number of the pack of each token, `[tokens]`, from 0 to `packs - 1`; -1 for dummy packs.
        packs: Number of packs in the micro-batch.
        sum_shares: All-reduce over the sequence-parallel group.
    """
    member = pack_of_token.unsqueeze(0) == torch.arange(packs, device=pack_of_token.device).unsqueeze(1)  # [P, T]
    choices = 0
    loads, probabilities = [], []
    for record in records:
        logits = at_least_fp32(record.logits)
        chosen = torch.zeros_like(logits).scatter_(1, record.index, 1.0)  # without a graph: counts have no gradient
        # Sums are matmuls: deterministic on every device, and exact for counts below 2^24.
        loads.append((member.to(logits.dtype) @ chosen).to(torch.int64))
        probabilities.append(member.to(logits.dtype) @ logits.softmax(1))
        choices = record.index.shape[1]
    load = sum_shares(torch.stack(loads).sum(0))  # [P, E]
    probability = torch.stack(probabilities).sum(0)
    tokens = load.sum(1, keepdim=True) / choices  # tokens of each pack times layers, over all ranks
    fraction, mean = load / tokens.clamp(min=1), probability / tokens.clamp(min=1)
    return (fraction.to(mean.dtype) * mean).sum() * load.shape[1]


def router_z_sum(records: Sequence[RouterRecord], pack_of_token: torch.Tensor) -> torch.Tensor:
    """Return the squared log-sum-exp of router logits, summed over tokens and layers. Dummy packs are excluded."""
    total = torch.zeros((), device=pack_of_token.device)
    for record in records:
        total = total + (at_least_fp32(record.logits).logsumexp(1).square() * (pack_of_token >= 0)).sum()
    return total


class Balance(Loss):
    """Load-balancing loss, which favors an even use of experts; a mean over packs."""

    def set_up(self, model: nn.Module, mesh: Mesh, config: Config) -> None:
        self.add_up = partial(mesh.sum_along, "sp")

    def count(self, totals: StepTotals) -> float:
        return totals.packs

    def from_routers(self, records: Sequence[RouterRecord], batch: LocalBatch) -> torch.Tensor:
        return balance_sum(records, batch.pack_of_token, batch.num_packs, self.add_up)


class RouterZ(Loss):
    """Router z-loss, which keeps router logits small; a mean over tokens and layers."""

    def set_up(self, model: nn.Module, mesh: Mesh, config: Config) -> None:
        self.layers = len(routers(model))

    def count(self, totals: StepTotals) -> float:
        return totals.tokens * self.layers

    def from_routers(self, records: Sequence[RouterRecord], batch: LocalBatch) -> torch.Tensor:
        return router_z_sum(records, batch.pack_of_token)
