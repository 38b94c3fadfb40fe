"""Cross entropy, summed over targets. The caller divides by the loss count over all ranks and micro-batches."""

import torch
import torch.nn.functional as F

from omnizoo.ops.precision import at_least_fp32


def cross_entropy_sum(
    logits: torch.Tensor,
    targets: torch.Tensor,
    weights: torch.Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    row_losses: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the sum over rows of -log softmax(logits)[targets], in fp32 or better. Without rows, the sum is 0.

    Args:
        logits: `[rows, vocabulary]`.
        targets: `[rows]`, token ids.
        weights: `[rows]`, factors of the rows. They also apply to label smoothing and z-loss.
        label_smoothing: Label smoothing, as in `torch.nn.functional.cross_entropy`.
        z_loss: Factor of the z-loss, the squared log-sum-exp of the logits. It is added to the loss of each row.
        row_losses: `[rows]`, overwritten with the summands, without gradient.
    """
    logits = at_least_fp32(logits)
    if row_losses is not None and weights is None and not label_smoothing and not z_loss:
        # The same operators as in `F.cross_entropy`, so that the sum does not change if rows are requested.
        log_probabilities = logits.log_softmax(1)
        row_losses.copy_(F.nll_loss(log_probabilities.detach(), targets, reduction="none"))
        return F.nll_loss(log_probabilities, targets, reduction="sum")
    is_summed = weights is None and row_losses is None
    reduction = "sum" if is_summed else "none"
    loss = F.cross_entropy(logits, targets, reduction=reduction, label_smoothing=label_smoothing)
    if z_loss:
        squares = logits.logsumexp(1).square()
        loss = loss + z_loss * (squares.sum() if is_summed else squares)
    if weights is not None:
        loss = loss * weights
    if row_losses is not None:
        row_losses.copy_(loss.detach())
    return loss.sum()
