"""Steps on slow data: reading the row of a step takes 100 ms more. Is that hidden behind the computation?

    python benchmarks/slow_data.py              # some minutes

The same model trains the same rows in turn: read between two steps, as the loop by hand does it (`next_step`), and a
step ahead, as `omnizoo train` does (`Ahead`); with fast and with slow rows, without and with a loader worker. The time
of a step is its median over all turns.
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
WARMUP, STEPS, TURNS = 3, 8, 3
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
    """Texts of more than half a pack, so that each pack has one of them."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 16  # each is read at the start, to know the data again

    def read(self, row: int) -> dict[str, str]:
        time.sleep(self.seconds)
        return {"text": f"{row} " * 160}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=0.1, help="that reading a row takes longer")
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
        for turn in range(TURNS):
            for workers, way, seconds in variants:
                source = config.data.sources[0].model_copy(update={"options": {"seconds": seconds}})
                sizes = {"sources": [source], "workers": workers, "look_ahead": 1, "lanes": 1}
                data = config.data.model_copy(update=sizes)
                reading = config.model_copy(update={"data": data})
                loader = build_loader(reading, load_tokenizer(config.model), mesh.rank, mesh.layout.world)

                def steps(give: Callable[[], StepData], into: list[float]) -> None:
                    for step in range(WARMUP + STEPS):
                        started = time.perf_counter()
                        train_step(objective, optimizer, give(), step + 1)
                        into += [time.perf_counter() - started] * (step >= WARMUP)

                if way == "ahead":
                    with Prefetcher(loader, balancer, WARMUP + STEPS) as ahead:
                        steps(ahead.next, times[workers, way, seconds])
                else:
                    steps(partial(next_step, loader, balancer), times[workers, way, seconds])
                    loader.close()
            print(f"turn {turn + 1} of {TURNS}", flush=True)
    medians = {variant: statistics.median(values) for variant, values in times.items()}
    table = Table(title=f"ms per step; reading a row takes {1000 * args.seconds:.0f} ms more, or not")
    for heading in ("data.workers", "read", "fast rows", "slow rows", "difference"):
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
