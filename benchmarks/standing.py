"""The standing benchmark: OmniZoo against what its users would use instead, on the same model, rows and optimizer.

    python benchmarks/standing.py                        # or `make bench`: dense and MoE, some minutes
    python benchmarks/standing.py --all                  # or `make bench-peers`: every case and contestant, hours
    python benchmarks/standing.py --models vlm --processes 1 --rounds 1 --only omnizoo,trl
    python benchmarks/standing.py --memory               # bytes of tensors at once, vocabularies of 32k and 152k
    python benchmarks/standing.py --profile --models moe # where the time of a step goes
    python benchmarks/standing.py --from runs/bench/*.jsonl --write     # RESULTS.md of runs made in pieces

Every contestant runs unchanged under `peers/probe.py`, which counts real tokens, CPU seconds and memory. Rounds are
interleaved, so that noise of the machine hits all alike. The figure to look at is real tokens per CPU second (user and
system, all ranks and workers); it hardly changes with what else the machine does. Each process has one thread: where
cores are shared, threads of one process wait for each other, and what they burn meanwhile counts.
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from peers import results
from peers.assets import PAD, VOCABULARY, make_assets
from peers.contestants import CONTESTANTS, OURS, Contestant, config_of
from peers.limit import flops_per_token, matmul_rate
from peers.results import MEMORY, PROFILE, SPEED, Record

HERE = Path(__file__).resolve().parent
RUNS = HERE.parent / "runs"
QUICK = (OURS, "tuned", "transformers, packed")
WARMUP = 2  # steps
PROFILED = 4  # the step that peers/probe.py profiles
LONGEST = 3600  # seconds of a run


def run(contestant: Contestant, model: str, processes: int, args: argparse.Namespace, mode: str) -> Record:
    """One run: its figures, or the end of what it said."""
    if not contestant.python.exists():
        return {"failed": f"{contestant.python} is missing: python benchmarks/peers/venvs.py"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.yaml").write_text(config_of(model, args.assets / model))
        filled = {"assets": args.assets, "model": model, "steps": args.steps, "processes": processes, "run": folder}
        command = [part.format(**filled) for part in contestant.command]
        env = os.environ | {
            "OMP_NUM_THREADS": str(args.threads),
            "MKL_NUM_THREADS": str(args.threads),
            "GLOO_SOCKET_IFNAME": "lo",
            "HF_HOME": str(folder / "hf"),  # nothing is cached from run to run
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "DISABLE_VERSION_CHECK": "1",  # LLaMA-Factory's, which asks for packages that are not used
            "PYTHONPATH": str(HERE.parent),
            "PROBE_OUT": str(folder / "probe"),
            "PROBE_BEGAN": str(time.time()),
            "PROBE_VOCABULARY": str(VOCABULARY[model]),
            "PROBE_PAD": str(PAD),
            "PROBE_MEMORY": str(int(mode == MEMORY)),
            "PROBE_EXPLAIN": str(args.explain),
            "PROBE_PROFILE": str(int(mode == PROFILE)),
            **dict(contestant.env),
        }
        start = [str(contestant.python)]
        if processes > 1:
            start += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        log = folder / "log.txt"
        with log.open("w") as file:
            child = subprocess.Popen(
                [*start, str(HERE / "peers" / "probe.py"), *command],
                env=env,
                cwd=folder,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = child.wait(timeout=LONGEST)
            except BaseException as stopped:
                os.killpg(child.pid, signal.SIGKILL)
                if not isinstance(stopped, subprocess.TimeoutExpired):
                    raise
                code = -1
        if code:
            return {"failed": log.read_text()[-3000:] or f"ended with {code}"}
        return figures(folder / "probe", mode)


def figures(folder: Path, mode: str) -> Record:
    """Of the steps after those that warm up."""
    ranks = [[json.loads(line) for line in file.read_text().splitlines()] for file in sorted(folder.iterdir())]
    first, last = WARMUP - 1, min(map(len, ranks)) - 1
    if last <= first:
        return {"failed": f"{last + 1} steps; more than {WARMUP} were expected"}

    def grown(key: str) -> float:
        return float(sum(rank[last][key] - rank[first][key] for rank in ranks))

    tokens = grown("tokens")
    found = {
        "per_cpu_second": tokens / grown("cpu"),
        "per_second": tokens / max(rank[last]["seconds"] - rank[first]["seconds"] for rank in ranks),
        "tokens_per_step": tokens / (last - first),
        "padding": 1 - tokens / grown("all_tokens"),
        "peak_rss_mb": max(rank[last]["peak_rss_mb"] for rank in ranks),
        "first_step": max(rank[0]["seconds"] for rank in ranks),
    }
    if mode == MEMORY:
        most = max((step for rank in ranks for step in rank[1:]), key=lambda step: step["peak_tensors_mb"])
        found |= {"peak_tensors_mb": most["peak_tensors_mb"], "largest": most["largest"]}
    if mode == PROFILE:
        step = ranks[0][last]
        found |= {"operators": step["operators"], "profiled": step["profiled"]}
    return found


def turns(args: argparse.Namespace, mode: str) -> Iterator[tuple[str, int, int, list[Contestant]]]:
    """(model, processes, round, contestants in this round's order)"""
    for model in args.models:
        for processes in args.processes:
            fitting = [c for c in CONTESTANTS if model in c.models and processes in c.processes]
            fitting = [c for c in fitting if (c.name in args.only if args.only else not c.without or args.off)]
            for turn in range(args.rounds):
                if fitting:
                    yield model, processes, turn, fitting[turn % len(fitting) :] + fitting[: turn % len(fitting)]


def measure(args: argparse.Namespace, mode: str, said: str) -> list[Record]:
    """All runs that were asked for; each is kept when it has ended."""
    make_assets(args.assets, args.models)
    session = time.strftime("%Y-%m-%dT%H:%M:%S")
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=HERE, capture_output=True, text=True, check=False
    ).stdout.strip()
    args.keep.mkdir(parents=True, exist_ok=True)
    records = []
    with (args.keep / f"{session}.jsonl").open("w", buffering=1) as file:
        for model, processes, turn, order in turns(args, mode):
            needed = flops_per_token(args.assets / model) if mode == SPEED else None
            limit = matmul_rate() / needed if needed else None
            for contestant in order:
                record: dict[str, Any] = {"mode": mode, "model": model, "processes": processes, "threads": args.threads}
                record |= {"contestant": contestant.name, "session": session, "round": turn, "commit": commit}
                record |= {"when": time.strftime("%Y-%m-%dT%H:%M:%S"), "torch": torch.__version__, "command": said}
                record |= {"steps": args.steps, "limit": limit, "load": os.getloadavg()[0]}
                record |= run(contestant, model, processes, args, mode)
                file.write(json.dumps(record) + "\n")
                records.append(record)
                told = f"{model}, {processes} process(es), round {turn}: {contestant.name}"
                if "failed" in record:
                    print(f"{told} failed:\n{record['failed']}", file=sys.stderr, flush=True)
                elif mode == PROFILE:
                    print(f"{told}: a step of {record['profiled']:.1f} s", flush=True)
                elif mode == MEMORY:
                    print(f"{told} {record['peak_tensors_mb']:.0f} MB of tensors", flush=True)
                    for what, size in record.pop("largest"):
                        print(f"    {size / 2**20:8.1f} MB  {what}", flush=True)
                else:
                    print(f"{told} {record['per_cpu_second']:.0f} real tokens per CPU second", flush=True)
    return records


def names(text: str) -> list[str]:
    return [name.strip() for name in text.split(";" if ";" in text else ",") if name.strip()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--models", type=names, help=f"of {', '.join(VOCABULARY)}; default: dense,moe")
    add("--processes", type=lambda text: [int(name) for name in names(text)], help="default: 1,2")
    add("--only", type=names, help="names of contestants, by comma, or by semicolon where names have commas")
    add("--off", action="store_true", help="also OmniZoo with each of its optimisations turned off")
    add("--all", action="store_true", help="every model, 1, 2 and 4 processes, every contestant, and memory")
    add("--memory", action="store_true", help="count bytes of tensors, in place of speed")
    add("--explain", type=int, default=0, metavar="N", help="with --memory: name the N largest at the peak")
    add("--profile", action="store_true", help="where the time of a step goes, in place of speed")
    add("--rounds", type=int, help="default: 2; 3 with --all; 1 with --memory and --profile")
    add("--steps", type=int, help=f"of a run, of which the first {WARMUP} warm up; default: 6; 8 with --all")
    add("--threads", type=int, default=1, help="of each process; default: 1")
    add("--assets", type=Path, default=RUNS / "bench_assets")
    add("--keep", type=Path, default=RUNS / "bench", help="folder for a file of every run's figures")
    add("--from", dest="stored", type=Path, nargs="+", default=[], help="runs that were kept; none is made")
    add("--write", action="store_true", help="benchmarks/RESULTS.md and its drawing")
    add("--note", default="", help="what readers of RESULTS.md should know of these runs")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the run under way ends, too
    known = {contestant.name for contestant in CONTESTANTS}
    if args.only and (unknown := set(args.only) - known):
        parser.error(f"--only: {', '.join(sorted(unknown))}; there are {'; '.join(sorted(known))}")
    args.assets, args.off = args.assets.resolve(), args.off or args.all
    if not (args.only or args.all or args.memory or args.models):
        args.only = list(QUICK)
    said = shlex.join(["python", "benchmarks/standing.py", *(arg for arg in sys.argv[1:] if arg != "--write")])
    if args.stored:
        records = results.read(args.stored)
    else:
        records = []
        asked = MEMORY if args.memory else PROFILE if args.profile else SPEED
        for mode in [SPEED, MEMORY] if args.all else [asked]:
            own = argparse.Namespace(**vars(args))
            everything = [name for name in VOCABULARY if name != "dense_152k"] if args.all else ["dense", "moe"]
            own.models = args.models or (["dense", "dense_152k"] if mode == MEMORY else everything)
            own.processes = args.processes or (
                [1, 2, 4] if args.all and mode == SPEED else [1, 2] if mode == SPEED else [1]
            )
            own.rounds = args.rounds or (1 if mode != SPEED else 3 if args.all else 2)
            own.steps = args.steps or 6
            if mode != SPEED:
                own.steps = PROFILED if mode == PROFILE else WARMUP + 1
            elif args.all and not args.steps:
                own.steps = 8
            own.off = args.off and mode == SPEED
            records += measure(own, mode, said)
    results.show(records)
    if args.write:
        commands = list(dict.fromkeys(record["command"] for record in records))
        (HERE / "RESULTS.md").write_text(results.page(records, commands, "results.svg", args.note))
        (HERE / "results.svg").write_text(results.draw(records))
    return int(not args.stored and any("failed" in record for record in records))


if __name__ == "__main__":
    sys.exit(main())
