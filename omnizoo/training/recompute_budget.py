"""Choose which blocks recompute their activations, for `parallel.recompute: {budget: ...}`.

The choice minimizes recomputation time, subject to the memory budget for activations. For one block of each kind, the
bytes that it keeps for backward and the time to recompute them are measured on packs of the run. All ranks use the
largest values of any rank. Checkpoints store the choice, so a resumed run continues with the same one.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from omnizoo.balancing.step_data import StepData
from omnizoo.config.errors import UserError
from omnizoo.config.schema import Config
from omnizoo.config.sections.parallel import RecomputeBudgetSettings
from omnizoo.ops.device import PLANNED, is_host, total_memory
from omnizoo.ops.precision import keep_precision
from omnizoo.parallel.fsdp.shard import release
from omnizoo.parallel.mesh import Mesh
from omnizoo.parallelize.recompute import MODES, measuring, set_modes, switches
from omnizoo.training.objective import Objective

GIB = 2**30


@dataclass(frozen=True)
class Cost:
    """Cost of one block of a kind in one micro-batch, for each of `MODES`."""

    kept: Sequence[int]  # for each mode: bytes kept between forward and backward
    seconds: Sequence[float]  # for each mode: recomputation time

    def transient(self, counts: tuple[int, int, int]) -> int:
        """Return the additional bytes that are needed while a block is recomputed.

        Blocks that keep more activations run last in forward and first in backward. Their memory is free by the time
        the other blocks are recomputed, so it is subtracted.

        Args:
            counts: Number of blocks in each of `MODES`.
        """
        largest = 0
        freed = 0
        for kept, count in zip(self.kept, counts, strict=True):
            if count:
                largest = max(largest, self.kept[0] - kept - freed)
                freed += count * kept
        return largest


@dataclass(frozen=True)
class RecomputePlan:
    """Number of blocks of each kind in each mode, and the cost of this choice."""

    counts: tuple[tuple[int, int, int], ...]  # number of blocks of each kind in each of `MODES`
    kept: int  # bytes kept between forward and backward
    transient: int  # additional bytes while a block is recomputed
    seconds: float  # recomputation time per micro-batch

    @property
    def bytes(self) -> int:
        """Peak memory of the activations of blocks."""
        return self.kept + self.transient


def apply_recompute_budget(
    objective: Objective, data: StepData, saved: Mapping[str, Any] | None, memory: int | None = None
) -> str:
    """Set the recomputation mode of each block within the budget. Collective: all ranks must call it.

    Args:
        objective: The objective of the run. Without a budget in its config, nothing is changed.
        data: The data of a step, to measure blocks on.
        saved: The result of `saved_choice` in the checkpoint that the run resumes from; None for a new run.
        memory: Device memory per rank in bytes (default: the memory of the device).

    Returns:
        A description of the choice, for the start-up table.

    Raises:
        UserError: If activations exceed the budget even with all blocks recomputed.
    """
    model, config, mesh = objective.model, objective.config, objective.mesh
    if not isinstance(config.parallel.recompute, RecomputeBudgetSettings):
        return str(config.parallel.recompute)
    blocks = switches(model)
    is_reusable = saved is not None and saved["for"] == conditions(config, mesh)
    if saved is not None and is_reusable and saved["modes"].keys() == blocks.keys():
        set_modes(model, saved["modes"])
        return f"as in the checkpoint: {describe_modes(saved['modes'])}"

    if memory is None:
        memory = total_memory(mesh.device)
        if is_host(mesh.device):  # all ranks share the memory
            memory //= mesh.layout.world
    setting = config.parallel.recompute.budget
    budget = int(setting * (memory if setting <= 1 else GIB))

    costs = measure(objective, data)
    names_by_kind: dict[Any, list[str]] = defaultdict(list)
    for name, switch in blocks.items():
        names_by_kind[switch.kind].append(name)
    kinds = [kind for kind in names_by_kind if kind in costs]  # encoders without items in this step have no costs
    plan = choose([costs[kind] for kind in kinds], [len(names_by_kind[kind]) for kind in kinds], budget)

    modes = dict.fromkeys(blocks, "full")
    for kind, counts in zip(kinds, plan.counts, strict=True):
        # Blocks that keep the most memory come last, because backward frees their memory before the first blocks are
        # recomputed.
        for name, mode in zip(names_by_kind[kind], modes_in_order(counts), strict=True):
            modes[name] = mode
    set_modes(model, modes)
    memory_use = f"{plan.bytes / GIB:.3g} of {budget / GIB:.3g} GiB"
    return f"{describe_modes(modes)}: {memory_use}, {plan.seconds:.2g} s more per micro-batch"


def saved_choice(model: nn.Module, config: Config, mesh: Mesh) -> dict[str, Any]:
    """Return the choice to store in a checkpoint; empty without a budget."""
    if not isinstance(config.parallel.recompute, RecomputeBudgetSettings):
        return {}
    modes = {name: switch.mode for name, switch in switches(model).items()}
    return {"recompute": {"for": conditions(config, mesh), "modes": modes}}


def conditions(config: Config, mesh: Mesh) -> str:
    """Return a description of the settings that a choice depends on.

    A saved choice is used only if its description is the same.
    """
    budget = config.parallel.recompute
    assert isinstance(budget, RecomputeBudgetSettings)
    sizes = f"{config.data.pack_tokens} tokens x {config.train.micro_batch}, tiles {config.parallel.tile_tokens}"
    return f"{mesh.layout}, {config.train.precision}, {sizes}, budget {budget.budget:g}"


def measure(objective: Objective, data: StepData) -> dict[Any, Cost]:
    """Measure the cost of each kind of block, as the maximum over ranks. Collective: all ranks must call it.

    Runs the forward pass of one micro-batch, and then resets router statistics and releases gathered parameters.
    """
    config, mesh = objective.config, objective.mesh
    objective.begin_step(data)
    torch.manual_seed(config.train.seed)
    with measuring(objective.model) as meters_by_kind, torch.no_grad(), keep_precision(config.train.precision):
        objective.terms(data.micro_batches[0])
    objective.router_stats.reset()
    release(objective.model)

    costs = np.zeros((len(meters_by_kind), 2, len(MODES)))  # bytes and seconds; 0 for kinds that this rank did not run
    for kind_costs, meters in zip(costs, meters_by_kind.values(), strict=True):
        if meters:
            kind_costs[0] = [meters[mode].kept for mode in MODES]
            kind_costs[1] = [0.0, meters["none"].cheap_seconds, meters["none"].seconds]
    if mesh.device.type != PLANNED:
        costs = np.max(mesh.from_first(mesh.gather(costs)), axis=0)
    rows = zip(meters_by_kind, costs[:, 0].astype(int).tolist(), costs[:, 1].tolist(), strict=True)
    return {kind: Cost(kept, seconds) for kind, kept, seconds in rows if any(kept)}


def choose(costs: Sequence[Cost], blocks: Sequence[int], budget: int) -> RecomputePlan:
    """Return the choice with the least recomputation time within the budget, by exhaustive search.

    Args:
        costs: Cost of a block of each kind.
        blocks: Number of blocks of each kind.
        budget: Bytes for activations of blocks.

    Raises:
        UserError: If no choice fits in the budget.
    """
    plans = [RecomputePlan((), 0, 0, 0.0)]
    for cost, count in zip(costs, blocks, strict=True):
        plans = _best(_extend(plan, cost, counts) for plan in plans for counts in _splits(count))
    least = min(plan.bytes for plan in plans)
    fitting = [plan for plan in plans if plan.bytes <= budget]
    if not fitting:
        raise UserError(
            f"parallel.recompute.budget: {budget / GIB:.3g} GiB is too small. The activations of blocks need at least "
            f"{least / GIB:.3g} GiB, even if all blocks are recomputed. Raise the budget, lower data.pack_tokens, set "
            "parallel.tile_tokens, or split packs across more ranks (parallel.ulysses, parallel.ring)."
        )
    return min(fitting, key=lambda plan: (plan.seconds, plan.bytes, plan.counts))


def _splits(count: int) -> list[tuple[int, int, int]]:
    """Return all ways to distribute `count` blocks over the three `MODES`."""
    splits = []
    for first in range(count + 1):
        for second in range(count - first + 1):
            splits.append((first, second, count - first - second))
    return splits


def _extend(plan: RecomputePlan, cost: Cost, counts: tuple[int, int, int]) -> RecomputePlan:
    """Return the plan extended by the blocks of another kind. `counts[i]` of them use the mode `MODES[i]`."""
    kept = sum(count * kept for count, kept in zip(counts, cost.kept, strict=True))
    seconds = sum(count * seconds for count, seconds in zip(counts, cost.seconds, strict=True))
    return RecomputePlan(
        counts=(*plan.counts, counts),
        kept=plan.kept + kept,
        transient=max(plan.transient, cost.transient(counts)),
        seconds=plan.seconds + seconds,
    )


def _best(plans: Iterable[RecomputePlan]) -> list[RecomputePlan]:
    """Drop each plan that another plan with the same transient memory beats in both kept memory and time."""
    by_transient: dict[int, list[RecomputePlan]] = defaultdict(list)
    for plan in plans:
        by_transient[plan.transient].append(plan)
    best = []
    for candidates in by_transient.values():
        fastest = float("inf")
        for plan in sorted(candidates, key=lambda candidate: (candidate.kept, candidate.seconds)):
            if plan.seconds < fastest:
                fastest = plan.seconds
                best.append(plan)
    return best


def modes_in_order(counts: tuple[int, int, int]) -> list[str]:
    """Return the mode of each block of a kind, given the number of blocks in each of `MODES`. `full` comes first."""
    modes: list[str] = []
    for mode, count in zip(MODES[::-1], counts[::-1], strict=True):
        modes += [mode] * count
    return modes


def describe_modes(modes: Mapping[str, str]) -> str:
    """Return the number of blocks in each mode, for messages."""
    counts = Counter(modes.values())
    return "blocks " + ", ".join(f"{counts[mode]} {mode}" for mode in MODES if counts[mode])
