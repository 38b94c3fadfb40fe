"""Compare the speed of loading published weights with plain reading of the same files.

    python benchmarks/start.py                  # 1.5 GB of random weights in a temporary folder
    python benchmarks/start.py --experts        # a mixture of experts
    python benchmarks/start.py --folder DIR     # your own weights

Each round reads the files from the page cache with plain `readinto`, then loads them into a model that is sharded over
1 or 2 ranks, as a run does. The best round counts. Each of 2 ranks reads and keeps its half. CPU seconds are those of
the slowest rank; they vary less than wall time on a shared machine.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

ROUNDS = 5
GOAL = 0.7  # goal for loading speed / reading speed
PAGE = 1024  # fp32 numbers per memory page
MODEL = {
    "model_type": "qwen3",
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "tie_word_embeddings": False,
}
# The files contain the weights of each expert separately; the model has them in one tensor.
EXPERTS = MODEL | {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 6,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 1024,
}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, help="Hugging Face folder to load (default: random weights)")
    parser.add_argument("--experts", action="store_true", help="use a mixture of experts")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"number of rounds (default: {ROUNDS})")
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_of:
        run_rank(args.rank_of, args.rounds)
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or write_model(Path(temporary), EXPERTS if args.experts else MODEL)
        results = [measure(folder, processes, args.rounds) for processes in (1, 2)]
    heads = ("ranks", "GB per rank", "read GB/s", "load GB/s", "ratio", "read CPU s", "load CPU s", "ratio")
    print("".join(f"{head:>12}" for head in heads))
    for r in results:
        size = r["bytes"] / 1e9
        figures = (size, size / r["read"], size / r["load"], r["read"] / r["load"])
        figures += (r["read_cpu"], r["load_cpu"], r["read_cpu"] / r["load_cpu"])
        print(f"{r['ranks']:>12}" + "".join(f"{figure:>12.2f}" for figure in figures))
    print(json.dumps({"benchmark": "start", "goal": GOAL, "results": results}))
    return 0


def write_model(folder: Path, model: dict) -> Path:
    """Write a model with random weights, and return its folder."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**model)).save_pretrained(folder)
    return folder


def measure(folder: Path, processes: int, rounds: int) -> dict:
    """Start the ranks, and return the results of rank 0."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    env = os.environ | {"OMP_NUM_THREADS": str(max(1, 2 // processes))}
    command = [*torchrun, __file__, "--rank-of", str(folder), "--rounds", str(rounds)]
    done = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def run_rank(folder: Path, rounds: int) -> None:
    """Measure on this rank. Rank 0 prints the slowest times as JSON."""
    from transformers.utils import logging

    from omnizoo.config.load import load_config
    from omnizoo.models.build import build_model
    from omnizoo.parallel.fsdp.sharded_tensors import local_bytes
    from omnizoo.parallel.mesh import build_mesh
    from omnizoo.parallel.process import process_group
    from omnizoo.parallelize.parallelize import parallelize_model

    logging.disable_progress_bar()
    settings = {"model": {"path": str(folder)}, "data": {"sources": [{"path": "none.jsonl"}]}}
    with process_group() as process:
        config = load_config(settings)
        mesh = build_mesh(config, process)
        files = sorted(folder.glob("*.safetensors"))
        times = {"read": [], "load": [], "read_cpu": [], "load_cpu": []}
        num_bytes = 0
        for _ in range(rounds):
            # Read this rank's part of the files into newly allocated memory, as weights are.
            dist.barrier()
            start, start_cpu = time.perf_counter(), time.process_time()
            parts = [read(file, mesh.rank, mesh.layout.world) for file in files]
            dist.barrier()
            times["read"].append(time.perf_counter() - start)
            times["read_cpu"].append(time.process_time() - start_cpu)
            del parts
            model = build_model(config.model, "fp32")
            finished: dict[str, float] = {}  # wall and CPU time at the end of each part

            def done(part: str, finished: dict[str, float] = finished) -> None:
                dist.barrier()
                finished[part] = time.perf_counter()
                finished[part + "_cpu"] = time.process_time()

            parallelize_model(model, mesh, config, done=done)
            # Weights may still be mapped pages of the file, which the first update would copy: write to each page now.
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.to_local().view(-1)[::PAGE].mul_(1)
            dist.barrier()
            times["load"].append(time.perf_counter() - finished["shard"])
            times["load_cpu"].append(time.process_time() - finished["shard_cpu"])
            num_bytes = local_bytes(model)
            del model
        best = {name: min(values) for name, values in times.items()}
        worst = {name: max(row) for name, row in zip(best, zip(*gather_values(best), strict=True), strict=True)}
        if mesh.is_first:
            print(json.dumps({"ranks": mesh.layout.world, "bytes": num_bytes} | worst))


def gather_values(best: dict[str, float]) -> list[list[float]]:
    """Return the values of all ranks. Collective: all ranks must call it."""
    out: list = [None] * dist.get_world_size()
    dist.all_gather_object(out, list(best.values()))
    return out


def read(file: Path, rank: int, world: int) -> np.ndarray:
    """Read the part of a file that belongs to `rank`."""
    size = file.stat().st_size
    first, last = size * rank // world, size * (rank + 1) // world
    buffer = np.empty(last - first, np.uint8)
    view = memoryview(buffer)
    with open(file, "rb", buffering=0) as raw:
        raw.seek(first)
        at = 0
        while at < len(view):
            at += raw.readinto(view[at : at + 2**24])
    return buffer


if __name__ == "__main__":
    sys.exit(main())
