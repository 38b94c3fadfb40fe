"""OmniZoo against a hand-written FSDP2 loop (`plain_fsdp2.py`): the same model, weights and packs, in the same run.

    python benchmarks/against_plain.py          # or `make bench`

Each round trains one step with each of three loops, in an order that rotates, so that noise of the machine hits all
alike: OmniZoo (its loader included), the plain loop with transformers' `sdpa` attention over a packed mask, and the
plain loop with OmniZoo's attention kernel, which shows what the rest of OmniZoo costs. The plain loops are handed packs
that are ready, which is in their favour. All three start from the same weights; the benchmark fails if losses part.
Run it on an idle machine: where cores are shared, OpenMP threads wait for each other and the ratios mean little.
"""

import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import plain_fsdp2
import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config

from omnizoo.assembly.parallelize import parallelize
from omnizoo.config.schema import Config
from omnizoo.data.loader import build_loader
from omnizoo.models.attention import PACKED
from omnizoo.models.build import build_model, load_tokenizer
from omnizoo.parallel.mesh import build_mesh
from omnizoo.parallel.process import process_group
from omnizoo.training.losses import Objective
from omnizoo.training.optimizer import build_optimizer
from omnizoo.training.step import StepData, next_step, train_step

PROCESSES = {1: 2, 2: 1}  # how many: threads of each
WARMUP, LEAST = 1, 3  # rounds of three steps each: those that do not count, and how many at least do
BUDGET = 75.0  # seconds of rounds for each number of processes
GOAL = 0.97
LR = 3e-4
TOLERANCE = 1e-4  # relative, on every loss
MODEL = {
    "model_type": "qwen3",
    "vocab_size": 32768,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 14,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "tie_word_embeddings": True,
}  # 60.8 M parameters

Loop = Callable[[StepData], float]  # one step; returns its loss


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_data(folder)
        results = [measure(folder, processes, threads) for processes, threads in PROCESSES.items()]
    show(results)
    print(json.dumps({"benchmark": "against_plain", "goal": GOAL, "results": results}))
    return 0 if all(result["losses_agree"] for result in results) else 1


def measure(folder: Path, processes: int, threads: int) -> dict:
    out = folder / f"result{processes}.json"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    env = os.environ | {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    subprocess.run([*torchrun, __file__, str(folder), str(out)], env=env, check=True)
    return json.loads(out.read_text()) | {"threads": threads}


def write_data(folder: Path) -> None:
    """Rows of made-up words, 250 tokens on average with a long tail, and a byte-level BPE that knows the words."""
    rng = random.Random(0)
    words = ["".join(rng.choices("etaoinshrdlu", k=rng.randint(2, 9))) for _ in range(3000)]
    lengths = [1 + int(rng.lognormvariate(5.2, 0.8)) for _ in range(3000)]
    rows = [" ".join(rng.choices(words, k=length)) for length in lengths]
    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=8192, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(rows, trainer)
    PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<eos>").save_pretrained(folder / "tokenizer")


def rank(folder: Path, out: Path) -> None:
    """What each process runs: the three loops in turn, round after round."""
    with process_group() as process:
        config = Config.model_validate(
            {
                "model": {"config": MODEL, "tokenizer": str(folder / "tokenizer")},
                "data": {"sources": [{"path": str(folder / "rows.jsonl")}], "pack_tokens": 1024},
                "train": {
                    "steps": 1000,
                    "global_batch": process.world_size,
                    "lr": LR,
                    "schedule": "constant",
                },
                "optimizer": {"no_decay": ["norm", "bias"]},
            }
        )
        mesh = build_mesh(config, process)
        loader = build_loader(config, load_tokenizer(config.model), mesh.rank, mesh.layout.world)
        model = build_model(config.model, config.parallel.precision)
        parallelize(model, mesh, config)
        optimizer = build_optimizer(model, config)
        objective = Objective(model, mesh, config)
        model.train()
        loops: dict[str, Loop] = {
            "omnizoo": lambda data: train_step(objective, optimizer, data, 1).loss,
            "plain_sdpa": plain(model, "sdpa"),
            "plain_same_kernel": plain(model, PACKED),
        }
        seconds: dict[str, list[float]] = {name: [] for name in loops}
        losses: dict[str, list[float]] = {name: [] for name in loops}
        tokens: list[int] = []
        names = list(loops)
        for _ in range(config.data.lanes):
            next_step(loader, objective)  # each lane fills its look-ahead once: part of the start, not of a step
        began = time.perf_counter()
        for turn in itertools.count():
            # The first rank's clock decides for all.
            if mesh.from_first(turn >= WARMUP + LEAST and time.perf_counter() - began > BUDGET):
                break
            started = time.perf_counter()
            data = next_step(loader, objective)
            loading = time.perf_counter() - started
            tokens.append(data.tokens)
            for name in names[turn % 3 :] + names[: turn % 3]:
                torch.distributed.barrier()
                started = time.perf_counter()
                losses[name].append(loops[name](data))
                torch.distributed.barrier()
                seconds[name].append(time.perf_counter() - started + (loading if name == "omnizoo" else 0.0))
            if mesh.is_first:
                times = "  ".join(f"{name} {seconds[name][-1]:.2f} s" for name in names)
                print(f"{process.world_size} process(es), round {turn}: {times}", flush=True)
        loader.close()
        if mesh.is_first:
            out.write_text(json.dumps(summary(process.world_size, tokens, seconds, losses)))


def plain(source: PreTrainedModel, attention: str) -> Loop:
    """A plain loop that starts from the weights of `source`, which is sharded in the same way."""
    mesh = next(source.parameters()).device_mesh
    model = plain_fsdp2.build(Qwen3Config(**MODEL), attention, mesh)
    with torch.no_grad():
        for mine, given in zip(model.parameters(), source.parameters(), strict=True):
            mine.to_local().copy_(given.to_local())
    optimizer = plain_fsdp2.build_optimizer(model, LR)

    def step(data: StepData) -> float:
        (batch,) = data.micro_batches
        boundaries = batch.cu_seqlens if attention == PACKED else None
        pack = (batch.input_ids, batch.position_ids, batch.labels)
        return plain_fsdp2.train_step(model, optimizer, *pack, boundaries)[0]

    return step


def summary(
    processes: int, tokens: list[int], seconds: dict[str, list[float]], losses: dict[str, list[float]]
) -> dict[str, object]:
    kept = {name: values[WARMUP:] for name, values in seconds.items()}
    reference = losses.pop("omnizoo")
    apart = max(abs(a - b) / b for other in losses.values() for a, b in zip(reference, other, strict=True))
    ratios = {
        name: sorted(theirs / ours for ours, theirs in zip(kept["omnizoo"], kept[name], strict=True)) for name in losses
    }
    speeds = {
        name: statistics.median(count / time for count, time in zip(tokens[WARMUP:], times, strict=True))
        for name, times in kept.items()
    }
    return {
        "processes": processes,
        "rounds": len(tokens) - WARMUP,
        "tokens_per_sec": {name: round(speed, 1) for name, speed in speeds.items()},
        "ratio": {
            name: {
                "median": round(statistics.median(values), 4),
                "min": round(values[0], 4),
                "max": round(values[-1], 4),
            }
            for name, values in ratios.items()
        },
        "loss_difference": apart,
        "losses_agree": apart < TOLERANCE,
    }


def show(results: list[dict]) -> None:
    table = Table(title=f"OmniZoo against plain FSDP2 (real tokens/s, median over rounds; goal {GOAL})")
    for heading in ("processes", "loop", "tokens/s", "OmniZoo / loop", "min - max", "losses"):
        table.add_column(heading, justify="left" if heading == "loop" else "right")
    for result in results:
        for i, (name, speed) in enumerate(result["tokens_per_sec"].items()):
            ratio = result["ratio"].get(name)
            table.add_row(
                f"{result['processes']} x {result['threads']} thread(s)" if i == 0 else "",
                name,
                f"{speed:.0f}",
                f"{ratio['median']:.3f}" if ratio else "",
                f"{ratio['min']:.3f} - {ratio['max']:.3f}" if ratio else "",
                f"within {result['loss_difference']:.0e}" if i == 0 else "",
                end_section=i == 2,
            )
    console = Console()
    if not console.is_terminal:
        console.width = 120
    console.print(table)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        sys.exit(main())
    rank(Path(sys.argv[1]), Path(sys.argv[2]))
