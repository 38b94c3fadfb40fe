"""Cross entropy as a sum over targets: the caller divides by the count over all ranks and micro-batches."""

import torch
import torch.nn.functional as F


def cross_entropy_sum(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Sum over rows of -log softmax(logits `[N, V]`)[targets `[N]`], in fp32 or better; 0 for no rows."""
    precise = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(logits.to(precise), targets, reduction="sum")
