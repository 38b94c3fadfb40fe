"""Count the FLOPs of training, from the weights that are multiplied by rows and from the token pairs of attention.

In the forward pass, each weight costs one multiplication and one addition per row. The backward pass costs as much for
the gradient of the weight, if it is trained, and as much again for the gradient of its input, if anything before it is
trained. Recomputation, norms, activations and softmax are not counted.
"""

from collections.abc import Callable, Iterator

import torch
from torch import nn

from omnizoo.ops.quantization import direct_weights

MULTIPLYING = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def weights_of(module: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Yield the name and value of each parameter, and whether rows are multiplied by it.

    Rows are not multiplied by embedding tables, norms, biases and learned rows.
    """
    for prefix, part in module.named_modules():
        for name, parameter in direct_weights(part):
            is_matrix = parameter.ndim > 1 and not name.endswith("bias") and not isinstance(part, nn.Embedding)
            is_multiplied = is_matrix and (isinstance(part, MULTIPLYING) or parameter.shape[0] > 1)
            full_name = f"{prefix}.{name}" if prefix else name
            yield full_name, parameter, is_multiplied


class FlopCounter:
    """Counts the FLOPs of a model. Its modules are added in the order in which the model runs them."""

    def __init__(self, trained: bool = False) -> None:
        self.flops = 0.0
        self.trained = trained  # whether a module counted so far is trained and therefore needs gradients

    def multiply(self, weight: torch.Tensor, rows: float) -> None:
        """Add the multiplication of `rows` rows by a weight."""
        self.flops += 2 * weight.numel() * rows * (1 + weight.requires_grad + self.trained)
        self.trained |= weight.requires_grad

    def add(self, forward: float) -> None:
        """Add multiplications of activations with each other. `forward` is the number of their forward FLOPs.

        The backward pass costs twice as many FLOPs.
        """
        self.flops += forward * (3 if self.trained else 1)

    def run(self, module: nn.Module, rows: float) -> None:
        """Add a module that uses each of its matrices once per row."""
        for _, parameter, is_multiplied in weights_of(module):
            if is_multiplied:
                self.multiply(parameter, rows)
            self.trained |= parameter.requires_grad

    def attend(self, pairs: float, width: float) -> None:
        """Add a score and a weighted value per (query, key) pair.

        Args:
            pairs: Number of (query, key) pairs.
            width: Number of heads x mean of the key and value widths.
        """
        self.add(4 * pairs * width)


def is_trained(module: nn.Module) -> bool:
    """Whether any parameter of the module requires gradients."""
    return any(parameter.requires_grad for parameter in module.parameters())


def measured_flops(run: Callable[[], torch.Tensor]) -> tuple[float, float]:
    """Return (forward FLOPs, forward and backward FLOPs) of `run`. torch counts them on the meta device."""
    from torch.utils.flop_counter import FlopCounterMode  # imported here, because this import is slow: it loads triton

    with FlopCounterMode(display=False) as counter:
        output = run()
        forward = float(counter.get_total_flops())
        if output.requires_grad:
            output.sum().backward()
        return forward, float(counter.get_total_flops())


def causal_pairs(length: int, window: int | None = None) -> int:
    """Return the number of (query, key) pairs of a sample in causal attention, with at most `window` keys per query."""
    max_keys = length if window is None else min(length, window)
    return max_keys * (max_keys + 1) // 2 + (length - max_keys) * max_keys
