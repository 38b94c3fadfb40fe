"""Router losses and statistics that are the same for any layout and any number of micro-batches.

The balance loss is a product of two means over tokens, so what it is a mean over must be fixed: one pack. Its value is
Hugging Face's `load_balancing_loss_func` on the tokens of one pack, all layers together; the step's is the mean over
packs.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from omnizoo.models.routing import RouterRecord, correction_bias


def balance_sum(
    records: Sequence[RouterRecord],
    pack_of_token: torch.Tensor,
    packs: int,
    sum_shares: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """The balance loss, summed over packs.

    `pack_of_token [T]` is 0 to `packs` - 1 for this rank's tokens. Where ranks share packs, each has a part of the
    tokens, and returns a part of the sum; all they exchange is `packs` x experts counts, which `sum_shares` adds up.
    """
    member = pack_of_token.unsqueeze(0) == torch.arange(packs, device=pack_of_token.device).unsqueeze(1)  # [P, T]
    choices = 0
    loads, probabilities = [], []
    for record in records:
        logits = _at_least_fp32(record.logits)
        chosen = torch.zeros_like(logits).scatter_(1, record.index, 1.0)  # zeros_like carries no graph
        # Sums as matmuls: deterministic on every device, and exact for counts (below 2^24 tokens).
        loads.append((member.to(logits.dtype) @ chosen).to(torch.int64))
        probabilities.append(member.to(logits.dtype) @ logits.softmax(1))
        choices = record.index.shape[1]
    load = sum_shares(torch.stack(loads).sum(0))  # [P, E]
    probability = torch.stack(probabilities).sum(0)
    tokens = load.sum(1, keepdim=True) / choices  # of each pack, over all ranks and layers
    fraction, mean = load / tokens.clamp(min=1), probability / tokens.clamp(min=1)
    return (fraction.to(mean.dtype) * mean).sum() * load.shape[1]


def router_z_sum(records: Sequence[RouterRecord], pack_of_token: torch.Tensor) -> torch.Tensor:
    """The squared log-sum-exp of router logits, summed over tokens and layers; fillers count nowhere."""
    total = torch.zeros((), device=pack_of_token.device)
    for record in records:
        total = total + (_at_least_fp32(record.logits).logsumexp(1).square() * (pack_of_token >= 0)).sum()
    return total


class RouterStatistics:
    """How evenly the routers used their experts in one step. Make one per step; nothing here waits for the device."""

    def __init__(self) -> None:
        self._sums: dict[str, torch.Tensor] = {}  # layer -> [2, E]: times chosen, probability

    @torch.no_grad()
    def add(self, records: Sequence[RouterRecord]) -> None:
        for record in records:
            probability = _at_least_fp32(record.logits.detach()).softmax(1).sum(0, dtype=torch.float64)
            chosen = record.index.flatten()
            load = torch.zeros_like(probability).scatter_add_(0, chosen, torch.ones_like(chosen, dtype=torch.float64))
            sums = torch.stack([load, probability])
            self._sums[record.layer] = self._sums[record.layer] + sums if record.layer in self._sums else sums

    def sums(self) -> list[torch.Tensor]:
        """This rank's, layer by layer, flat: to be summed over ranks."""
        return [sums.flatten() for sums in self._sums.values()]

    def loads(self, total: torch.Tensor) -> dict[str, torch.Tensor]:
        """By layer, how often each expert was chosen; `total` are the sums of all ranks, end to end."""
        parts = total.split([sums.numel() for sums in self._sums.values()]) if self._sums else ()
        return {layer: part.view(2, -1)[0] for layer, part in zip(self._sums, parts, strict=True)}

    def metrics(self, total: Sequence[float]) -> dict[str, float]:
        """Per layer and as means over layers: the most used expert against the mean, and the entropy of the mean
        probabilities (log of the number of experts at best)."""
        if not self._sums:
            return {}
        every: dict[str, list[float]] = {"max_over_mean": [], "entropy": []}
        named: dict[str, float] = {}
        sizes = [sums.numel() for sums in self._sums.values()]
        for layer, sums in zip(self._sums, torch.tensor(total, dtype=torch.float64).split(sizes), strict=True):
            load, probability = sums.view(2, -1)
            every["max_over_mean"].append(float(load.max() / load.mean()))
            every["entropy"].append(float(torch.special.entr(probability / probability.sum()).sum()))
            named |= {f"router/{layer}/{metric}": values[-1] for metric, values in every.items()}
        return named | {f"router/{metric}": math.fsum(v) / len(v) for metric, v in every.items()}


@torch.no_grad()
def update_bias(routers: Mapping[str, nn.Module], loads: Mapping[str, torch.Tensor], rate: float) -> None:
    """Balance without a loss: after a step, experts chosen more often than the mean become a little less attractive.

    `loads` are global, so all ranks stay equal. Routers without a correction bias are left as they are.
    """
    for layer, load in loads.items():
        bias = correction_bias(routers[layer])
        if bias is not None:
            bias += rate * torch.sign(load.mean() - load).to(bias)


def _at_least_fp32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
