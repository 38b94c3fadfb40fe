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
from omnizoo.ops.precision import at_least_fp32

CHUNK = 2**27  # logits per chunk, 512 MiB in fp32. Each chunk reads and writes the gradient of the weight once.
CHUNK_ON_HOST = 2**23  # logits per chunk on CPUs, where matmuls of fewer rows are as fast
IN_CACHE = 2**18  # logits that stay in the cache of a CPU between elementwise operations


def max_logits(device: torch.device) -> int:
    """Return the maximum number of logits in a chunk on `device`."""
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
    row_losses: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the sum over rows of weight x (cross entropy + z_loss x log-sum-exp squared).

    The matmul of the head is computed in the dtype of `hidden`. All later operations, including sums over chunks, are
    computed in fp32 or better. Backward can run only once.

    Args:
        hidden: `[rows, width]`, hidden states before the head.
        head: The output head.
        targets: `[rows]`, token ids.
        weights: `[rows]`, factors of the rows.
        label_smoothing: Label smoothing, as in `torch.nn.functional.cross_entropy`.
        z_loss: Factor of the z-loss, the squared log-sum-exp of the logits.
        chunk: Maximum number of logits in memory; None for the default of the device.
        row_losses: `[rows]`, overwritten with the summands, without gradient.

    Returns:
        A scalar. Without rows, it is 0 and its gradients are zeros.
    """
    rows = max(1, (chunk or max_logits(hidden.device)) // len(head.weight))
    settings = _Settings(
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        scale=head.scale,
        softcap=head.softcap,
        chunk_rows=rows,
        row_losses=row_losses,
    )
    out: torch.Tensor = _LinearCrossEntropy.apply(hidden, head.weight, head.bias, targets, weights, settings)  # type: ignore[no-untyped-call]
    return out


def linear_cross_entropy(
    hidden: torch.Tensor, head: LinearHead, targets: torch.Tensor, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the loss of each row, `[rows]`, computed like `linear_cross_entropy_sum`.

    Only the sum over rows has a gradient that is correct: backward needs the same gradient for all rows.
    """
    row_losses = at_least_fp32(hidden.new_empty(len(hidden)))
    total = linear_cross_entropy_sum(hidden, head, targets, weights, row_losses=row_losses)
    return row_losses + (total - total.detach()) / max(1, len(row_losses))


@dataclass(frozen=True)
class _Settings:
    """Arguments of the loss that have no gradient."""

    label_smoothing: float
    z_loss: float
    scale: float  # factor of the logits
    softcap: float | None
    chunk_rows: int  # number of rows whose logits are in memory at the same time
    row_losses: torch.Tensor | None  # [rows], output: the loss of each row


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
        settings: _Settings,
    ) -> torch.Tensor:
        wide_dtype = torch.promote_types(hidden.dtype, torch.float32)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        ctx.dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        total = torch.zeros((), dtype=wide_dtype, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=wide_dtype) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=wide_dtype) if needs_bias and bias is not None else None

        for first in range(0, len(hidden), settings.chunk_rows):
            chunk = slice(first, first + settings.chunk_rows)
            chunk_hidden = hidden[chunk]
            # Do not assign the logits in the dtype of the head, or views of `grad`, to a name, because the name would
            # keep them in memory.
            grad = _head_output(chunk_hidden, weight, bias).to(wide_dtype)
            chunk_weights = None if weights is None else weights[chunk].to(wide_dtype)
            row_losses = None if settings.row_losses is None else settings.row_losses[chunk]
            _add_chunk_loss(total, row_losses, grad, targets[chunk], chunk_weights, settings)

            if grad_bias is not None:
                grad_bias += grad.sum(0)
            grad = grad.to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(grad, weight, out=grad_hidden[chunk])
            if grad_weight is not None:
                if grad_weight.dtype == grad.dtype:
                    grad_weight.addmm_(grad.t(), chunk_hidden)
                else:
                    grad_weight += grad.t() @ chunk_hidden
            del grad  # freed before the next chunk is allocated
        ctx.gradients = (grad_hidden, grad_weight, grad_bias)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        assert ctx.gradients is not None, "backward of linear_cross_entropy_sum can run only once"
        gradients = ctx.gradients
        ctx.gradients = None
        scaled = []
        for gradient, dtype in zip(gradients, ctx.dtypes, strict=True):
            scaled.append(None if gradient is None else gradient.mul_(grad.to(gradient.dtype)).to(dtype))
        return *scaled, None, None, None


def _head_output(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return the output of the head before scale and softcap, `[rows, vocabulary]`."""
    if bias is None:
        return hidden @ weight.t()
    return torch.addmm(bias, hidden, weight.t())


def _add_chunk_loss(
    total: torch.Tensor,
    row_losses: torch.Tensor | None,
    logits: torch.Tensor,
    targets: torch.Tensor,
    weights: torch.Tensor | None,
    settings: _Settings,
) -> None:
    """Add the loss of a chunk to `total`, write the losses of its rows, and overwrite `logits` with its gradient.

    On CPUs a few rows are processed at a time, so that they stay in the cache.
    """
    rows = max(1, IN_CACHE // logits.shape[1]) if is_host(logits.device) else len(logits)
    for first in range(0, len(logits), rows):
        part = slice(first, first + rows)
        part_weights = None if weights is None else weights[part]
        losses = _losses_and_gradient(logits[part], targets[part], part_weights, settings)
        total += losses.sum()
        if row_losses is not None:
            row_losses[part] = losses


def _losses_and_gradient(
    logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None, settings: _Settings
) -> torch.Tensor:
    """Return the loss of each row, and overwrite `logits [rows, vocabulary]` with the gradient of their sum.

    `logits` are the output of the head before scale and softcap.
    """
    label_smoothing = settings.label_smoothing
    z_loss = settings.z_loss
    if settings.scale != 1.0:
        logits = logits.mul_(settings.scale)
    softcap_slope = None
    if settings.softcap is not None:
        logits = logits.div_(settings.softcap).tanh_()
        softcap_slope = 1 - logits.square()
        logits = logits.mul_(settings.softcap)

    index = targets[:, None]
    target_logits = logits.gather(1, index)[:, 0]
    mean = logits.mean(1) if label_smoothing else 0.0
    maximum = logits.amax(1, keepdim=True)
    grad = logits.sub_(maximum).exp_()
    exp_sum = grad.sum(1, keepdim=True)
    lse = (exp_sum.log() + maximum)[:, 0]
    loss = lse - (1 - label_smoothing) * target_logits - label_smoothing * mean + z_loss * lse.square()

    grad = grad.mul_((1 + 2 * z_loss * lse)[:, None] / exp_sum)
    grad = grad.scatter_add_(1, index, torch.full_like(index, -(1 - label_smoothing), dtype=grad.dtype))
    if label_smoothing:
        grad = grad.sub_(label_smoothing / grad.shape[1])
    if weights is not None:
        loss = loss * weights
        grad = grad.mul_(weights[:, None])
    if softcap_slope is not None:
        grad = grad.mul_(softcap_slope)
    if settings.scale != 1.0:
        grad.mul_(settings.scale)
    return loss
