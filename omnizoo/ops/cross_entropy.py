"""Cross entropy as a sum over targets: the caller divides by the count over all ranks and micro-batches."""

import torch
import torch.nn.functional as F


def cross_entropy_sum(
    logits: torch.Tensor,
    targets: torch.Tensor,
    weights: torch.Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> torch.Tensor:
    """Sum over rows of -log softmax(logits `[N, V]`)[targets `[N]`], in fp32 or better; 0 for no rows.

    `label_smoothing` is torch's. `z_loss` times the squared log-sum-exp of its logits is added to each row. Both are
    inside of what `weights [N]` multiply.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    each = "sum" if weights is None else "none"
    loss = F.cross_entropy(logits, targets, reduction=each, label_smoothing=label_smoothing)
    if z_loss:
        square = logits.logsumexp(1).square()
        loss = loss + z_loss * (square.sum() if weights is None else square)
    return loss if weights is None else (loss * weights).sum()
