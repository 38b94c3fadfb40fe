"""Fit the time model of `omnizoo plan` to published runs, and report its errors.

    python benchmarks/calibrate.py

benchmarks/published_runs.csv has 20 runs of two dense models on 128 devices of 80 GB (arXiv 2508.02317, appendix). Each
model and layout is planned with 2 and 4 layers and with 8,192 and 16,384 tokens per rank, and extrapolated linearly:
all counts grow by the same amount with each layer and each token. Attention is the exception; its number of pairs is
computed exactly. The fractions of the data-sheet speeds are fitted to each model and tested on the other one.
"""

import argparse
import csv
import itertools
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any

import yaml

from omnizoo.cli.plan import quiet
from omnizoo.config.load import load_config
from omnizoo.modalities.flop_count import causal_pairs
from omnizoo.planning.devices import DEVICES
from omnizoo.planning.dry_run import Place, Result, simulate
from omnizoo.planning.time_model import Counts, Expected, Shares, counts_of, expect
from omnizoo.planning.traffic import Collective

RUNS = Path(__file__).parent / "published_runs.csv"
WORLD, GIB = 128, 2**30
CUTS, TOKENS = (2, 4), (8192, 16384)  # planned numbers of layers, and of tokens per rank
MODELS: dict[str, dict[str, Any]] = {
    "qwen2-7b": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
    "qwen2.5-32b": {
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "num_hidden_layers": 64,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
    },
}


def planned(name: str, ulysses: int, tokens: int, layers: int) -> dict[str, float]:
    """Plan a model with this number of layers on packs of `tokens` tokens. Returns counts and peak memory."""
    model = MODELS[name] | {"num_hidden_layers": layers, "model_type": "qwen2", "vocab_size": 152064}
    model |= {"tie_word_embeddings": False, "max_position_embeddings": 131072}
    config = {
        "model": {"config": model},
        "data": {"pack_tokens": tokens},
        # With few layers, the default would keep all weights gathered, unlike with all layers.
        "parallel": {"recompute": "full", "ulysses": ulysses, "reshard_after_forward": True},
        "train": {"steps": 10, "packs_per_step": WORLD // ulysses, "lr": 1e-5, "precision": "bf16"},
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.yaml"
        path.write_text(yaml.safe_dump(config))
        return numbers_of(
            simulate(load_config(str(path), [], needs_data=False), Place(WORLD, 0, DEVICES["h100"])), WORLD
        )


def numbers_of(result: Result, world: int) -> dict[str, float]:
    """Return all counts by name, for linear extrapolation."""
    counts = counts_of(result, world)
    numbers = {"moved": counts.moved, "launched": counts.launched, "syncs": counts.syncs, "peak": result.peak.bytes}
    numbers |= {"attention": counts.attention, "flops": result.flops, "tokens": counts.tokens}
    sent = {json.dumps(asdict(each)): size for each, size in counts.sent.items()}
    return numbers | {f"matmuls {kind}": flops for kind, flops in counts.matmuls.items()} | sent


def counts_in(numbers: Mapping[str, float]) -> Counts:
    """Convert the output of `numbers_of` back to counts."""
    return Counts(
        matmuls={key.removeprefix("matmuls "): n for key, n in numbers.items() if key.startswith("matmuls ")},
        attention=numbers["attention"],
        moved=numbers["moved"],
        sent={Collective(**json.loads(key)): size for key, size in numbers.items() if key.startswith("{")},
        launched=int(numbers["launched"]),
        syncs=int(numbers["syncs"]),
        tokens=numbers["tokens"],
    )


def on_a_line(points: Sequence[float], values: Sequence[dict[str, float]], target: float) -> dict[str, float]:
    """Extrapolate linearly from the values at two points to those at `target`."""
    share = (target - points[0]) / (points[1] - points[0])
    return {key: values[0][key] + share * (values[1][key] - values[0][key]) for key in values[1]}


def extended(corners: Sequence[Sequence[dict[str, float]]], row: dict[str, str]) -> tuple[Counts, float]:
    """Extrapolate plans to a published run, and return its counts and its peak in GiB.

    `corners` are indexed by number of layers, then by number of tokens.
    """
    tokens, ulysses, layers = (
        int(row["sequence_tokens"]),
        int(row["ulysses"]),
        MODELS[row["model"]]["num_hidden_layers"],
    )
    per_layers = [on_a_line(TOKENS, by_tokens, tokens / ulysses) for by_tokens in corners]
    numbers = on_a_line(CUTS, per_layers, layers)
    attention = on_a_line(CUTS, [by_tokens[0] for by_tokens in corners], layers)["attention"]
    pairs = causal_pairs(tokens, None) / causal_pairs(TOKENS[0] * ulysses, None)  # grows quadratically
    return counts_in(numbers | {"attention": attention * pairs}), numbers["peak"] / GIB


def error(expected: Expected, row: dict[str, str]) -> float:
    """Return the relative error of the predicted tokens per second."""
    return expected.tokens_per_second / float(row["tokens_per_sec_per_gpu"]) - 1


def fitted(runs: list[tuple[dict[str, str], Counts]]) -> Shares:
    """Return the fractions with the least squared error, by search on a coarse grid and then on a fine one."""

    def squared_error(shares: Shares) -> float:
        total = 0.0
        for row, counts in runs:
            expected = expect(counts, DEVICES["h100"], shares)
            if expected:
                total += error(expected, row) ** 2
        return total

    best = Shares(0.5, 0.5, 0.5)
    for width, step in ((0.5, 0.05), (0.05, 0.01)):
        offsets = [round(i * step, 2) for i in range(round(-width / step), round(width / step) + 1)]
        shifted = [
            [round(a + b, 2) for a, b in zip(astuple(best), change, strict=True)]
            for change in itertools.product(offsets, repeat=3)
        ]
        candidates = [Shares(*values) for values in shifted if all(0 < value <= 1 for value in values)]
        best = min(candidates, key=squared_error)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", type=Path, help="JSON file that caches the counts of plans")
    options = parser.parse_args()
    quiet()
    rows = list(csv.DictReader(RUNS.open(encoding="utf-8")))
    cached: dict[str, dict[str, float]] = {}
    if options.counts and options.counts.exists():
        cached = json.loads(options.counts.read_text())
    corners: dict[tuple[str, str], list[list[dict[str, float]]]] = {}
    for name, ulysses in dict.fromkeys((row["model"], row["ulysses"]) for row in rows):
        corners[name, ulysses] = [[{} for _ in TOKENS] for _ in CUTS]
        for (i, layers), (j, each) in itertools.product(enumerate(CUTS), enumerate(TOKENS)):
            key = f"{name} ulysses {ulysses}, {each * int(ulysses)} tokens, {layers} layers"
            if key not in cached:
                print(f"planning {key}", file=sys.stderr)
                cached[key] = planned(name, int(ulysses), each * int(ulysses), layers)
                if options.counts:
                    options.counts.write_text(json.dumps(cached))
            corners[name, ulysses][i][j] = cached[key]
    runs = [(row, *extended(corners[row["model"], row["ulysses"]], row)) for row in rows]
    by_model = {name: [(row, counts) for row, counts, _ in runs if row["model"] == name] for name in MODELS}
    shares = {name: fitted(model_runs) for name, model_runs in by_model.items()}
    shares_of_all = fitted([(row, counts) for row, counts, _ in runs])
    for name, fractions in (*shares.items(), ("all", shares_of_all)):
        flops = f"{fractions.matmuls:.0%} of FLOP/s in matmuls, {fractions.attention:.0%} in attention"
        print(f"fitted to {name}: {flops}, {fractions.links:.0%} of links")
    print("\n| model | ulysses | tokens | published tokens/s | fitted to all | held out | published GB | planned GiB |")
    print("|---|---|---|---|---|---|---|---|")
    errors_by_kind: dict[str, list[float]] = {"tokens/s, fitted to all": [], "tokens/s, held out": [], "memory": []}
    for row, counts, peak in runs:
        other = next(name for name in MODELS if name != row["model"])
        cells = [row["model"], row["ulysses"], f"{int(row['sequence_tokens']):,}", row["tokens_per_sec_per_gpu"]]
        for kind, fractions in zip(errors_by_kind, (shares_of_all, shares[other]), strict=False):
            expected = expect(counts, DEVICES["h100"], fractions)
            assert expected is not None
            relative = error(expected, row)
            errors_by_kind[kind].append(relative)
            cells.append(f"{expected.tokens_per_second:,.0f} ({relative:+.0%})")
        relative_memory = peak / float(row["memory_gb"]) - 1
        errors_by_kind["memory"].append(relative_memory)
        cells += [row["memory_gb"], f"{peak:.1f} ({relative_memory:+.0%})"]
        print(f"| {' | '.join(cells)} |")
    print()
    for kind, errors in errors_by_kind.items():
        sizes = [abs(each) for each in errors]
        print(f"{kind}: mean error {sum(sizes) / len(sizes):.0%}, worst {max(sizes):.0%}")
        for name in MODELS:
            model_sizes = [size for size, row in zip(sizes, rows, strict=True) if row["model"] == name]
            print(f"  {name}: {sum(model_sizes) / len(model_sizes):.0%}")


if __name__ == "__main__":
    main()
