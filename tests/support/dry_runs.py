"""The same step twice: for real on the CPU, over gloo, and dry. Both leave what they found in files.

A dry run gives torch a device of its own for the rest of the process, so it has a process of its own.
"""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from omnizoo.balancing.balancer import Balancer
from omnizoo.balancing.prefetch import next_step
from omnizoo.config.errors import UserError
from omnizoo.config.load import load_config
from omnizoo.config.schema import Config
from omnizoo.models.build import build_model
from omnizoo.models.media.model_inputs import read_modalities
from omnizoo.ops.attention import blocks
from omnizoo.ops.torch_private import replaced
from omnizoo.parallel.fsdp import cpu_collectives
from omnizoo.parallel.fsdp.cpu_collectives import DirectReduceScatter
from omnizoo.parallel.mesh import build_mesh
from omnizoo.parallelize.parallelize import parallelize_model
from omnizoo.planning.devices import DEVICES
from omnizoo.planning.dry_run import Place, choose_packs, simulate, vocabulary_of
from omnizoo.planning.memory_tracker import MemoryTracker
from omnizoo.planning.traffic import Collective, Traffic
from omnizoo.training.objective import build_objective
from omnizoo.training.optimizers.build import build_optimizer
from omnizoo.training.step import train_step

Case = tuple[str, list[str]]  # a config, and its overrides


def run_real(process: Any, cases: list[Case], folder: Path) -> None:
    """Peak of memory and what was sent, of the second step, by the tensors that were really made."""
    found = []
    for path, overrides in cases:
        config = load_config(path, overrides)
        found.append(measure(config, process))
    if process.rank == 0:
        (folder / "real.json").write_text(json.dumps(found))


def measure(config: Config, process: Any) -> dict[str, Any]:
    mesh = build_mesh(config, process)
    model = build_model(config.model, config.train.precision)
    ledger = MemoryTracker(torch.device("cpu"), rounded=False)
    ledger.vocabulary = vocabulary_of(model)
    media = read_modalities(model, config.model)
    scatter = DirectReduceScatter.__call__

    def without_copy(*args: Any, **kwargs: Any) -> Any:
        with ledger.muted():  # CPUs receive gradients before they add them up; NCCL does not
            return scatter(*args, **kwargs)

    # Nor is anything freed before FSDP2 frees it.
    as_others = (
        (DirectReduceScatter, "__call__", without_copy),
        (DirectReduceScatter, "free", lambda *_: None),
        (cpu_collectives, "free_gathered_buffer", lambda _: None),
    )
    with ledger.watching(), replaced(*as_others):
        parallelize_model(model, mesh, config)
        optimizer = build_optimizer(model, config)
        model.train()
        objective = build_objective(model, mesh, config)
        balancer = Balancer(model, mesh, config)
        with ledger.muted():
            drawn = choose_packs(config, model, balancer, media)
            own = [pack for pack in drawn.packs if pack.index % mesh.layout.world == mesh.rank]
            data = next_step(replace(drawn, packs=own), balancer)
        with ledger.following(model, optimizer):
            for step in (1, 2):
                ledger.begin_step()
                with Traffic(mesh, DEVICES["h100"].per_node) as traffic:
                    train_step(objective, optimizer, data, step)
                ledger.end_step(model)
    peak = ledger.peak()
    return {
        "peak": peak.bytes,
        "parts": peak.parts,
        "activations": peak.activations,
        "at": [peak.module, peak.phase],
        **by_axis(traffic.calls, traffic.bytes),
    }


def by_axis(counts: Mapping[Collective, int], sizes: Mapping[Collective, int]) -> dict[str, Any]:
    """Calls and bytes by collective and axis of the mesh."""
    calls: Counter[str] = Counter()
    sent: Counter[str] = Counter()
    for collective, count in counts.items():
        calls[f"{collective.op} {collective.axis}"] += count
        sent[f"{collective.op} {collective.axis}"] += sizes[collective]
    return {"calls": dict(calls), "bytes": dict(sent)}


def run_dry(cases: list[Case], world: int, folder: Path) -> None:
    found = []
    for path, overrides in cases:
        config = load_config(path, overrides, needs_data=False)
        try:
            # Blocks of a ring in fp32: with the kernel that the real run has.
            is_fp32 = config.train.precision == "fp32"
            with replaced((blocks, "is_host", lambda _, said=is_fp32: said)):
                result = simulate(config, Place(world, 0, DEVICES["h100"], rounded=False))
        except UserError as error:
            found.append({"error": str(error)})
            continue
        counts = {each: count for each, (count, _) in result.collectives.items()}
        sizes = {each: size for each, (_, size) in result.collectives.items()}
        peak = result.peak
        found.append(
            {
                "peak": peak.bytes,
                "parts": peak.parts,
                "activations": peak.activations,
                "at": [peak.module, peak.phase],
                **by_axis(counts, sizes),
                "data": result.data,
                "kernels": [[k.name, k.dtype, k.module, calls, size] for k, (calls, size) in result.kernels.items()],
                "syncs": [[sync.where, sync.function, sync.kind, sync.detail] for sync in result.syncs],
            }
        )
    (folder / "dry.json").write_text(json.dumps(found))
