"""The standing benchmark: OmniZoo against what its users would use instead, on the same model, documents and optimizer.

    python benchmarks/standing.py                        # or `make bench`: dense and MoE, 1 and 2 processes
    python benchmarks/standing.py --models dense --processes 1 --rounds 1 --only omnizoo,tuned
    python benchmarks/standing.py --write                # and benchmarks/RESULTS.md, with its plot

Every contestant runs unchanged under `peers/probe.py`, which counts real tokens, CPU seconds and memory. Rounds are
interleaved, so that noise of the machine hits all alike. The figure to look at is real tokens per CPU second (user and
system, all ranks and workers); it hardly changes with what else the machine does.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from peers.assets import PAD, make_assets
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
VOCABULARY, TOKENS, WARMUP = 32_000, 1024, 3
OURS = "omnizoo"


@dataclass(frozen=True)
class Contestant:
    name: str
    command: tuple[str, ...]  # after `probe.py`; {assets}, {model}, {steps}, {processes} and {run} are filled in
    models: tuple[str, ...] = ("dense", "moe")
    processes: tuple[int, ...] = (1, 2, 4)
    env: tuple[tuple[str, str], ...] = ()
    note: str = ""


def ours(*more: str) -> tuple[str, ...]:
    fixed = {
        "model.path": "{assets}/{model}",
        "data.sources.0.path": "{assets}/text.jsonl",
        "data.pack_tokens": str(TOKENS),
        "train.steps": "{steps}",
        "train.global_batch": "{processes}",
        "train.lr": "1e-4",
        "train.schedule": "constant",
        "train.grad_clip": "1.0",
        "optimizer.weight_decay": "0.1",
        "log.dir": "{run}/log",
    }
    keys = [part for key, value in fixed.items() for part in (f"--{key}", value)]
    return ("-m", "omnizoo", "train", "{run}/empty.yaml", *keys, *more)


def plain(*more: str) -> tuple[str, ...]:
    return (str(HERE / "peers" / "plain.py"), "{assets}", "{model}", "--steps", "{steps}", *more)


def trainer(mode: str) -> tuple[str, ...]:
    return (str(HERE / "peers" / "trainers.py"), "{assets}", "{model}", mode, "--steps", "{steps}")


AS_IT_WAS = (("MALLOC_TRIM_THRESHOLD_", "131072"),)  # a setting of the user's, which OmniZoo leaves alone
CONTESTANTS = [
    Contestant(OURS, ours(), note="as it is"),
    Contestant("omnizoo, ep", ours("--parallel.ep", "{processes}"), models=("moe",), processes=(2, 4)),
    Contestant("omnizoo, memory given back", ours(), env=AS_IT_WAS, note="malloc as glibc has it"),
    Contestant("omnizoo, resharding", ours("--parallel.reshard_after_forward", "true"), processes=(2, 4)),
    Contestant("plain", plain(), note="FSDP2, block mask, all logits, resharding"),
    Contestant("tuned", plain("--tuned"), note="FSDP2, attention per document, chunked loss, no resharding"),
    Contestant("transformers, padded", trainer("padded")),
    Contestant("transformers, packed", trainer("packed")),
    Contestant("trl, packed", trainer("trl")),
]


@dataclass(frozen=True)
class Figures:
    per_cpu_second: float
    per_second: float
    padding: float
    peak_rss_mb: float
    first_step: float


def run(contestant: Contestant, model: str, processes: int, assets: Path, steps: int) -> Figures | str:
    """One run: its figures, or the end of what it said."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "empty.yaml").write_text("{}\n")
        filled = {"assets": assets, "model": model, "steps": steps, "processes": processes, "run": folder}
        command = [part.format(**filled) for part in contestant.command]
        threads = str(max(1, 2 // processes))
        env = os.environ | {
            "OMP_NUM_THREADS": threads,
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "PROBE_OUT": str(folder / "probe"),
            "PROBE_BEGAN": str(time.time()),
            "PROBE_VOCABULARY": str(VOCABULARY),
            "PROBE_PAD": str(PAD),
            **dict(contestant.env),
        }
        start = [sys.executable]
        if processes > 1:
            start += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        ended = subprocess.run(
            [*start, str(HERE / "peers" / "probe.py"), *command],
            env=env,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=1800,
            check=False,
        )
        if ended.returncode:
            return (ended.stderr or ended.stdout)[-2000:]
        return read(folder / "probe")


def read(folder: Path) -> Figures:
    """The steps after those that warm up."""
    ranks = [[json.loads(line) for line in file.read_text().splitlines()] for file in sorted(folder.iterdir())]
    first, last = WARMUP - 1, min(map(len, ranks)) - 1

    def grown(key: str) -> float:
        return sum(rank[last][key] - rank[first][key] for rank in ranks)

    tokens = grown("tokens")
    return Figures(
        per_cpu_second=tokens / grown("cpu"),
        per_second=tokens / max(rank[last]["seconds"] - rank[first]["seconds"] for rank in ranks),
        padding=1 - tokens / grown("all_tokens"),
        peak_rss_mb=max(rank[last]["peak_rss_mb"] for rank in ranks),
        first_step=max(rank[0]["seconds"] for rank in ranks),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="dense,moe")
    parser.add_argument("--processes", default="1,2")
    parser.add_argument("--only", default="", help="names of contestants, by comma; default: all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=13)
    parser.add_argument("--assets", type=Path, default=HERE.parent / "runs" / "bench_assets")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    only = [name.strip() for name in args.only.split(",") if name.strip()]
    if unknown := set(only) - {contestant.name for contestant in CONTESTANTS}:
        parser.error(f"--only: {', '.join(sorted(unknown))}; there are {', '.join(c.name for c in CONTESTANTS)}")
    assets = args.assets.resolve()
    make_assets(assets, VOCABULARY)
    found: dict[tuple[str, int], dict[str, list[Figures]]] = {}
    for model in args.models.split(","):
        for processes in map(int, args.processes.split(",")):
            fitting = [c for c in CONTESTANTS if model in c.models and processes in c.processes]
            fitting = [c for c in fitting if not only or c.name in only]
            each = found.setdefault((model, processes), {})
            for turn in range(args.rounds):
                for contestant in fitting[turn % len(fitting) :] + fitting[: turn % len(fitting)]:
                    figures = run(contestant, model, processes, assets, args.steps)
                    if isinstance(figures, str):
                        print(
                            f"{contestant.name}, {model}, {processes} process(es) failed:\n{figures}", file=sys.stderr
                        )
                        return 1
                    each.setdefault(contestant.name, []).append(figures)
                    speed = f"{figures.per_cpu_second:.0f} real tokens per CPU second"
                    print(f"{model}, {processes} process(es), round {turn}: {contestant.name} {speed}", flush=True)
    lines = report(found)
    if args.write:
        command = " ".join(["python benchmarks/standing.py", *(arg for arg in sys.argv[1:] if arg != "--write")])
        head = f"# The standing benchmark\n\n`{command}`, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}.\n"
        notes = "".join(f"- {c.name}: {c.note}\n" for c in CONTESTANTS if c.note)
        (HERE / "RESULTS.md").write_text(f"{head}\n{notes}\n" + "\n".join(lines) + "\n")
    return 0


def report(found: dict[tuple[str, int], dict[str, list[Figures]]]) -> list[str]:
    """Prints the table of each case; the same as lines of Markdown."""
    console = Console(width=None if sys.stdout.isatty() else 130)
    headings = ["", "real tokens / CPU s", "spread", "omnizoo / it", "real tokens / s", "padding", "RSS MB", "first s"]
    lines: list[str] = []
    for (model, processes), each in found.items():
        title = f"{model}, {processes} process(es)"
        table = Table(*headings, title=title)
        lines += [f"## {title}", "", "| " + " | ".join(headings) + " |", "|---" * len(headings) + "|"]
        median = {name: statistics.median(f.per_cpu_second for f in runs) for name, runs in each.items()}
        for name, runs in sorted(each.items(), key=lambda item: -median[item[0]]):
            speeds = [f.per_cpu_second for f in runs]
            cells = [
                name,
                f"{median[name]:.0f}",
                f"{min(speeds):.0f} - {max(speeds):.0f}",
                f"{median[OURS] / median[name]:.2f}" if OURS in median else "",
                f"{statistics.median(f.per_second for f in runs):.0f}",
                f"{statistics.median(f.padding for f in runs):.1%}",
                f"{statistics.median(f.peak_rss_mb for f in runs):.0f}",
                f"{statistics.median(f.first_step for f in runs):.1f}",
            ]
            table.add_row(*cells)
            lines.append("| " + " | ".join(cells) + " |")
        console.print(table)
        lines.append("")
    return lines


if __name__ == "__main__":
    sys.exit(main())
