"""Newton-Schulz: the nearest orthogonal matrix, roughly, by matmuls alone. What Muon does to a matrix of updates."""

from collections.abc import Sequence

import torch

# Of Keller Jordan's Muon: steep at zero, so that five steps bring every singular value to between 0.7 and 1.2 or so.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalize(
    matrices: torch.Tensor, steps: int = 5, coefficients: Sequence[float] = COEFFICIENTS, eps: float = 1e-7
) -> torch.Tensor:
    """`[..., m, n]` -> the same shape; every matrix by itself, in the precision it comes in."""
    a, b, c = coefficients
    wide = matrices.mT if matrices.shape[-2] > matrices.shape[-1] else matrices  # the smaller Gram matrix
    x: torch.Tensor = wide / wide.norm(dim=(-2, -1), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if matrices.shape[-2] > matrices.shape[-1] else x
