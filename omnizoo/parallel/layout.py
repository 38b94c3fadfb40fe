"""A layout is a few numbers that must multiply to the world. This file checks them without torch, so that a layout that
cannot work is refused before a process, a group or a tensor exists."""

import os
from dataclasses import dataclass

from omnizoo.config.errors import UserError
from omnizoo.config.schema import Parallel


@dataclass(frozen=True)
class Layout:
    """Sizes of the mesh axes and what follows from them for one optimizer step."""

    dp_replicate: int
    dp_shard: int
    micro_batches: int  # forward passes per rank and optimizer step

    @property
    def dp(self) -> int:
        """Ranks that work on different packs."""
        return self.dp_replicate * self.dp_shard

    @property
    def world(self) -> int:
        return self.dp_replicate * self.dp_shard

    def __str__(self) -> str:
        return f"dp_replicate {self.dp_replicate} x dp_shard {self.dp_shard}"


def plan_layout(parallel: Parallel, world_size: int, global_batch: int, micro_batch: int) -> Layout:
    """The layout of `parallel` on `world_size` ranks, or a UserError that names the axis and what would work."""
    replicate, shard = parallel.dp_replicate, parallel.dp_shard
    if shard == -1:
        if world_size % replicate:
            raise UserError(
                f"parallel.dp_replicate: {replicate} does not divide the world of {world_size} processes; "
                f"it can be {_any_of(_divisors(world_size))}"
            )
        shard = world_size // replicate
    ranks = replicate * shard
    if ranks != world_size:
        raise UserError(
            f"parallel.dp_replicate {replicate} x parallel.dp_shard {shard} = {ranks} does not fit the world of "
            f"{world_size} processes; set parallel.dp_shard: -1 to use what is left, or start {ranks} processes"
        )
    if global_batch % ranks:
        raise UserError(
            f"train.global_batch: {global_batch} packs cannot be spread evenly over {ranks} data-parallel ranks; "
            f"the nearest that can: {_nearest_multiples(global_batch, ranks)}"
        )
    packs = global_batch // ranks
    if packs % micro_batch:
        raise UserError(
            f"train.micro_batch: {micro_batch} does not divide the {packs} packs a rank has per step "
            f"(train.global_batch {global_batch} / {ranks} ranks); it can be {_any_of(_divisors(packs))}"
        )
    return Layout(dp_replicate=replicate, dp_shard=shard, micro_batches=packs // micro_batch)


def place_in_world() -> tuple[int, int, int] | None:
    """(rank, world size, local rank) as set by our launcher, torchrun or Slurm; None if nobody started a world."""
    env = os.environ
    if "RANK" in env and "WORLD_SIZE" in env:
        return int(env["RANK"]), int(env["WORLD_SIZE"]), int(env.get("LOCAL_RANK", "0"))
    if int(env.get("SLURM_NTASKS", "1")) > 1 and "SLURM_PROCID" in env:
        return int(env["SLURM_PROCID"]), int(env["SLURM_NTASKS"]), int(env.get("SLURM_LOCALID", "0"))
    return None


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _any_of(numbers: list[int]) -> str:
    shown = [str(n) for n in numbers]
    return shown[0] if len(shown) == 1 else ", ".join(shown[:-1]) + " or " + shown[-1]


def _nearest_multiples(n: int, of: int) -> str:
    below, above = n // of * of, (n // of + 1) * of
    return _any_of([m for m in (below, above) if m > 0])
