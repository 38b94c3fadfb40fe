"""The standing benchmark: OmniZoo compared with alternatives, on the same model, rows and optimizer.

    python benchmarks/standing.py                        # or `make bench`: dense and MoE, some minutes
    python benchmarks/standing.py --all                  # or `make bench-peers`: every case and contestant, hours
    python benchmarks/standing.py --models vlm --processes 1 --rounds 1 --only omnizoo,trl
    python benchmarks/standing.py --memory               # peak bytes of tensors, vocabularies of 32k and 152k
    python benchmarks/standing.py --profile --models moe # where the time of a step goes
    python benchmarks/standing.py --from runs/bench/*.jsonl --write     # write RESULTS.md from stored runs

Every contestant runs unchanged under `peers/probe.py`, which counts real tokens, CPU seconds and memory. Rounds are
interleaved, so that noise of the machine affects all contestants equally. The main figure is real tokens per CPU second
(user and system time of all ranks and workers), which hardly depends on other work on the machine. Each process has one
thread: on shared cores, threads of one process wait for each other, and busy waiting would count as CPU time.
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
PROFILED = 4  # number of the step that peers/probe.py profiles
LONGEST = 3600  # time limit of a run, in seconds


def run(contestant: Contestant, model: str, processes: int, args: argparse.Namespace, mode: str) -> Record:
    """Run a contestant once. Returns its figures, or the end of its output under `failed` if it failed."""
    if not contestant.python.exists():
        return {"failed": f"{contestant.python} does not exist. Run python benchmarks/peers/venvs.py."}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.yaml").write_text(config_of(model, args.assets / model))
        values = {"assets": args.assets, "model": model, "steps": args.steps, "processes": processes, "run": folder}
        command = [part.format(**values) for part in contestant.command]
        env = os.environ | {
            "OMP_NUM_THREADS": str(args.threads),
            "MKL_NUM_THREADS": str(args.threads),
            "GLOO_SOCKET_IFNAME": "lo",
            "HF_HOME": str(folder / "hf"),  # no cache is shared between runs
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "DISABLE_VERSION_CHECK": "1",  # LLaMA-Factory would require packages that are not used
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
            except BaseException as error:
                os.killpg(child.pid, signal.SIGKILL)
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                code = -1
        if code:
            return {"failed": log.read_text()[-3000:] or f"exit code {code}"}
        return figures(folder / "probe", mode)


def figures(folder: Path, mode: str) -> Record:
    """Return the figures of the steps after the warm-up."""
    ranks = [[json.loads(line) for line in file.read_text().splitlines()] for file in sorted(folder.iterdir())]
    first, last = WARMUP - 1, min(map(len, ranks)) - 1
    if last <= first:
        return {"failed": f"only {last + 1} steps; expected more than {WARMUP}"}

    def increase(key: str) -> float:
        """Return the increase of a counter over the counted steps, summed over ranks."""
        return float(sum(rank[last][key] - rank[first][key] for rank in ranks))

    tokens = increase("tokens")
    record = {
        "per_cpu_second": tokens / increase("cpu"),
        "per_second": tokens / max(rank[last]["seconds"] - rank[first]["seconds"] for rank in ranks),
        "tokens_per_step": tokens / (last - first),
        "padding": 1 - tokens / increase("all_tokens"),
        "peak_rss_mb": max(rank[last]["peak_rss_mb"] for rank in ranks),
        "first_step": max(rank[0]["seconds"] for rank in ranks),
    }
    if mode == MEMORY:
        peak_step = max((step for rank in ranks for step in rank[1:]), key=lambda step: step["peak_tensors_mb"])
        record |= {"peak_tensors_mb": peak_step["peak_tensors_mb"], "largest": peak_step["largest"]}
    if mode == PROFILE:
        step = ranks[0][last]
        record |= {"operators": step["operators"], "profiled": step["profiled"]}
    return record


def turns(args: argparse.Namespace, mode: str) -> Iterator[tuple[str, int, int, list[Contestant]]]:
    """Yield (model, processes, round, contestants in the order of this round)."""
    for model in args.models:
        for processes in args.processes:
            chosen = [c for c in CONTESTANTS if model in c.models and processes in c.processes and is_chosen(c, args)]
            for turn in range(args.rounds):
                if chosen:
                    first = turn % len(chosen)
                    yield model, processes, turn, chosen[first:] + chosen[:first]


def is_chosen(contestant: Contestant, args: argparse.Namespace) -> bool:
    """Whether the options choose this contestant."""
    if args.only:
        return contestant.name in args.only
    return args.off or not contestant.without


def measure(args: argparse.Namespace, mode: str, command: str) -> list[Record]:
    """Run all chosen contestants. Each record is written to a file when its run has ended."""
    make_assets(args.assets, args.models)
    session = time.strftime("%Y-%m-%dT%H:%M:%S")
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=HERE, capture_output=True, text=True, check=False
    ).stdout.strip()
    args.keep.mkdir(parents=True, exist_ok=True)
    records = []
    with (args.keep / f"{session}.jsonl").open("w", buffering=1) as file:
        for model, processes, turn, order in turns(args, mode):
            flops = flops_per_token(args.assets / model) if mode == SPEED else None
            limit = matmul_rate() / flops if flops else None
            for contestant in order:
                record: dict[str, Any] = {"mode": mode, "model": model, "processes": processes, "threads": args.threads}
                record |= {"contestant": contestant.name, "session": session, "round": turn, "commit": commit}
                record |= {"when": time.strftime("%Y-%m-%dT%H:%M:%S"), "torch": torch.__version__, "command": command}
                record |= {"steps": args.steps, "limit": limit, "load": os.getloadavg()[0]}
                record |= run(contestant, model, processes, args, mode)
                file.write(json.dumps(record) + "\n")
                records.append(record)
                label = f"{results.title_of((model, processes, args.threads))}, round {turn}: {contestant.name}"
                if "failed" in record:
                    print(f"{label} failed:\n{record['failed']}", file=sys.stderr, flush=True)
                elif mode == PROFILE:
                    print(f"{label}: profiled step took {record['profiled']:.1f} s", flush=True)
                elif mode == MEMORY:
                    print(f"{label}: {record['peak_tensors_mb']:.0f} MB of tensors", flush=True)
                    for description, size in record.pop("largest"):
                        print(f"    {size / 2**20:8.1f} MB  {description}", flush=True)
                else:
                    print(f"{label}: {record['per_cpu_second']:.0f} real tokens per CPU second", flush=True)
    return records


def names(text: str) -> list[str]:
    """Split a list of names at semicolons if there are any, otherwise at commas."""
    return [name.strip() for name in text.split(";" if ";" in text else ",") if name.strip()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--models", type=names, help=f"models, from {', '.join(VOCABULARY)} (default: dense,moe)")
    add(
        "--processes", type=lambda text: [int(name) for name in names(text)], help="numbers of processes (default: 1,2)"
    )
    add("--only", type=names, help="contestants, separated by commas, or by semicolons if names have commas")
    add("--off", action="store_true", help="also run OmniZoo with each optimization disabled")
    add("--all", action="store_true", help="run all models and contestants on 1, 2 and 4 processes, and measure memory")
    add("--memory", action="store_true", help="count bytes of tensors instead of speed")
    add("--explain", type=int, default=0, metavar="N", help="with --memory: list the N largest tensors at the peak")
    add("--profile", action="store_true", help="measure the time by kind of operator instead of speed")
    add("--rounds", type=int, help="number of rounds (default: 2; 3 with --all; 1 with --memory and --profile)")
    add("--steps", type=int, help=f"steps of a run, with {WARMUP} of warm-up (default: 6; 8 with --all)")
    add("--threads", type=int, default=1, help="threads of each process (default: 1)")
    add("--assets", type=Path, default=RUNS / "bench_assets", help="folder for models and data")
    add("--keep", type=Path, default=RUNS / "bench", help="folder for the records of all runs")
    add("--from", dest="stored", type=Path, nargs="+", default=[], help="files with stored records; nothing is run")
    add("--write", action="store_true", help="write benchmarks/RESULTS.md and its chart")
    add("--note", default="", help="remark on these runs for RESULTS.md")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # exit normally, so that the current run is ended, too
    known = {contestant.name for contestant in CONTESTANTS}
    if args.only and (unknown := set(args.only) - known):
        parser.error(f"--only: unknown {', '.join(sorted(unknown))}. Use {'; '.join(sorted(known))}.")
    args.assets, args.off = args.assets.resolve(), args.off or args.all
    if not (args.only or args.all or args.memory or args.models):
        args.only = list(QUICK)
    command = shlex.join(["python", "benchmarks/standing.py", *(arg for arg in sys.argv[1:] if arg != "--write")])
    if args.stored:
        records = results.read(args.stored)
    else:
        records = []
        chosen_mode = MEMORY if args.memory else PROFILE if args.profile else SPEED
        for mode in [SPEED, MEMORY] if args.all else [chosen_mode]:
            settings = argparse.Namespace(**vars(args))
            speed_models = [name for name in VOCABULARY if name != "dense_152k"] if args.all else ["dense", "moe"]
            settings.models = args.models or (["dense", "dense_152k"] if mode == MEMORY else speed_models)
            settings.processes = args.processes or (
                [1, 2, 4] if args.all and mode == SPEED else [1, 2] if mode == SPEED else [1]
            )
            settings.rounds = args.rounds or (1 if mode != SPEED else 3 if args.all else 2)
            settings.steps = args.steps or 6
            if mode != SPEED:
                settings.steps = PROFILED if mode == PROFILE else WARMUP + 1
            elif args.all and not args.steps:
                settings.steps = 8
            settings.off = args.off and mode == SPEED
            records += measure(settings, mode, command)
    results.show(records)
    if args.write:
        commands = list(dict.fromkeys(record["command"] for record in records))
        (HERE / "RESULTS.md").write_text(results.page(records, commands, "results.svg", args.note))
        (HERE / "results.svg").write_text(results.draw(records))
    return int(not args.stored and any("failed" in record for record in records))


if __name__ == "__main__":
    sys.exit(main())
