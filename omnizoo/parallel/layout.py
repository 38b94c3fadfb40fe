"""A layout is a few numbers that must multiply to the world. This file checks them without torch, so that a layout that
cannot work is refused before a process, a group or a tensor exists."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from omnizoo.config.errors import UserError
from omnizoo.config.run_sections import Parallel


@dataclass(frozen=True)
class Layout:
    """Sizes of the mesh axes; any may be 1. `str()` and `parse` speak the short form: `rep2.dp2.uly2.ring1.ep4`."""

    dp_replicate: int = 1
    dp_shard: int = 1
    ulysses: int = 1
    ring: int = 1
    ep: int = 1

    @property
    def dp(self) -> int:
        """Ranks (or groups of `sp` ranks) that work on different packs."""
        return self.dp_replicate * self.dp_shard

    @property
    def sp(self) -> int:
        """Ranks that share one pack."""
        return self.ulysses * self.ring

    @property
    def fsdp(self) -> int:
        """Ranks that share one copy of the dense weights."""
        return self.dp_shard * self.sp

    @property
    def ep_shard(self) -> int:
        """Ranks that share one group of experts."""
        return self.fsdp // self.ep

    @property
    def world(self) -> int:
        return self.dp_replicate * self.fsdp

    def __str__(self) -> str:
        axes = {"rep": self.dp_replicate, "dp": self.dp_shard, "uly": self.ulysses, "ring": self.ring, "ep": self.ep}
        return ".".join(f"{name}{size}" for name, size in axes.items() if size > 1) or "one process"


def plan_layout(parallel: Parallel, world_size: int) -> Layout:
    """The layout of `parallel` on `world_size` ranks, or a UserError that names the axis and what would work."""
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


def micro_batches(layout: Layout, global_batch: int, micro_batch: int) -> int:
    """Forward passes per rank and optimizer step."""
    if global_batch % layout.dp:
        below, above = global_batch // layout.dp * layout.dp, (global_batch // layout.dp + 1) * layout.dp
        raise UserError(
            f"train.global_batch: {global_batch} packs cannot be spread evenly over {layout.dp} data-parallel ranks; "
            f"the nearest that can: {_any_of([n for n in (below, above) if n])}"
        )
    packs = global_batch // layout.dp
    if packs % micro_batch:
        raise UserError(
            f"train.micro_batch: {micro_batch} does not divide the {packs} packs a rank has per step "
            f"(train.global_batch {global_batch} / {layout.dp} ranks); it can be {_any_of(divisors(packs))}"
        )
    return packs // micro_batch


def layouts_of(world_size: int) -> Iterator[Layout]:
    """Every layout of a world of `world_size` ranks."""
    for replicate in divisors(world_size):
        for ulysses in divisors(world_size // replicate):
            for ring in divisors(world_size // replicate // ulysses):
                shard = world_size // replicate // ulysses // ring
                for ep in divisors(shard * ulysses * ring):
                    yield Layout(replicate, shard, ulysses, ring, ep)


def divisors(n: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d < n]


def _any_of(numbers: list[int]) -> str:
    shown = [str(n) for n in numbers]
    return shown[0] if len(shown) == 1 else ", ".join(shown[:-1]) + " or " + shown[-1]
