"""Layouts: the sizes of the mesh axes, whose product is the world size.

This module does not import torch, so an invalid layout is rejected before any process starts.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from omnizoo.config.errors import UserError
from omnizoo.config.sections.parallel import ParallelSection

SHORT = {"rep": "dp_replicate", "dp": "dp_shard", "uly": "ulysses", "ring": "ring", "ep": "ep"}


@dataclass(frozen=True)
class Layout:
    """Sizes of the mesh axes; any may be 1. `str()` returns the short form without axes of size 1: `rep2.dp2.ep4`."""

    dp_replicate: int = 1
    dp_shard: int = 1
    ulysses: int = 1
    ring: int = 1
    ep: int = 1

    @property
    def dp(self) -> int:
        """Number of ranks, or groups of `sp` ranks, that process different packs."""
        return self.dp_replicate * self.dp_shard

    @property
    def sp(self) -> int:
        """Number of ranks that share one pack."""
        return self.ulysses * self.ring

    @property
    def fsdp(self) -> int:
        """Number of ranks that share one copy of the dense weights."""
        return self.dp_shard * self.sp

    @property
    def ep_shard(self) -> int:
        """Number of ranks that each expert is sharded over."""
        return self.fsdp // self.ep

    @property
    def world(self) -> int:
        """World size of this layout."""
        return self.dp_replicate * self.fsdp

    def __str__(self) -> str:
        sizes = {name: getattr(self, axis) for name, axis in SHORT.items()}
        return ".".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "one process"


def plan_layout(parallel: ParallelSection, world_size: int) -> Layout:
    """Return the layout that `parallel` sets for `world_size` ranks.

    Raises:
        UserError: If the sizes do not fit the world size. The message names the axis and valid sizes.
    """
    replicate, shard, ulysses, ring = parallel.dp_replicate, parallel.dp_shard, parallel.ulysses, parallel.ring
    if shard == -1:
        for axis, size in (("ring", ring), ("ulysses", ulysses), ("dp_replicate", replicate)):
            if world_size % size:
                raise UserError(
                    f"parallel.{axis}: {size} does not divide the world of {world_size} processes; "
                    f"it can be {_any_of(divisors(world_size))}"
                )
        if world_size % (replicate * ulysses * ring):
            raise UserError(
                f"parallel.dp_replicate {replicate} x ulysses {ulysses} x ring {ring} = {replicate * ulysses * ring} "
                f"does not divide the world of {world_size} processes"
            )
        shard = world_size // (replicate * ulysses * ring)
    layout = Layout(replicate, shard, ulysses, ring, parallel.ep)
    if layout.world != world_size:
        raise UserError(
            f"parallel.dp_replicate {replicate} x parallel.dp_shard {shard} x ulysses {ulysses} x ring {ring} = "
            f"{layout.world} does not fit the world of {world_size} processes; set parallel.dp_shard: -1 for what is "
            f"left, or start {layout.world} processes"
        )
    if layout.fsdp % layout.ep:
        raise UserError(
            f"parallel.ep: {layout.ep} does not divide dp_shard {shard} x ulysses {ulysses} x ring {ring} = "
            f"{layout.fsdp}; it can be {_any_of(divisors(layout.fsdp))}"
        )
    return layout


def micro_batches(layout: Layout, packs_per_step: int, micro_batch: int) -> int:
    """Return the number of micro-batches per rank and optimizer step.

    Raises:
        UserError: If the packs cannot be divided evenly over ranks and micro-batches.
    """
    if packs_per_step % layout.dp:
        below = packs_per_step // layout.dp * layout.dp
        above = below + layout.dp
        raise UserError(
            f"train.packs_per_step: {packs_per_step} packs cannot be spread evenly over {layout.dp} data-parallel "
            f"ranks; the nearest that can: {_any_of([n for n in (below, above) if n])}"
        )
    packs = packs_per_step // layout.dp
    if packs % micro_batch:
        raise UserError(
            f"train.micro_batch: {micro_batch} does not divide the {packs} packs a rank has per step "
            f"(train.packs_per_step {packs_per_step} / {layout.dp} ranks); it can be {_any_of(divisors(packs))}"
        )
    return packs // micro_batch


def layouts_of(world_size: int) -> Iterator[Layout]:
    """Yield every layout of `world_size` ranks."""
    for replicate in divisors(world_size):
        for ulysses in divisors(world_size // replicate):
            for ring in divisors(world_size // replicate // ulysses):
                shard = world_size // replicate // ulysses // ring
                for ep in divisors(shard * ulysses * ring):
                    yield Layout(replicate, shard, ulysses, ring, ep)


def divisors(n: int) -> list[int]:
    """Return the divisors of `n` in ascending order."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d < n]


def _any_of(numbers: list[int]) -> str:
    """Format numbers for a message: "1, 2 or 4"."""
    shown = [str(n) for n in numbers]
    return shown[0] if len(shown) == 1 else ", ".join(shown[:-1]) + " or " + shown[-1]
