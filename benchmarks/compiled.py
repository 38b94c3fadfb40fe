"""Compare steps with and without compiled blocks (`train.compile`), on the models of the standing benchmark.

    python benchmarks/compiled.py                                    # dense and MoE, one process
    torchrun --standalone --nproc-per-node 2 benchmarks/compiled.py --models dense

Both models start from the same weights and train on the same packs, one step each in turn, so that noise of the machine
affects both equally. Figures are real tokens per CPU second (all ranks) in steps after the first two, and CPU and wall
seconds of the first step, with compilation. Start it twice to measure with a warm cache. For a cold start, set
`TORCHINDUCTOR_CACHE_DIR` to a new folder.
"""

import argparse
import os
import time
from pathlib import Path

import torch
from peers.assets import make_assets

from omnizoo.balancing.balancer import Balancer
from omnizoo.balancing.prefetch import next_step
from omnizoo.balancing.step_data import StepData
from omnizoo.config.load import load_config
from omnizoo.parallel.mesh import build_mesh
from omnizoo.parallel.process import process_group
from omnizoo.parallelize.parallelize import parallelize_model
from omnizoo.training.objective import build_objective
from omnizoo.training.optimizers.build import build_optimizer
from omnizoo.training.setup import build_bundle
from omnizoo.training.step import train_step

WARMUP = 2


class Contestant:
    """A model with its optimizer, and the measurements of its steps."""

    def __init__(self, assets: Path, name: str, compile_blocks: bool, recompute: str) -> None:
        config = load_config(
            {
                "model": {"path": str(assets / name)},
                "data": {"sources": [{"path": str(assets / name / "text.jsonl")}], "pack_tokens": 1024},
                "train": {"packs_per_step": world, "lr": 1e-4, "schedule": "constant", "compile": compile_blocks},
                "parallel": {"recompute": recompute},
            },
            [],
        )
        mesh = build_mesh(config, process)
        assembled = build_bundle(config)
        self.loader = assembled.loader(mesh)
        parallelize_model(assembled.model, mesh, config)
        self.optimizer = build_optimizer(assembled.model, config)
        self.objective = build_objective(assembled.model, mesh, config)
        self.balancer = Balancer(assembled.model, mesh, config)
        assembled.model.train()
        self.steps: list[tuple[float, float, int, float]] = []  # CPU seconds, seconds, tokens, loss

    def step(self, data: StepData) -> None:
        """Train a step and record CPU seconds of all ranks, wall seconds, tokens and loss. Collective."""
        torch.distributed.barrier()
        cpu, wall = cpu_seconds(), time.perf_counter()
        result = train_step(self.objective, self.optimizer, data, len(self.steps) + 1)
        used = torch.tensor(cpu_seconds() - cpu)
        torch.distributed.all_reduce(used)
        self.steps.append((float(used), time.perf_counter() - wall, data.tokens, result.loss))

    def speed(self) -> float:
        """Return real tokens per CPU second, without the first steps."""
        counted = self.steps[WARMUP:]
        return sum(tokens for _, _, tokens, _ in counted) / sum(cpu for cpu, _, _, _ in counted)


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and its finished children."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def run(assets: Path, name: str, steps: int, recompute: str) -> None:
    """Train one model with and without compilation, and print a line on rank 0."""
    plain, compiled = (Contestant(assets, name, on, recompute) for on in (False, True))
    for number in range(steps):
        data = next_step(plain.loader, plain.balancer)
        order = (plain, compiled) if number % 2 else (compiled, plain)
        for contestant in order:
            contestant.step(data)
    if process.rank:
        return
    largest_difference = max(abs(a[3] - b[3]) / abs(a[3]) for a, b in zip(plain.steps, compiled.steps, strict=True))
    first = [contestant.steps[0] for contestant in (plain, compiled)]
    processes = "process" if world == 1 else "processes"
    print(
        f"{name}, {world} {processes}, recompute {recompute}, {steps - WARMUP} steps: {plain.speed():.0f} real tokens "
        f"per CPU second without, {compiled.speed():.0f} with ({compiled.speed() / plain.speed():.2f}x); first step "
        f"{first[0][0]:.0f} and {first[1][0]:.0f} CPU s, {first[0][1]:.0f} and {first[1][1]:.0f} s; losses differ by "
        f"at most {largest_difference:.0e}",
        flush=True,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", default="dense,moe", help="names of models, separated by commas (default: dense,moe)"
    )
    parser.add_argument("--steps", type=int, default=8, help="number of steps (default: 8)")
    parser.add_argument("--recompute", default="none", help="value of parallel.recompute (default: none)")
    parser.add_argument("--assets", type=Path, default=Path(__file__).resolve().parent.parent / "runs" / "bench_assets")
    args = parser.parse_args()
    models = args.models.split(",")
    make_assets(args.assets, models)
    with process_group() as process:
        world = process.world_size
        for model in models:
            run(args.assets, model, args.steps, args.recompute)
