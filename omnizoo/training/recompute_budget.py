"""`parallel.recompute: {budget: ...}`: which blocks recompute their activations, so that all of them fit and the least
is computed twice.

One block of each kind is measured, on packs of the run: what it keeps for backward and what it would take to compute
again. Ranks agree on the dearest of them. The choice is kept in checkpoints, so that a run goes on as it was.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from omnizoo.assembly.recompute import MODES, measuring, set_modes, switches
from omnizoo.config.errors import UserError
from omnizoo.config.run_sections import RecomputeBudget
from omnizoo.config.schema import Config
from omnizoo.ops.device import PLANNED, is_host, total_memory
from omnizoo.ops.precision import exact
from omnizoo.parallel.mesh import Mesh
from omnizoo.parallel.shard import release
from omnizoo.training.losses import Objective
from omnizoo.training.step import StepData

GIB = 2**30


@dataclass(frozen=True)
class Cost:
    """Of one block of a kind, in one micro-batch."""

    kept: tuple[int, int, int]  # bytes between forward and backward, by mode
    seconds: tuple[float, float, float]  # to compute again, by mode

    def transient(self, counts: tuple[int, int, int]) -> int:
        """Bytes that come back while one block is computed again, and are not made up for by blocks of the kind that
        keep more: those run last, so they are done by then."""
        most = done = 0
        for kept, count in zip(self.kept, counts, strict=True):
            if count:
                most, done = max(most, self.kept[0] - kept - done), done + count * kept
        return most


@dataclass(frozen=True)
class Plan:
    """How many blocks of each kind are in each mode, and what that takes."""

    counts: tuple[tuple[int, int, int], ...]
    kept: int
    transient: int
    seconds: float

    @property
    def bytes(self) -> int:
        return self.kept + self.transient


def settle(objective: Objective, data: StepData, saved: Mapping[str, Any] | None, memory: int | None = None) -> str:
    """Let the blocks of the model recompute as the budget of the config allows, and say how; nothing without a budget.

    `saved`: what `chosen` gave to the checkpoint that the run goes on from. All ranks must call.
    """
    model, config, mesh = objective.model, objective.config, objective.mesh
    if not isinstance(config.parallel.recompute, RecomputeBudget):
        return str(config.parallel.recompute)
    found = switches(model)
    here = conditions(config, mesh)
    if saved is not None and saved["for"] == here and saved["modes"].keys() == found.keys():
        set_modes(model, saved["modes"])
        return f"as the checkpoint says: {count_of(saved['modes'])}"
    budget = allowed(config.parallel.recompute.budget, memory or memory_of(mesh))
    costs = measure(objective, data)
    members: dict[Any, list[str]] = defaultdict(list)
    for name, switch in found.items():
        members[switch.kind].append(name)
    kinds = [kind for kind in members if kind in costs]  # a part that this step has no items for is not run
    plan = choose([costs[kind] for kind in kinds], [len(members[kind]) for kind in kinds], budget)
    modes = dict.fromkeys(found, "full")
    for kind, counts in zip(kinds, plan.counts, strict=True):
        # Those that keep most come last: they are done when the first ones are computed again.
        for name, mode in zip(members[kind], in_order(counts), strict=True):
            modes[name] = mode
    set_modes(model, modes)
    return (
        f"{count_of(modes)}: {plan.bytes / GIB:.3g} of {budget / GIB:.3g} GiB, {plan.seconds:.2g} s more a micro-batch"
    )


def chosen(model: nn.Module, config: Config, mesh: Mesh) -> dict[str, Any]:
    """For a checkpoint; nothing without a budget."""
    if not isinstance(config.parallel.recompute, RecomputeBudget):
        return {}
    modes = {name: switch.mode for name, switch in switches(model).items()}
    return {"recompute": {"for": conditions(config, mesh), "modes": modes}}


def conditions(config: Config, mesh: Mesh) -> str:
    """What a choice was made for."""
    parallel, budget = config.parallel, config.parallel.recompute
    assert isinstance(budget, RecomputeBudget)
    sizes = f"{config.data.pack_tokens} tokens x {config.train.micro_batch}, tiles {parallel.tile_tokens}"
    return f"{mesh.layout}, {parallel.precision}, {sizes}, budget {budget.budget:g}"


def memory_of(mesh: Mesh) -> int:
    """Of this rank; ranks on the host share it."""
    return total_memory(mesh.device) // (mesh.layout.world if is_host(mesh.device) else 1)


def allowed(budget: float, memory: int) -> int:
    return int(budget * memory if budget <= 1 else budget * GIB)


def measure(objective: Objective, data: StepData) -> dict[Any, Cost]:
    """By kind of block; the most of any rank. It runs one micro-batch forward, and leaves nothing behind."""
    config, mesh = objective.config, objective.mesh
    objective.begin_step(data.micro_batches, data.mismatched)
    torch.manual_seed(config.train.seed)
    with measuring(objective.model) as found, torch.no_grad(), exact(config.parallel.precision):
        objective.terms(data.micro_batches[0])
    objective.take_statistics()
    release(objective.model)
    own = [
        ([meters[mode].kept for mode in MODES], [0.0, meters["none"].cheap_seconds, meters["none"].seconds])
        if meters
        else None
        for meters in found.values()
    ]
    everyone = [own] if mesh.device.type == PLANNED else mesh.from_first(mesh.gather(own))
    costs = {}
    for kind, ranks in zip(found, zip(*everyone, strict=True), strict=True):
        if any(rank is not None for rank in ranks):
            kept, seconds = zip(*(rank for rank in ranks if rank is not None), strict=True)
            costs[kind] = Cost(_most(kept), _most(seconds))
    return costs


def _most(values: Sequence[Sequence[Any]]) -> Any:
    return tuple(max(column) for column in zip(*values, strict=True))


def choose(costs: Sequence[Cost], blocks: Sequence[int], budget: int) -> Plan:
    """The least time within the budget, of all ways there are."""
    plans = [Plan((), 0, 0, 0.0)]
    for cost, count in zip(costs, blocks, strict=True):
        plans = _best(_joined(plan, cost, counts) for plan in plans for counts in _ways(count))
    least = min(plan.bytes for plan in plans)
    fitting = [plan for plan in plans if plan.bytes <= budget]
    if not fitting:
        raise UserError(
            f"parallel.recompute.budget: activations of blocks may take {budget / GIB:.3g} GiB, but need at least "
            f"{least / GIB:.3g} GiB with all of them recomputed: allow more, lower data.pack_tokens, set "
            "parallel.tile_tokens, or share packs among more ranks (parallel.ulysses, parallel.ring)"
        )
    return min(fitting, key=lambda plan: (plan.seconds, plan.bytes, plan.counts))


def _ways(blocks: int) -> list[tuple[int, int, int]]:
    return [(none, some, blocks - none - some) for none in range(blocks + 1) for some in range(blocks - none + 1)]


def _joined(plan: Plan, cost: Cost, counts: tuple[int, int, int]) -> Plan:
    return Plan(
        (*plan.counts, counts),
        plan.kept + sum(count * kept for count, kept in zip(counts, cost.kept, strict=True)),
        max(plan.transient, cost.transient(counts)),
        plan.seconds + sum(count * seconds for count, seconds in zip(counts, cost.seconds, strict=True)),
    )


def _best(plans: Any) -> list[Plan]:
    """Without those that another one beats: it keeps no more, has no more come back, and takes no more time."""
    by_transient: dict[int, list[Plan]] = defaultdict(list)
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
