"""How likely targets are, by logits or by hidden states, of which few are turned into logits at a time."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from omnizoo.ops.precision import exact

NONE = -100  # a target that is none, as torch's cross entropy has it


def log_probabilities(logits: torch.Tensor, targets: torch.Tensor, none: int = NONE) -> torch.Tensor:
    """Of `targets [N]` by `logits [N, V]`, in fp32 or better; 0 where a target is `none`."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return -F.cross_entropy(wide, targets, reduction="none", ignore_index=none)


def by_rows(
    work: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], hidden: torch.Tensor, targets: torch.Tensor, rows: int
) -> torch.Tensor:
    """`work(hidden, targets) -> [N]`, on so many rows at a time; what it makes on the way is made again in backward."""
    run: Callable[..., torch.Tensor] = work
    if torch.is_grad_enabled():
        # Autograd leaves the mode that the forward pass ran under.
        precision = "fp64" if hidden.dtype == torch.float64 else ""
        run = partial(checkpoint, work, use_reentrant=False, context_fn=lambda: (nullcontext(), exact(precision)))
    return torch.cat([run(*piece) for piece in zip(hidden.split(rows), targets.split(rows), strict=True)])
