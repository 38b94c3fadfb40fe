"""Measure the same step in a real run on the CPU with gloo and in a dry run. Both write their results to files.

A dry run registers a device in torch for the rest of the process, so it runs in a separate process.
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
    """Measure peak memory and collectives of the second step of each case."""
    results = []
    for path, overrides in cases:
        config = load_config(path, overrides)
        results.append(measure(config, process))
    if process.rank == 0:
        (folder / "real.json").write_text(json.dumps(results))


def measure(config: Config, process: Any) -> dict[str, Any]:
    mesh = build_mesh(config, process)
    model = build_model(config.model, config.train.precision)
    ledger = MemoryTracker(torch.device("cpu"), rounded=False)
    ledger.vocabulary = vocabulary_of(model)
    media = read_modalities(model, config.model)
    scatter = DirectReduceScatter.__call__

    def without_copy(*args: Any, **kwargs: Any) -> Any:
        with ledger.muted():  # the CPU reduce-scatter buffers gradients before it adds them; NCCL does not
            return scatter(*args, **kwargs)

    # With NCCL, only FSDP2 frees buffers.
    like_nccl = (
        (DirectReduceScatter, "__call__", without_copy),
        (DirectReduceScatter, "free", lambda *_: None),
        (cpu_collectives, "free_gathered_buffer", lambda _: None),
    )
    with ledger.watching(), replaced(*like_nccl):
        parallelize_model(model, mesh, config)
        optimizer = build_optimizer(model, config)
        model.train()
        objective = build_objective(model, mesh, config)
        balancer = Balancer(model, mesh, config)
        with ledger.muted():
            step_packs = choose_packs(config, model, balancer, media)
            local_packs = [pack for pack in step_packs.packs if pack.index % mesh.layout.world == mesh.rank]
            data = next_step(replace(step_packs, packs=local_packs), balancer)
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
    """Return calls and bytes by collective and mesh axis."""
    calls: Counter[str] = Counter()
    sent: Counter[str] = Counter()
    for collective, count in counts.items():
        calls[f"{collective.op} {collective.axis}"] += count
        sent[f"{collective.op} {collective.axis}"] += sizes[collective]
    return {"calls": dict(calls), "bytes": dict(sent)}


def run_dry(cases: list[Case], world: int, folder: Path) -> None:
    """Plan each case."""
    results = []
    for path, overrides in cases:
        config = load_config(path, overrides, needs_data=False)
        try:
            # For ring attention in fp32, use the kernel of the real run.
            is_fp32 = config.train.precision == "fp32"
            with replaced((blocks, "is_host", lambda _, result=is_fp32: result)):
                result = simulate(config, Place(world, 0, DEVICES["h100"], rounded=False))
        except UserError as error:
            results.append({"error": str(error)})
            continue
        counts = {collective: count for collective, (count, _) in result.collectives.items()}
        sizes = {collective: size for collective, (_, size) in result.collectives.items()}
        peak = result.peak
        results.append(
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
    (folder / "dry.json").write_text(json.dumps(results))
