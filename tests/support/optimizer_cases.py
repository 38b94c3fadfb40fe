"""Shared pieces of training/optimizers/test_optimizers.py and other tests."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from processes import train_in_this_world
from tiny import SHAPE, write_config
from torch.distributed.tensor import distribute_tensor

from omnizoo.config.schema import Config
from omnizoo.models.build import build_model
from omnizoo.parallel.mesh import build_mesh
from omnizoo.parallel.process import Process
from omnizoo.parallelize.parallelize import parallelize_model
from omnizoo.training.optimizers.build import build_optimizer, set_learning_rate

EXPERTS = {"model_type": "qwen3_moe", **SHAPE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MOE = {"config": EXPERTS}
LR, DECAY, STEPS = 1e-2, 0.3, 3
RUN_STEPS, SAVED = 4, 2  # of whole runs
KINDS = {"adamw": {}, "muon": {"split_heads": True}, "adafactor": {}, "lion:Lion": {"betas": [0.9, 0.98]}}


def config_of(folder: Path, kind: str = "adamw", **sections: dict[str, Any]) -> Path:
    optimizer = {"kind": kind, "options": KINDS.get(kind, {}), "weight_decay": DECAY} | sections.pop("optimizer", {})
    train = {"lr": LR, "steps": RUN_STEPS, "packs_per_step": 4} | sections.pop("train", {})
    model = MOE | sections.pop("model", {})
    return write_config(folder, model=model, optimizer=optimizer, train=train, **sections)


def sharded(config: Config, process: Process) -> torch.nn.Module:
    model = build_model(config.model, config.train.precision)
    parallelize_model(model, build_mesh(config, process), config)
    return model


def gradients(shapes: dict[str, torch.Size], dtype: torch.dtype, step: int) -> Iterator[tuple[str, torch.Tensor]]:
    """The same for every layout: whole, drawn in the order of names."""
    dice = torch.Generator().manual_seed(step)
    for name in sorted(shapes):
        yield name, torch.randn(shapes[name], generator=dice, dtype=torch.float64).to(dtype)


def give(model: torch.nn.Module, step: int) -> None:
    parameters = dict(model.named_parameters())
    dtype = next(iter(parameters.values())).dtype
    for name, whole in gradients({name: p.shape for name, p in parameters.items()}, dtype, step):
        p = parameters[name]
        if p.requires_grad:
            p.grad = distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None)


def walk(config: Config, process: Process) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Whole weights before and after a few steps with gradients that are given."""
    model = sharded(config, process)
    optimizer = build_optimizer(model, config)
    before = {name: p.detach().full_tensor().clone() for name, p in model.named_parameters()}
    for step in range(1, STEPS + 1):
        give(model, step)
        set_learning_rate(optimizer, LR / step)
        optimizer.step()
    return before, {name: p.detach().full_tensor() for name, p in model.named_parameters()}


# Whole runs: saved, resumed, resharded.

RUNS = {kind: ["--optimizer.ema", "{decay: 0.9}"] if kind == "muon" else [] for kind in KINDS if kind != "adamw"}
TRAIN = ["--train.precision", "fp64", "--checkpoint.every", str(SAVED), "--checkpoint.keep", "9"]


def train(folder: Path, kind: str, name: str, *args: str) -> None:
    run = [folder / kind / "tiny.yaml", "--log.dir", folder / kind / name, *TRAIN, *RUNS[kind], *args]
    assert train_in_this_world(run) == 0
