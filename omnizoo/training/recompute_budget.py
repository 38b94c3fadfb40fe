"""Choose which blocks recompute their activations, for `parallel.recompute: {budget: ...}`.

The choice minimizes the recomputation time while activations fit in the memory budget. One block of each kind is
measured on packs of the run: the bytes that it keeps for backward, and the time to recompute them. All ranks use the
largest values of any rank. Checkpoints store the choice, so a resumed run continues with the same one.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
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

    kept: Sequence[int]  # bytes kept between forward and backward, by mode
    seconds: Sequence[float]  # recomputation time, by mode

    def transient(self, counts: tuple[int, int, int]) -> int:
        """Return the additional bytes that are needed while a block is recomputed.

        Blocks that keep more run last in forward, and first in backward. Their memory is free by the time the other
        blocks are recomputed, so it is subtracted.

        Args:
            counts: Number of blocks in each of `MODES`.
        """
        most = done = 0
        for kept, count in zip(self.kept, counts, strict=True):
            if count:
                most, done = max(most, self.kept[0] - kept - done), done + count * kept
        return most


@dataclass(frozen=True)
class RecomputePlan:
    """Number of blocks of each kind in each mode, and the cost of this choice."""

    counts: tuple[tuple[int, int, int], ...]  # for each kind, the number of blocks in each of `MODES`
    kept: int  # bytes between forward and backward
    transient: int  # additional bytes while a block is recomputed
    seconds: float  # recomputation time per micro-batch

    @property
    def bytes(self) -> int:
        return self.kept + self.transient


def apply_recompute_budget(
    objective: Objective, data: StepData, saved: Mapping[str, Any] | None, memory: int | None = None
) -> str:
    """Set the recomputation mode of each block within the budget. Collective: all ranks must call it.

    Args:
        objective: The objective of the run. Without a budget in its config, nothing is changed.
        data: The data of a step, to measure blocks on.
        saved: The choice in the checkpoint that the run resumes from, from `saved_choice`; None for a new run.
        memory: Device memory per rank in bytes (default: that of the device).

    Returns:
        A description of the choice, for the start-up table.

    Raises:
        UserError: If activations exceed the budget even if all blocks recompute.
    """
    model, config, mesh = objective.model, objective.config, objective.mesh
    if not isinstance(config.parallel.recompute, RecomputeBudgetSettings):
        return str(config.parallel.recompute)
    found = switches(model)
    here = conditions(config, mesh)
    if saved is not None and saved["for"] == here and saved["modes"].keys() == found.keys():
        set_modes(model, saved["modes"])
        return f"as the checkpoint says: {count_of(saved['modes'])}"
    if memory is None:  # on CPU, all ranks share the memory
        memory = total_memory(mesh.device) // (mesh.layout.world if is_host(mesh.device) else 1)
    share = config.parallel.recompute.budget
    budget = int(share * (memory if share <= 1 else GIB))
    costs = measure(objective, data)
    members: dict[Any, list[str]] = defaultdict(list)
    for name, switch in found.items():
        members[switch.kind].append(name)
    kinds = [kind for kind in members if kind in costs]  # blocks of encoders without items in this step were not run
    plan = choose([costs[kind] for kind in kinds], [len(members[kind]) for kind in kinds], budget)
    modes = dict.fromkeys(found, "full")
    for kind, counts in zip(kinds, plan.counts, strict=True):
        # Blocks that keep most come last: backward frees their memory before the first blocks are recomputed.
        for name, mode in zip(members[kind], in_order(counts), strict=True):
            modes[name] = mode
    set_modes(model, modes)
    return (
        f"{count_of(modes)}: {plan.bytes / GIB:.3g} of {budget / GIB:.3g} GiB, {plan.seconds:.2g} s more a micro-batch"
    )


def saved_choice(model: nn.Module, config: Config, mesh: Mesh) -> dict[str, Any]:
    """Return the choice to store in a checkpoint; empty without a budget."""
    if not isinstance(config.parallel.recompute, RecomputeBudgetSettings):
        return {}
    modes = {name: switch.mode for name, switch in switches(model).items()}
    return {"recompute": {"for": conditions(config, mesh), "modes": modes}}


def conditions(config: Config, mesh: Mesh) -> str:
    """Return a description of the settings that a choice depends on. A saved choice is used only if it is equal."""
    budget = config.parallel.recompute
    assert isinstance(budget, RecomputeBudgetSettings)
    sizes = f"{config.data.pack_tokens} tokens x {config.train.micro_batch}, tiles {config.parallel.tile_tokens}"
    return f"{mesh.layout}, {config.train.precision}, {sizes}, budget {budget.budget:g}"


def measure(objective: Objective, data: StepData) -> dict[Any, Cost]:
    """Measure the cost of each kind of block, the maximum over ranks. Collective: all ranks must call it.

    Runs the forward pass of one micro-batch, and then resets router statistics and releases gathered parameters.
    """
    config, mesh = objective.config, objective.mesh
    objective.begin_step(data)
    torch.manual_seed(config.train.seed)
    with measuring(objective.model) as found, torch.no_grad(), keep_precision(config.train.precision):
        objective.terms(data.micro_batches[0])
    objective.router_stats.reset()
    release(objective.model)
    costs = np.zeros((len(found), 2, len(MODES)))  # bytes and seconds; 0 for kinds that this rank did not run
    for own, meters in zip(costs, found.values(), strict=True):
        if meters:
            own[0] = [meters[mode].kept for mode in MODES]
            own[1] = [0.0, meters["none"].cheap_seconds, meters["none"].seconds]
    if mesh.device.type != PLANNED:
        costs = np.max(mesh.from_first(mesh.gather(costs)), axis=0)
    rows = zip(found, costs[:, 0].astype(int).tolist(), costs[:, 1].tolist(), strict=True)
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
        splits = [(none, some, count - none - some) for none in range(count + 1) for some in range(count - none + 1)]
        plans = _best(_joined(plan, cost, counts) for plan in plans for counts in splits)
    least = min(plan.bytes for plan in plans)
    fitting = [plan for plan in plans if plan.bytes <= budget]
    if not fitting:
        raise UserError(
            f"parallel.recompute.budget: activations of blocks may take {budget / GIB:.3g} GiB, but need at least "
            f"{least / GIB:.3g} GiB with all of them recomputed: allow more, lower data.pack_tokens, set "
            "parallel.tile_tokens, or share packs among more ranks (parallel.ulysses, parallel.ring)"
        )
    return min(fitting, key=lambda plan: (plan.seconds, plan.bytes, plan.counts))


def _joined(plan: RecomputePlan, cost: Cost, counts: tuple[int, int, int]) -> RecomputePlan:
    return RecomputePlan(
        (*plan.counts, counts),
        plan.kept + sum(count * kept for count, kept in zip(counts, cost.kept, strict=True)),
        max(plan.transient, cost.transient(counts)),
        plan.seconds + sum(count * seconds for count, seconds in zip(counts, cost.seconds, strict=True)),
    )


def _best(plans: Any) -> list[RecomputePlan]:
    """Return the plans that no other plan with the same transient memory beats in both kept memory and time."""
    by_transient: dict[int, list[RecomputePlan]] = defaultdict(list)
    for plan in plans:
        by_transient[plan.transient].append(plan)
    best = []
    for alike in by_transient.values():
        fastest = float("inf")
        for plan in sorted(alike, key=lambda each: (each.kept, each.seconds)):
            if plan.seconds < fastest:
                fastest = plan.seconds
                best.append(plan)
    return best


def in_order(counts: tuple[int, int, int]) -> list[str]:
    return [mode for mode, count in zip(MODES[::-1], counts[::-1], strict=True) for _ in range(count)]


def count_of(modes: Mapping[str, str]) -> str:
    counts = {mode: list(modes.values()).count(mode) for mode in MODES}
    return "blocks " + ", ".join(f"{count} {mode}" for mode, count in counts.items() if count)
