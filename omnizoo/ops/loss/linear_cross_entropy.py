"""Fused output head and cross entropy, with only one chunk of logits in memory at a time.

The logits of a long pack over a large vocabulary are by far its largest tensor, and plain cross entropy keeps four such
tensors: the logits in the dtype of the head, the logits in fp32, their log-softmax and their gradient. Here the head is
applied to one chunk of rows at a time, and the forward pass computes the gradients of each chunk at once.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from omnizoo.ops.device import is_host

CHUNK = 2**27  # logits per chunk, 512 MiB in fp32; each chunk reads and writes the gradient of the weight once
CHUNK_ON_HOST = 2**23  # logits per chunk on CPUs, where matmuls of fewer rows are as fast
IN_CACHE = 2**18  # logits that stay in the cache of a CPU between elementwise operations


def most_logits(device: torch.device) -> int:
    """Return the maximum number of logits of a chunk on `device`."""
    return CHUNK_ON_HOST if is_host(device) else CHUNK


@dataclass(frozen=True)
class LinearHead:
    """An output head with logits `cap(scale * (weight @ hidden + bias))`.

    The soft cap is `cap(x) = softcap * tanh(x / softcap)`.
    """

    weight: torch.Tensor  # [vocabulary, width]
    bias: torch.Tensor | None = None  # [vocabulary]
    scale: float = 1.0
    softcap: float | None = None  # None for no cap


def linear_cross_entropy_sum(
    hidden: torch.Tensor,
    head: LinearHead,
    targets: torch.Tensor,
    weights: torch.Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    chunk: int | None = None,
) -> torch.Tensor:
    """Return the sum over rows of weight x (cross entropy + z_loss x log-sum-exp squared).

    The matmul of the head is in the dtype of `hidden`; everything after it, and sums over chunks, are in fp32 or
    better. Backward can run only once.

    Args:
        hidden: `[rows, width]`, hidden states before the head.
        head: The output head.
        targets: `[rows]`, token ids.
        weights: `[rows]`, factors of the rows.
        label_smoothing: Label smoothing, as in `torch.nn.functional.cross_entropy`.
        z_loss: Factor of the squared log-sum-exp of the logits.
        chunk: Maximum number of logits in memory; None for the default of the device.

    Returns:
        A scalar; without rows it is 0, with gradients of zeros.
    """
    rows = max(1, (chunk or most_logits(hidden.device)) // len(head.weight))
    settings = (label_smoothing, z_loss, head.scale, head.softcap, rows)
    out: torch.Tensor = _LinearCrossEntropy.apply(hidden, head.weight, head.bias, targets, weights, settings)  # type: ignore[no-untyped-call]
    return out


class _LinearCrossEntropy(torch.autograd.Function):
    """Computes loss and gradients in forward. Backward only scales the gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        weights: torch.Tensor | None,
        settings: tuple[float, float, float, float | None, int],
    ) -> torch.Tensor:
        smoothing, z_loss, scale, softcap, rows = settings
        wide = torch.promote_types(hidden.dtype, torch.float32)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        ctx.dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        total = torch.zeros((), dtype=wide, device=hidden.device)
        to_hidden = torch.empty_like(hidden) if needs_hidden else None
        to_weight = torch.zeros_like(weight, dtype=wide) if needs_weight else None
        to_bias = torch.zeros_like(bias, dtype=wide) if needs_bias and bias is not None else None
        for first in range(0, len(hidden), rows):
            part = slice(first, first + rows)
            some = hidden[part]
            # The logits in the dtype of the head get no name, nor do views of `grad`: a name would keep them in memory.
            grad = (torch.addmm(bias, some, weight.t()) if bias is not None else some @ weight.t()).to(wide)
            wanted, each = targets[part], None if weights is None else weights[part].to(wide)
            few = max(1, IN_CACHE // grad.shape[1]) if is_host(grad.device) else len(grad)
            for rest in range(0, len(grad), few):
                of = slice(rest, rest + few)
                total += _loss_and_gradient(
                    grad[of], wanted[of], None if each is None else each[of], smoothing, z_loss, scale, softcap
                )
            if to_bias is not None:
                to_bias += grad.sum(0)
            grad = grad.to(hidden.dtype)
            if to_hidden is not None:
                torch.mm(grad, weight, out=to_hidden[part])
            if to_weight is not None:
                if to_weight.dtype == grad.dtype:
                    to_weight.addmm_(grad.t(), some)
                else:
                    to_weight += grad.t() @ some
            del grad  # freed before the next chunk is allocated
        ctx.gradients = (to_hidden, to_weight, to_bias)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        assert ctx.gradients is not None, (
            "linear_cross_entropy_sum goes through backward once: its gradients are used up"
        )
        gradients, ctx.gradients = ctx.gradients, None
        scaled = [
            None if each is None else each.mul_(grad.to(each.dtype)).to(dtype)
            for each, dtype in zip(gradients, ctx.dtypes, strict=True)
        ]
        return *scaled, None, None, None


def _loss_and_gradient(
    logits: torch.Tensor,
    targets: torch.Tensor,
    weights: torch.Tensor | None,
    label_smoothing: float,
    z_loss: float,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """Return the loss summed over rows, and overwrite `logits [rows, vocabulary]` with its gradient.

    `logits` are the output of the head before scale and softcap.
    """
    if scale != 1.0:
        logits = logits.mul_(scale)
    slope = None
    if softcap is not None:
        logits = logits.div_(softcap).tanh_()
        slope = 1 - logits.square()
        logits = logits.mul_(softcap)
    index = targets[:, None]
    wanted = logits.gather(1, index)[:, 0]
    mean = logits.mean(1) if label_smoothing else 0.0
    top = logits.amax(1, keepdim=True)
    grad = logits.sub_(top).exp_()
    mass = grad.sum(1, keepdim=True)
    lse = (mass.log() + top)[:, 0]
    loss = lse - (1 - label_smoothing) * wanted - label_smoothing * mean + z_loss * lse.square()
    grad = grad.mul_((1 + 2 * z_loss * lse)[:, None] / mass)
    grad = grad.scatter_add_(1, index, torch.full_like(index, -(1 - label_smoothing), dtype=grad.dtype))
    if label_smoothing:
        grad = grad.sub_(label_smoothing / grad.shape[1])
    if weights is not None:
        loss, grad = loss * weights, grad.mul_(weights[:, None])
    if slope is not None:
        grad = grad.mul_(slope)
    if scale != 1.0:
        grad.mul_(scale)
    return loss.sum()
