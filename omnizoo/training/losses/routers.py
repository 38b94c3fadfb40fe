"""Losses on MoE routers. They do not depend on the layout or on the number of micro-batches.

The balance loss is a product of two means over tokens, so its value depends on the set of tokens. It is computed for
each pack. Its value for a pack equals `load_balancing_loss_func` of transformers on the tokens of this pack, over all
layers. The value for a step is the mean over packs.
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

    With sequence parallelism, each rank has some tokens of a pack and returns a part of the sum. The ranks
    communicate only the loads, `[packs, experts]`.

    Args:
        records: Router outputs for this rank's tokens, one record per layer.
        pack_of_token: Pack number of each token, `[tokens]`, from 0 to `packs - 1`; -1 for dummy packs.
        packs: Number of packs in the micro-batch.
        sum_shares: All-reduce over the sequence-parallel group.
    """
    pack_numbers = torch.arange(packs, device=pack_of_token.device)
    is_in_pack = pack_of_token.unsqueeze(0) == pack_numbers.unsqueeze(1)  # [packs, tokens]
    choices_per_token = 0
    loads = []
    probabilities = []
    for record in records:
        logits = at_least_fp32(record.logits)
        membership = is_in_pack.to(logits.dtype)
        # Counts have no gradient, so they are not part of the autograd graph.
        is_chosen = torch.zeros_like(logits).scatter_(1, record.index, 1.0)
        # Sums are computed as matmuls, which are deterministic on every device and exact for counts below 2^24.
        loads.append((membership @ is_chosen).to(torch.int64))
        probabilities.append(membership @ logits.softmax(1))
        choices_per_token = record.index.shape[1]

    load = sum_shares(torch.stack(loads).sum(0))  # [packs, experts]
    probability = torch.stack(probabilities).sum(0)
    # Tokens in each pack, times the number of layers, over all ranks.
    num_tokens = load.sum(1, keepdim=True) / choices_per_token
    load_share = load / num_tokens.clamp(min=1)
    mean_probability = probability / num_tokens.clamp(min=1)
    return (load_share.to(mean_probability.dtype) * mean_probability).sum() * load.shape[1]


def router_z_sum(records: Sequence[RouterRecord], pack_of_token: torch.Tensor) -> torch.Tensor:
    """Return the squared log-sum-exp of router logits, summed over tokens and layers. Dummy packs are excluded."""
    total = torch.zeros((), device=pack_of_token.device)
    is_counted = pack_of_token >= 0
    for record in records:
        squares = at_least_fp32(record.logits).logsumexp(1).square()
        total = total + (squares * is_counted).sum()
    return total


class Balance(Loss):
    """Load-balancing loss, averaged over packs. It encourages routers to use all experts equally."""

    def set_up(self, model: nn.Module, mesh: Mesh, config: Config) -> None:
        self.sum_over_sp = partial(mesh.sum_along, "sp")

    def count(self, totals: StepTotals) -> float:
        return totals.packs

    def from_routers(self, records: Sequence[RouterRecord], batch: LocalBatch) -> torch.Tensor:
        return balance_sum(records, batch.pack_of_token, batch.num_packs, self.sum_over_sp)


class RouterZ(Loss):
    """Router z-loss, averaged over tokens and layers. It keeps router logits small."""

    def set_up(self, model: nn.Module, mesh: Mesh, config: Config) -> None:
        self.num_layers = len(routers(model))

    def count(self, totals: StepTotals) -> float:
        return totals.tokens * self.num_layers

    def from_routers(self, records: Sequence[RouterRecord], batch: LocalBatch) -> torch.Tensor:
        return router_z_sum(records, batch.pack_of_token)
