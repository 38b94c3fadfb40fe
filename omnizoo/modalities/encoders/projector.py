"""Projectors map the features of a tower to the width of the foundation: linear, MLP, pixel shuffle and resampler.

The input `[N, width_in]` is the concatenation of several grids. A grid is `(height, width)` for an image, or
`(length,)` for audio. A projector may be sharded, so it is called once for all grids. It never mixes features of
different grids.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from omnizoo.config.errors import UserError
from omnizoo.modalities.files.pixels import to_patches
from omnizoo.modalities.flop_count import FlopCounter

Grid = tuple[int, ...]
MAX_OPTION = 2**16  # maximum of the options `factor`, `rows` and `heads`


class Projector(nn.Module):
    """The projector `linear`, and the base class of all other projectors."""

    def __init__(self, width_in: int, width_out: int, times: bool) -> None:
        super().__init__()
        self.time = TimeEmbedding(width_out) if times else None
        self.map = self.build_map(width_in, width_out)

    def build_map(self, width_in: int, width_out: int) -> nn.Module:
        """Build the trained map from features of the tower."""
        return nn.Linear(width_in, width_out)

    def num_outputs(self, grid: Grid) -> int:
        """Return the number of output features for a grid. The default is one per input feature."""
        return math.prod(grid)

    def project(self, features: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        """Return the output features of all grids, without the time embedding."""
        projected: torch.Tensor = self.map(features)
        return projected

    def flops(self, grid: Grid, trained: bool) -> float:
        """Return the FLOPs of training on a grid. If `trained`, gradients are also computed for the tower."""
        counter = FlopCounter(trained)
        self.count(counter, grid)
        time_counter = FlopCounter()
        if self.time is not None:
            time_counter.run(self.time, 1)
        return counter.flops + time_counter.flops

    def count(self, counter: FlopCounter, grid: Grid) -> None:
        """Add the FLOPs of a grid, without the time embedding."""
        counter.run(self.map, self.num_outputs(grid))

    def forward(
        self, features: torch.Tensor, grids: Sequence[Grid], milliseconds: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Project all grids.

        Args:
            features: `[N, width_in]`, the features of all grids, concatenated.
            grids: Size of each grid.
            milliseconds: `[len(grids)]`, time of each grid, for a projector built with `times`.

        Returns:
            Features `[total number of output features, width_out]`.
        """
        projected = self.project(features, grids)
        if self.time is None:
            return projected
        assert milliseconds is not None
        counts = torch.tensor([self.num_outputs(grid) for grid in grids], device=features.device)
        time_by_grid = self.time(milliseconds, projected.dtype)
        timed: torch.Tensor = projected + time_by_grid.repeat_interleave(counts, 0)
        return timed


class NoProjector(Projector):
    """Returns the features of the tower unchanged. The tower must have the width of the foundation."""

    def build_map(self, width_in: int, width_out: int) -> nn.Module:
        if width_in != width_out:
            raise UserError(
                f"projector.kind: none requires equal widths, but the encoder has width {width_in} and the foundation "
                f"has width {width_out}. Use linear or mlp."
            )
        return nn.Identity()


class MLP(Projector):
    """Two linear maps with a GELU between them."""

    def build_map(self, width_in: int, width_out: int) -> nn.Module:
        return nn.Sequential(nn.Linear(width_in, width_out), nn.GELU(), nn.Linear(width_out, width_out))


class PixelShuffle(Projector):
    """Concatenates the channels of `factor` x `factor` neighbors (for audio, `factor` frames) and applies an MLP.

    A grid whose sides are not multiples of `factor` is padded with zeros.
    """

    def __init__(self, width_in: int, width_out: int, times: bool, factor: int = 2, dimensions: int = 2) -> None:
        self.factor, self.dimensions = factor, dimensions
        super().__init__(width_in, width_out, times)

    def build_map(self, width_in: int, width_out: int) -> nn.Module:
        together = width_in * self.factor**self.dimensions
        return nn.Sequential(
            nn.LayerNorm(together), nn.Linear(together, width_out), nn.GELU(), nn.Linear(width_out, width_out)
        )

    def num_outputs(self, grid: Grid) -> int:
        return math.prod(-(-side // self.factor) for side in grid)

    def project(self, features: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        features_by_grid = features.split([math.prod(grid) for grid in grids])
        squares = [self.gather(part, grid) for part, grid in zip(features_by_grid, grids, strict=True)]
        projected: torch.Tensor = self.map(torch.cat(squares))
        return projected

    def gather(self, features: torch.Tensor, grid: Grid) -> torch.Tensor:
        """Concatenate the features of each square of a grid, padded with zeros to a multiple of `factor`."""
        assert len(grid) == self.dimensions
        padding = [0, 0]  # padding of the width; the grid's dimensions follow, from the last to the first
        for side in reversed(grid):
            padding += [0, -side % self.factor]
        padded = F.pad(features.view(*grid, -1), padding)
        return to_patches(padded, self.factor)


class Resampler(Projector):
    """Cross-attention from learned queries to each grid. All grids have the same number of output features."""

    def __init__(self, width_in: int, width_out: int, times: bool, rows: int = 64, heads: int = 8) -> None:
        if width_out % heads:
            raise UserError(f"projector.heads: {heads} does not divide the width {width_out} of the foundation")
        super().__init__(width_in, width_out, times)
        self.heads = heads
        self.queries = nn.Parameter(torch.empty(rows, width_out))
        self.ask = nn.Sequential(nn.LayerNorm(width_out), nn.Linear(width_out, width_out))
        self.answer = nn.Linear(width_out, width_out)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width_out), nn.Linear(width_out, 4 * width_out), nn.GELU(), nn.Linear(4 * width_out, width_out)
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.queries, std=0.02)

    def build_map(self, width_in: int, width_out: int) -> nn.Module:
        return nn.Sequential(nn.LayerNorm(width_in), nn.Linear(width_in, 2 * width_out))

    def num_outputs(self, grid: Grid) -> int:
        return self.queries.shape[0]

    def count(self, counter: FlopCounter, grid: Grid) -> None:
        """Add the FLOPs of a grid. `ask` is excluded, because it runs once for all grids."""
        counter.run(self.map, math.prod(grid))
        counter.trained |= self.queries.requires_grad
        counter.attend(self.num_outputs(grid) * math.prod(grid), self.queries.shape[1])
        counter.run(self.answer, self.num_outputs(grid))
        counter.run(self.mlp, self.num_outputs(grid))

    def project(self, features: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        def split_heads(x: torch.Tensor) -> torch.Tensor:
            return x.view(len(x), self.heads, -1).transpose(0, 1)

        query = split_heads(self.ask(self.queries))
        keys_and_values = self.map(features).split([math.prod(grid) for grid in grids])
        attended = []
        for grid_features in keys_and_values:  # one call per grid, because lengths differ
            key, value = grid_features.chunk(2, -1)
            by_head = F.scaled_dot_product_attention(query, split_heads(key), split_heads(value))
            attended.append(by_head.transpose(0, 1).flatten(1))
        residual = self.queries.repeat(len(grids), 1) + self.answer(torch.cat(attended))
        output: torch.Tensor = residual + self.mlp(residual)
        return output


class TimeEmbedding(nn.Module):
    """Sinusoids of the time, with periods from 0.2 s to about 5 hours, followed by a linear map to the width."""

    FREQUENCIES = 32

    def __init__(self, width: int) -> None:
        super().__init__()
        self.map = nn.Linear(2 * self.FREQUENCIES, width)

    def forward(self, milliseconds: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        exponents = torch.linspace(0, 5, self.FREQUENCIES, device=milliseconds.device, dtype=torch.float64)
        angles = 2 * math.pi * (milliseconds[:, None].double() / 200) * 10**-exponents
        embedded: torch.Tensor = self.map(torch.cat([angles.sin(), angles.cos()], -1).to(dtype))
        return embedded


KINDS: dict[str, type[Projector]] = {
    "linear": Projector,
    "mlp": MLP,
    "pixel_shuffle": PixelShuffle,
    "resampler": Resampler,
    "none": NoProjector,
}


def build_projector(
    spec: dict[str, Any] | None, width_in: int, width_out: int, dimensions: int, times: bool = False
) -> Projector:
    """Build a projector.

    Args:
        spec: `kind` (default: `mlp`) and options of that kind.
        width_in: Width of the tower's features.
        width_out: Width of the foundation.
        dimensions: Number of dimensions of the grids.
        times: Whether to add a time embedding.
    """
    options = dict(spec or {})
    kind = options.pop("kind", "mlp")
    if kind not in KINDS:
        raise UserError(f"projector.kind: {kind!r} is unknown. Use one of {', '.join(KINDS)}.")
    allowed = {"pixel_shuffle": ("factor",), "resampler": ("heads", "rows")}.get(kind, ())
    for name, value in options.items():
        if name not in allowed:
            known = ", ".join(allowed) or "none"
            raise UserError(f"projector.{name}: not an option of {kind}. Its options: {known}.")
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_OPTION:
            raise UserError(f"projector.{name}: {value!r} is not an integer from 1 to {MAX_OPTION}")
    if kind == "pixel_shuffle":
        options["dimensions"] = dimensions
    return KINDS[kind](width_in, width_out, times, **options)
