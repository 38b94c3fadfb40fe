"""Compute log-probabilities of targets from logits, or from hidden states with only a few rows of logits in memory."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from omnizoo.ops.precision import at_least_fp32, keep_precision

NONE = -100  # marks positions without a target, as in torch's cross entropy


def log_probabilities(logits: torch.Tensor, targets: torch.Tensor, none: int = NONE) -> torch.Tensor:
    """Return the log-probability `[rows]` of each target under `logits [rows, vocabulary]`, in fp32 or better.

    The result is 0 where the target is `none`.
    """
    return -F.cross_entropy(at_least_fp32(logits), targets, reduction="none", ignore_index=none)


def by_rows(
    work: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], hidden: torch.Tensor, targets: torch.Tensor, rows: int
) -> torch.Tensor:
    """Return `work(hidden, targets)`, `[N]`, computed a few rows at a time to save memory.

    Backward recomputes intermediate results.

    Args:
        work: Returns one value for each row.
        hidden: `[N, width]`, hidden states.
        targets: `[N]`, token ids.
        rows: Number of rows to compute at a time.
    """
    run: Callable[..., torch.Tensor] = work
    if torch.is_grad_enabled():
        # Backward runs outside the mode of the forward pass, so recomputation must enter it again.
        precision = "fp64" if hidden.dtype == torch.float64 else ""
        run = partial(
            checkpoint, work, use_reentrant=False, context_fn=lambda: (nullcontext(), keep_precision(precision))
        )
    chunks = zip(hidden.split(rows), targets.split(rows), strict=True)
    return torch.cat([run(chunk, chunk_targets) for chunk, chunk_targets in chunks])
