"""Convert latents between grids `[B, C, F, H, W]` and tokens `[B, tokens, values]`, one token per patch."""

import torch

from omnizoo.models.diffusion.recipe import Grid


def pack(latents: torch.Tensor, patch: Grid) -> torch.Tensor:
    """Cut latents `[B, C, F, H, W]` into patches. The values of a token are sorted by channel, frame, row, column."""
    batch, channels, frames, height, width = latents.shape
    depth, rows, columns = patch
    pieces = latents.reshape(
        batch, channels, frames // depth, depth, height // rows, rows, width // columns, columns
    )  # [B, C, F', depth, H', rows, W', columns]
    return pieces.permute(0, 2, 4, 6, 1, 3, 5, 7).flatten(4).flatten(1, 3)


def unpack(tokens: torch.Tensor, grid: Grid, patch: Grid) -> torch.Tensor:
    """Return the latents `[B, C, F, H, W]` that `pack` cut into a grid of tokens."""
    # [B, F', H', W', C, depth, rows, columns]
    pieces: torch.Tensor = tokens.unflatten(1, grid).unflatten(4, (-1, *patch))
    return pieces.permute(0, 4, 1, 5, 2, 6, 3, 7).flatten(6, 7).flatten(4, 5).flatten(2, 3)
