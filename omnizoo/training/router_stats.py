"""Statistics on the expert load in a step, and load balancing by correction biases."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from omnizoo.models.interfaces.routers import RouterRecord, correction_bias
from omnizoo.ops.precision import at_least_fp32


class RouterStats:
    """Loads and probabilities of experts, summed on the device over the micro-batches since the last `reset`."""

    def __init__(self, routers: Mapping[str, nn.Module], bias_rate: float) -> None:
        """Create empty statistics.

        Args:
            routers: The routers of the model, keyed by layer.
            bias_rate: Amount by which `update_bias` changes a correction bias; 0 disables the update.
        """
        self._routers = routers
        self._bias_rate = bias_rate
        self._sums: dict[str, torch.Tensor] = {}  # layer -> [2, experts]: number of choices, sum of probabilities

    def reset(self) -> None:
        """Discard the sums of all micro-batches."""
        self._sums = {}

    @torch.no_grad()
    def add(self, records: Sequence[RouterRecord]) -> None:
        """Add the records of a micro-batch on this rank."""
        for record in records:
            probability = at_least_fp32(record.logits.detach()).softmax(1).sum(0, dtype=torch.float64)
            choices = record.index.flatten()
            ones = torch.ones_like(choices, dtype=torch.float64)
            load = torch.zeros_like(probability).scatter_add_(0, choices, ones)
            sums = torch.stack([load, probability])
            if record.layer in self._sums:
                sums = self._sums[record.layer] + sums
            self._sums[record.layer] = sums

    def local_sums(self) -> list[torch.Tensor]:
        """Return the sums of this rank, one flat tensor per layer, for an all-reduce."""
        return [sums.flatten() for sums in self._sums.values()]

    @torch.no_grad()
    def update_bias(self, total: torch.Tensor) -> None:
        """Balance the load without a loss term, by changing the correction biases of experts.

        The bias is lowered for experts whose load is greater than the mean, and raised for experts whose load is less.
        Routers without a correction bias are not changed.

        Args:
            total: The sums over all ranks, with layers concatenated. They are the same on all ranks, and so are the
                biases.
        """
        if not self._bias_rate:
            return
        for layer, sums in self.by_layer(total).items():
            bias = correction_bias(self._routers[layer])
            if bias is not None:
                load = sums[0]
                bias += self._bias_rate * torch.sign(load.mean() - load).to(bias)

    def metrics(self, total: Sequence[float]) -> dict[str, float]:
        """Return metrics of each layer, and their means over layers.

        `max_over_mean` is the load of the busiest expert relative to the mean. `entropy` is the entropy of the mean
        probabilities; its maximum is the logarithm of the number of experts.

        Args:
            total: The sums over all ranks, with layers concatenated.
        """
        metrics: dict[str, float] = {}
        values: dict[str, list[float]] = {"max_over_mean": [], "entropy": []}
        for layer, (load, probability) in self.by_layer(torch.tensor(total, dtype=torch.float64)).items():
            values["max_over_mean"].append(float(load.max() / load.mean()))
            values["entropy"].append(float(torch.special.entr(probability / probability.sum()).sum()))
            metrics |= {f"router/{layer}/{name}": by_layer[-1] for name, by_layer in values.items()}
        if metrics:
            metrics |= {f"router/{name}": math.fsum(by_layer) / len(by_layer) for name, by_layer in values.items()}
        return metrics

    def by_layer(self, total: torch.Tensor) -> dict[str, torch.Tensor]:
        """Split the sums over all ranks by layer: number of choices and sum of probabilities, `[2, experts]`."""
        if not self._sums:
            return {}
        parts = total.split([sums.numel() for sums in self._sums.values()])
        return {layer: part.view(2, -1) for layer, part in zip(self._sums, parts, strict=True)}
