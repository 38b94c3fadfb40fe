"""Newton-Schulz iteration. Muon uses it to make an update approximately orthogonal. It needs only matmuls."""

from collections.abc import Sequence

import torch

# From Keller Jordan's Muon. The polynomial is steep at zero, so that five steps bring every singular value to the range
# from about 0.7 to 1.2.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalize(
    matrices: torch.Tensor, steps: int = 5, coefficients: Sequence[float] = COEFFICIENTS, eps: float = 1e-7
) -> torch.Tensor:
    """Approximately orthogonalize each matrix of `matrices [..., m, n]`, in its dtype. Returns the same shape."""
    a, b, c = coefficients
    # Transpose if this makes the Gram matrix smaller.
    wide = matrices.mT if matrices.shape[-2] > matrices.shape[-1] else matrices
    x: torch.Tensor = wide / wide.norm(dim=(-2, -1), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if matrices.shape[-2] > matrices.shape[-1] else x
