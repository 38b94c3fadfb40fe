"""Accelerators run the backward pass in a thread of autograd. A step with `backward` in another thread is the same."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_on_ranks
from tiny import model_config, write_config

import omnizoo
from omnizoo.ops.torch_private import replaced
from omnizoo.parallel.process import Process

STEPS = 2
LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp, accumulation": {"parallel.reduce_each_micro_batch": True},
    "experts, selective recompute": {
        "model.config": model_config("gpt_oss"),
        "parallel.ep": 2,
        "parallel.recompute": "selective",
        "train.losses": [{"kind": "cross_entropy"}, {"kind": "balance", "weight": 0.01}],
    },
    "ulysses, full recompute": {"parallel.ulysses": 2, "parallel.recompute": "full"},
    "ring, tiles": {"parallel.ring": 2, "parallel.tile_tokens": 16},
    "bf16": {"train.precision": "bf16"},
}


@contextmanager
def backward_in_thread() -> Iterator[None]:
    backward = torch.Tensor.backward

    with ThreadPoolExecutor(max_workers=1) as thread:

        def in_thread(loss: torch.Tensor) -> None:
            thread.submit(backward, loss).result()

        with replaced((torch.Tensor, "backward", in_thread)):
            yield


def run_steps(folder: Path, process: Process, settings: dict[str, Any]) -> list[list[float]]:
    """Return loss and gradient norm of each step."""
    overrides = [word for key, value in settings.items() for word in (f"--{key}", json.dumps(value))]
    config = omnizoo.load_config(folder / "tiny.yaml", overrides)
    mesh = omnizoo.build_mesh(config, process)
    model = omnizoo.build_model(config.model, config.train.precision)
    media = omnizoo.read_modalities(model, config.model)
    tokenizer = omnizoo.load_tokenizer(config.model)
    loader = omnizoo.build_loader(config, tokenizer, mesh.rank, mesh.layout.world, **media)
    omnizoo.parallelize_model(model, mesh, config)
    optimizer = omnizoo.build_optimizer(model, config)
    balancer = omnizoo.Balancer(model, mesh, config)
    objective = omnizoo.build_objective(model, mesh, config)
    results = []
    for step in range(1, STEPS + 1):
        result = omnizoo.train_step(objective, optimizer, omnizoo.next_step(loader, balancer), step)
        results.append([result.loss, result.grad_norm])
    return results


def run_layouts(process: Process, folder: Path) -> None:
    results = {}
    for name, settings in LAYOUTS.items():
        in_one_thread = run_steps(folder, process, settings)
        with backward_in_thread():
            results[name] = [in_one_thread, run_steps(folder, process, settings)]
    (folder / f"{process.rank}.json").write_text(json.dumps(results))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[list[float]]]]:
    folder = tmp_path_factory.mktemp("run")
    write_config(folder, train={"packs_per_step": 4, "steps": STEPS})
    result = run_on_ranks(run_layouts, 2, folder)
    assert result.code == 0, result.stderr
    loaded: dict[str, list[list[list[float]]]] = json.loads((folder / "0.json").read_text())
    return loaded


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_backward_in_another_thread_gives_the_same_steps(results: dict[str, Any], layout: str) -> None:
    in_one_thread, in_another_thread = results[layout]
    assert len(in_one_thread) == STEPS
    assert in_one_thread == in_another_thread
