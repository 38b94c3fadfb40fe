"""Projectors from features of a tower to the width of the foundation: linear, MLP, pixel shuffle or resampler.

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
MOST = 2**16  # maximum of the options `factor`, `rows` and `heads`


class Projector(nn.Module):
    """The projector `linear`, and base class of the others."""

    def __init__(self, width_in: int, width_out: int, times: bool) -> None:
        super().__init__()
        self.time = TimeEmbedding(width_out) if times else None
        self.map = self.build_map(width_in, width_out)

    def build_map(self, width_in: int, width_out: int) -> nn.Module:
        return nn.Linear(width_in, width_out)

    def places(self, grid: Grid) -> int:
        """Return the number of output features for a grid. The default is one per input feature."""
        return math.prod(grid)

    def project(self, features: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        projected: torch.Tensor = self.map(features)
        return projected

    def flops(self, grid: Grid, trained: bool) -> float:
        """Return the FLOPs of training on a grid. `trained`: whether gradients are also computed for the tower."""
        tally, time = FlopCounter(trained), FlopCounter()
        self.count(tally, grid)
        if self.time is not None:
            time.run(self.time, 1)
        return tally.flops + time.flops

    def count(self, tally: FlopCounter, grid: Grid) -> None:
        tally.run(self.map, self.places(grid))

    def forward(
        self, features: torch.Tensor, grids: Sequence[Grid], milliseconds: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Project all grids.

        Args:
            features: `[N, width_in]`, all grids, concatenated.
            grids: Size of each grid.
            milliseconds: `[len(grids)]`, time of each grid, for a projector built with `times`.

        Returns:
            Features `[total number of output features, width_out]`.
        """
        projected = self.project(features, grids)
        if self.time is None:
            return projected
        assert milliseconds is not None
        counts = torch.tensor([self.places(grid) for grid in grids], device=features.device)
        timed: torch.Tensor = projected + self.time(milliseconds, projected.dtype).repeat_interleave(counts, 0)
        return timed


class MLP(Projector):
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

    def places(self, grid: Grid) -> int:
        return math.prod(-(-side // self.factor) for side in grid)

    def project(self, features: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        parts = features.split([math.prod(grid) for grid in grids])
        together = [self.gather(part, grid) for part, grid in zip(parts, grids, strict=True)]
        projected: torch.Tensor = self.map(torch.cat(together))
        return projected

    def gather(self, features: torch.Tensor, grid: Grid) -> torch.Tensor:
        assert len(grid) == self.dimensions
        missing = [-side % self.factor for side in grid]
        padded = F.pad(features.view(*grid, -1), [0, 0, *(n for side in reversed(missing) for n in (0, side))])
        return to_patches(padded, self.factor)


class Resampler(Projector):
    """Cross-attention from a fixed number of learned queries to each grid, independent of its size."""

    def __init__(self, width_in: int, width_out: int, times: bool, rows: int = 64, heads: int = 8) -> None:
        if width_out % heads:
            raise UserError(f"projector.heads: {heads} heads do not divide the foundation's width {width_out}")
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

    def places(self, grid: Grid) -> int:
        return self.queries.shape[0]

    def count(self, tally: FlopCounter, grid: Grid) -> None:
        """Add the FLOPs of a grid, without `ask`, which runs once for all grids."""
        tally.run(self.map, math.prod(grid))
        tally.trained |= self.queries.requires_grad
        tally.attend(self.places(grid) * math.prod(grid), self.queries.shape[1])
        tally.run(self.answer, self.places(grid))
        tally.run(self.mlp, self.places(grid))

    def project(self, features: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        def by_head(x: torch.Tensor) -> torch.Tensor:
            return x.view(len(x), self.heads, -1).transpose(0, 1)

        ask, seen = by_head(self.ask(self.queries)), []
        for part in self.map(features).split([math.prod(grid) for grid in grids]):  # lengths differ: one call per grid
            key, value = part.chunk(2, -1)
            seen.append(F.scaled_dot_product_attention(ask, by_head(key), by_head(value)).transpose(0, 1).flatten(1))
        features = self.queries.repeat(len(grids), 1) + self.answer(torch.cat(seen))
        out: torch.Tensor = features + self.mlp(features)
        return out


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
        raise UserError(f"projector.kind: {kind!r} is none of {', '.join(KINDS)}")
    takes = {"pixel_shuffle": {"factor"}, "resampler": {"rows", "heads"}}.get(kind, set())
    for name, value in options.items():
        if name not in takes:
            raise UserError(f"projector.{name}: {kind} takes {', '.join(sorted(takes)) or 'no options'}")
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST:
            raise UserError(f"projector.{name}: {value!r} is not an integer from 1 to {MOST}")
    if kind == "pixel_shuffle":
        options["dimensions"] = dimensions
    return KINDS[kind](width_in, width_out, times, **options)
