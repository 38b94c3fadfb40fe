"""The same step twice: for real on the CPU, over gloo, and dry. Both leave what they found in files.

A dry run gives torch a device of its own for the rest of the process, so it has a process of its own.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from omnizoo.assembly.entrance import read_modalities
from omnizoo.assembly.parallelize import parallelize
from omnizoo.config.errors import UserError
from omnizoo.config.load import load_config
from omnizoo.config.schema import Config
from omnizoo.models.build import build_model
from omnizoo.ops import attention_blocks
from omnizoo.parallel import direct
from omnizoo.parallel.collectives import CollectiveCounter
from omnizoo.parallel.direct import DirectReduceScatter
from omnizoo.parallel.mesh import build_mesh
from omnizoo.planning.backend import replaced
from omnizoo.planning.devices import DEVICES
from omnizoo.planning.ledger import Ledger
from omnizoo.planning.simulate import Place, draw, simulate, vocabulary_of
from omnizoo.training.losses import Objective
from omnizoo.training.optimizer import build_optimizer
from omnizoo.training.step import next_step, train_step

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
    model = build_model(config.model, config.parallel.precision)
    ledger = Ledger(torch.device("cpu"), rounded=False)
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
        (direct, "free_gathered_buffer", lambda _: None),
    )
    with ledger.watching(), replaced(*as_others):
        parallelize(model, mesh, config)
        optimizer = build_optimizer(model, config)
        model.train()
        objective = Objective(model, mesh, config)
        with ledger.muted():
            drawn = draw(config, model, objective, media)
            own = [pack for pack in drawn.packs if pack.index % mesh.layout.world == mesh.rank]
            data = next_step(replace(drawn, packs=own), objective)
        with ledger.following(model, optimizer):
            for step in (1, 2):
                ledger.begin_step()
                with CollectiveCounter() as counter:
                    train_step(objective, optimizer, data, step)
                ledger.end_step(model)
    peak = ledger.peak()
    return {
        "peak": peak.bytes,
        "parts": peak.parts,
        "activations": peak.activations,
        "at": [peak.module, peak.phase],
        "calls": dict(counter.calls),
        "bytes": dict(counter.bytes),
    }


def run_dry(cases: list[Case], world: int, folder: Path) -> None:
    found = []
    for path, overrides in cases:
        config = load_config(path, overrides, needs_data=False)
        try:
            # Blocks of a ring in fp32: with the kernel that the real run has.
            is_fp32 = config.parallel.precision == "fp32"
            with replaced((attention_blocks, "has_cpu_flash", lambda _, said=is_fp32: said)):
                result = simulate(config, Place(world, 0, DEVICES["h100"], rounded=False))
        except UserError as error:
            found.append({"error": str(error)})
            continue
        calls: dict[str, int] = {}
        sent: dict[str, int] = {}
        for collective, (count, size) in result.collectives.items():
            calls[collective.op] = calls.get(collective.op, 0) + count
            sent[collective.op] = sent.get(collective.op, 0) + size
        peak = result.peak
        found.append(
            {
                "peak": peak.bytes,
                "parts": peak.parts,
                "activations": peak.activations,
                "at": [peak.module, peak.phase],
                "calls": calls,
                "bytes": sent,
                "data": result.data,
                "kernels": [[k.name, k.dtype, k.module, calls, size] for k, (calls, size) in result.kernels.items()],
                "syncs": [[sync.where, sync.function, sync.kind, sync.detail] for sync in result.syncs],
            }
        )
    (folder / "dry.json").write_text(json.dumps(found))
