"""FLOPs of training, counted by the weights that rows are multiplied with and the pairs that attend to each other.

A weight takes a multiply and an add per row forward. Backward takes the same again for the weight's own gradient, if it
is trained, and once more for the gradient of its input, if anything before it is trained. What is recomputed does not
count, nor do norms, activations and softmax.
"""

from collections.abc import Callable, Iterator

import torch
from torch import nn

from omnizoo.ops.quantised import own_weights

MULTIPLYING = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def weights_of(module: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Name, parameter, and whether rows are multiplied with it: tables, norms, biases and learned rows are not."""
    for prefix, part in module.named_modules():
        for name, parameter in own_weights(part):
            is_matrix = parameter.ndim > 1 and not name.endswith("bias") and not isinstance(part, nn.Embedding)
            is_multiplied = is_matrix and (isinstance(part, MULTIPLYING) or parameter.shape[0] > 1)
            yield f"{prefix}.{name}" if prefix else name, parameter, is_multiplied


class Tally:
    """Adds up the parts of a model in the order in which it runs them."""

    def __init__(self, trained: bool = False) -> None:
        self.flops = 0.0
        self.trained = trained  # anything so far, so that gradients flow on from here

    def multiply(self, weight: torch.Tensor, rows: float) -> None:
        self.flops += 2 * weight.numel() * rows * (1 + weight.requires_grad + self.trained)
        self.trained |= weight.requires_grad

    def add(self, forward: float) -> None:
        """Products of activations with each other, by their FLOPs forward; backward is twice that."""
        self.flops += forward * (3 if self.trained else 1)

    def run(self, module: nn.Module, rows: float) -> None:
        """A module all of whose matrices are used once per row."""
        for _, parameter, is_multiplied in weights_of(module):
            if is_multiplied:
                self.multiply(parameter, rows)
            self.trained |= parameter.requires_grad

    def attend(self, pairs: float, width: float) -> None:
        """A score and a weighted value per (query, key) pair; `width` is heads x the mean of their two widths."""
        self.add(4 * pairs * width)


def is_trained(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def measured_flops(run: Callable[[], torch.Tensor]) -> tuple[float, float]:
    """What torch counts in `run` on meta: forward, and forward and backward together."""
    from torch.utils.flop_counter import FlopCounterMode  # imports triton; needed for modules of one's own only

    with FlopCounterMode(display=False) as counter:
        out = run()
        forward = float(counter.get_total_flops())
        if out.requires_grad:
            out.sum().backward()
        return forward, float(counter.get_total_flops())


def causal_pairs(length: int, window: int | None = None) -> int:
    """(query, key) pairs of a sample: each token sees itself and those before it, `window` of them at most."""
    seen = length if window is None else min(length, window)
    return seen * (seen + 1) // 2 + (length - seen) * seen
