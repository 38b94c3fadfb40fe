"""Measure whether slow rows delay training: reading the row of each step takes 100 ms more.

    python benchmarks/slow_data.py              # some minutes

The same model trains on the same rows in several variants: rows are read between two steps, as in
examples/linear_train.py (`next_step`), or ahead, as in `omnizoo train` (`Prefetcher`); rows are fast or slow; with or
without a loader worker. The time of a step is the median over all rounds.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from omnizoo.balancing.balancer import Balancer
from omnizoo.balancing.prefetch import Prefetcher, next_step
from omnizoo.balancing.step_data import StepData
from omnizoo.config.schema import Config
from omnizoo.data.loading.loader import build_loader
from omnizoo.data.sources.base import RowSource
from omnizoo.models.build import build_model
from omnizoo.models.read_config import load_tokenizer
from omnizoo.parallel.mesh import build_mesh
from omnizoo.parallel.process import process_group
from omnizoo.parallelize.parallelize import parallelize_model
from omnizoo.training.objective import build_objective
from omnizoo.training.optimizers.build import build_optimizer
from omnizoo.training.step import train_step

TOKENIZER = Path(__file__).parents[1] / "examples" / "data" / "tiny" / "tokenizer"
WARMUP, STEPS, ROUNDS = 3, 8, 3
MODEL = {
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "tie_word_embeddings": True,
}


class SlowRows(RowSource):
    """Texts that are longer than half a pack, so that each pack contains exactly one."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 16  # all rows are read at the start, for the fingerprint of the data

    def read(self, row: int) -> dict[str, str]:
        time.sleep(self.seconds)
        return {"text": f"{row} " * 160}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=0.1, help="additional seconds to read a row (default: 0.1)")
    args = parser.parse_args()
    variants = [
        (workers, way, seconds) for workers in (0, 1) for way in ("between", "ahead") for seconds in (0.0, args.seconds)
    ]
    times: dict[tuple[int, str, float], list[float]] = {variant: [] for variant in variants}
    with process_group() as process:
        config = Config.model_validate(
            {
                "model": {"config": MODEL, "tokenizer": str(TOKENIZER)},
                "data": {"sources": [{"rows": "__main__:SlowRows", "options": {"seconds": 0.0}}], "pack_tokens": 1024},
                "train": {"steps": 1000, "packs_per_step": 1},
            }
        )
        mesh = build_mesh(config, process)
        model = build_model(config.model, config.train.precision)
        parallelize_model(model, mesh, config)
        optimizer = build_optimizer(model, config)
        objective = build_objective(model, mesh, config)
        balancer = Balancer(model, mesh, config)
        model.train()
        for round_number in range(ROUNDS):
            for workers, way, seconds in variants:
                source = config.data.sources[0].model_copy(update={"options": {"seconds": seconds}})
                sizes = {"sources": [source], "workers": workers, "look_ahead": 1, "lanes": 1}
                data = config.data.model_copy(update=sizes)
                variant_config = config.model_copy(update={"data": data})
                loader = build_loader(variant_config, load_tokenizer(config.model), mesh.rank, mesh.layout.world)

                def run_steps(next_data: Callable[[], StepData], durations: list[float]) -> None:
                    for step in range(WARMUP + STEPS):
                        start = time.perf_counter()
                        train_step(objective, optimizer, next_data(), step + 1)
                        if step >= WARMUP:
                            durations.append(time.perf_counter() - start)

                if way == "ahead":
                    with Prefetcher(loader, balancer, WARMUP + STEPS) as prefetcher:
                        run_steps(prefetcher.next, times[workers, way, seconds])
                else:
                    run_steps(partial(next_step, loader, balancer), times[workers, way, seconds])
                    loader.close()
            print(f"round {round_number + 1} of {ROUNDS}", flush=True)
    medians = {variant: statistics.median(values) for variant, values in times.items()}
    table = Table(title=f"ms per step; reading a row takes {1000 * args.seconds:.0f} ms more for slow rows")
    for heading in ("data.workers", "rows are read", "fast rows", "slow rows", "difference"):
        table.add_column(heading, justify="right")
    for workers in (0, 1):
        for way in ("between", "ahead"):
            fast, slow = (1000 * medians[workers, way, seconds] for seconds in (0.0, args.seconds))
            table.add_row(str(workers), way, f"{fast:.0f}", f"{slow:.0f}", f"{slow - fast:.0f}")
    Console(width=100).print(table)
    named = {f"{workers} {way} {seconds}": round(1000 * value, 1) for (workers, way, seconds), value in medians.items()}
    print(json.dumps({"benchmark": "slow_data", "threads": torch.get_num_threads(), "ms": named}))


if __name__ == "__main__":
    main()
