"""Layouts: the sizes of the mesh axes. They determine the world size.

This module does not import torch, so an invalid layout is rejected before any process starts.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from omnizoo.config.errors import UserError
from omnizoo.config.sections.parallel import ParallelSection
from omnizoo.config.sections.train import TrainSection

SHORT = {"rep": "dp_replicate", "dp": "dp_shard", "uly": "ulysses", "ring": "ring", "ep": "ep"}


@dataclass(frozen=True)
class Layout:
    """Sizes of the mesh axes, each at least 1.

    `str()` returns a short form without axes of size 1, such as `rep2.dp2.ep4`.
    """

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
    shard = parallel.dp_shard
    if shard == -1:
        shard = _remaining_ranks(parallel, world_size)
    layout = Layout(
        dp_replicate=parallel.dp_replicate,
        dp_shard=shard,
        ulysses=parallel.ulysses,
        ring=parallel.ring,
        ep=parallel.ep,
    )

    if layout.world != world_size:
        raise UserError(
            f"parallel: dp_replicate {layout.dp_replicate} x dp_shard {shard} x ulysses {layout.ulysses} x ring "
            f"{layout.ring} = {layout.world}, but the world size is {world_size}. Set parallel.dp_shard: -1 to use the "
            f"remaining ranks, or start {layout.world} processes."
        )
    if layout.fsdp % layout.ep:
        raise UserError(
            f"parallel.ep: {layout.ep} does not divide dp_shard {shard} x ulysses {layout.ulysses} x ring "
            f"{layout.ring} = {layout.fsdp}. Use {_any_of(divisors(layout.fsdp))}."
        )
    return layout


def _remaining_ranks(parallel: ParallelSection, world_size: int) -> int:
    """Return the `dp_shard` that makes the layout use all ranks."""
    axes = {"ring": parallel.ring, "ulysses": parallel.ulysses, "dp_replicate": parallel.dp_replicate}
    for axis, size in axes.items():
        if world_size % size:
            raise UserError(
                f"parallel.{axis}: {size} does not divide the world size {world_size}. "
                f"Use {_any_of(divisors(world_size))}."
            )
    product = math.prod(axes.values())
    if world_size % product:
        raise UserError(
            f"parallel: dp_replicate {parallel.dp_replicate} x ulysses {parallel.ulysses} x ring {parallel.ring} = "
            f"{product} does not divide the world size {world_size}. Reduce one of these sizes."
        )
    return world_size // product


def check_step(layout: Layout, train: TrainSection) -> None:
    """Check that the packs of a step can be divided evenly over ranks and micro-batches.

    Steps that are defined by samples need no check, because dummy packs are added.

    Raises:
        UserError: If they cannot.
    """
    if train.samples_per_step is None:
        micro_batches(layout, train.packs_per_step, train.micro_batch)


def micro_batches(layout: Layout, packs_per_step: int, micro_batch: int) -> int:
    """Return the number of micro-batches per rank and optimizer step.

    Raises:
        UserError: If the packs cannot be divided evenly over ranks and micro-batches.
    """
    if packs_per_step % layout.dp:
        below = packs_per_step // layout.dp * layout.dp
        above = below + layout.dp
        nearest = [size for size in (below, above) if size]
        raise UserError(
            f"train.packs_per_step: {packs_per_step} is not a multiple of the {layout.dp} data-parallel ranks. "
            f"Use {_any_of(nearest)}."
        )
    packs = packs_per_step // layout.dp
    if packs % micro_batch:
        raise UserError(
            f"train.micro_batch: {micro_batch} does not divide the {packs} packs per rank "
            f"(train.packs_per_step {packs_per_step} / {layout.dp} data-parallel ranks). "
            f"Use {_any_of(divisors(packs))}."
        )
    return packs // micro_batch


def layouts_of(world_size: int) -> Iterator[Layout]:
    """Yield every layout of `world_size` ranks."""
    for replicate in divisors(world_size):
        for ulysses in divisors(world_size // replicate):
            for ring in divisors(world_size // replicate // ulysses):
                shard = world_size // replicate // ulysses // ring
                for ep in divisors(shard * ulysses * ring):
                    yield Layout(dp_replicate=replicate, dp_shard=shard, ulysses=ulysses, ring=ring, ep=ep)


def divisors(n: int) -> list[int]:
    """Return the divisors of `n` in ascending order."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d < n]


def _any_of(numbers: list[int]) -> str:
    """Format numbers for a message: "1, 2 or 4"."""
    *first, last = [str(number) for number in numbers]
    if not first:
        return last
    return ", ".join(first) + " or " + last
