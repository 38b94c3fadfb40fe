"""Find the longest pack for a fixed memory per rank, for several numbers of ranks.

    python benchmarks/long_packs.py small                 # real runs of a small model on this machine: minutes
    python benchmarks/long_packs.py small --limit 32 --ranks 1 2 4
    python benchmarks/long_packs.py plan                  # plans of the Qwen3-Omni thinker on 128 devices
    python benchmarks/long_packs.py data                  # CPU seconds and memory of the loader for a pack of one row

`small` searches, for each layout, the longest pack whose dry run stays within the limit. Then it runs this step in real
processes and counts the memory of its tensors (tests/support/dry_runs.py): for one layout of each world size, or with
`--all` for every layout. A pack is one text.
"""

import argparse
import json
import multiprocessing
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from dry_runs import measure, run_dry  # noqa: E402
from processes import run_on_ranks, start_server  # noqa: E402

from omnizoo.config.load import load_config  # noqa: E402

MIB = 2**20
STEP = 64  # resolution of the search, in tokens per rank
SMALL = {
    "model": {
        "config": {
            "model_type": "qwen3",
            "vocab_size": 512,
            "hidden_size": 128,
            "intermediate_size": 384,
            "num_hidden_layers": 2,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 1048576,
        }
    },
    "parallel": {"recompute": "full", "tile_tokens": 512, "reshard_after_forward": True},
    "train": {"steps": 2, "packs_per_step": 1, "lr": 1e-3, "precision": "fp32"},
}


def layouts(ranks: int) -> dict[str, tuple[int, int]]:
    """Return the layouts in which `ranks` ranks share a pack, as (ulysses, ring)."""
    if ranks == 1:
        return {"one process": (1, 1)}
    sizes = {"ulysses": (ranks, 1), "ring": (1, ranks)}
    return sizes | ({"ulysses x ring": (ranks // 2, 2)} if ranks > 2 else {})


def case(tokens: int, layout: tuple[int, int]) -> list[str]:
    """Return the command-line overrides for a pack length and a layout."""
    keys = {"data.pack_tokens": tokens, "parallel.ulysses": layout[0], "parallel.ring": layout[1]}
    return [word for key, value in keys.items() for word in (f"--{key}", str(value))]


def longest(peak: Callable[[int], int], limit: int, ranks: int, begin: int) -> int:
    """Return the tokens of the longest pack within the limit, with a resolution of `STEP` tokens per rank.

    Memory is nearly linear in the number of tokens, so the next guess is on the line through the last two points.
    """
    step = STEP * ranks
    now = max(2 * step, begin // step * step)
    before = now - max(step, now // 8 // step * step)
    for _ in range(8):
        slope = (peak(now) - peak(before)) / (now - before)
        guess = max(step, int(now + (limit - peak(now)) / slope) // step * step)
        if guess in (before, now):
            break
        before, now = now, guess
    while now > step and peak(now) > limit:
        now -= step
    while peak(now + step) <= limit:
        now += step
    return now


def search(config: str, limit: int, ranks: Sequence[int], answer: Path) -> None:
    """Search all layouts. Runs in a separate process, because a dry run registers another device with torch."""
    found: list[dict[str, Any]] = []
    begin = 2048.0  # first guess, in tokens per rank
    for count in ranks:
        for name, layout in layouts(count).items():

            @cache
            def peak(tokens: int, count: int = count, layout: tuple[int, int] = layout) -> int:
                run_dry([(config, case(tokens, layout))], count, answer.parent)
                (dry,) = json.loads((answer.parent / "dry.json").read_text())
                if "error" in dry:
                    raise SystemExit(dry["error"])
                return int(dry["peak"])

            tokens = longest(peak, limit, count, int(begin * count))
            begin = tokens / count
            found.append({"ranks": count, "way": name, "axes": layout, "tokens": tokens, "planned": peak(tokens)})
            print(f"{count} {name}: {tokens:,}", file=sys.stderr)
    answer.write_text(json.dumps(found))


def run_real(process: Any, config: str, overrides: list[str], folder: Path) -> None:
    """Measure a real step on this rank. Rank 0 writes the result to `real.json`."""
    found = measure(load_config(config, overrides, needs_data=False), process)
    if process.rank == 0:
        (folder / "real.json").write_text(json.dumps(found))


def small(limit: float, ranks: Sequence[int], confirm_all: bool, console: Console) -> None:
    """Print the longest pack of each layout, with planned and real memory."""
    table = Table("ranks", "layout", "longest pack", "x linear", "planned MiB", "real MiB", box=None)
    start_server()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = folder / "small.yaml"
        config.write_text(yaml.safe_dump(SMALL))
        answer = folder / "longest.json"
        context = multiprocessing.get_context("forkserver")
        process = context.Process(target=search, args=(str(config), int(limit * MIB), ranks, answer))
        process.start()
        process.join()
        if process.exitcode:
            raise SystemExit("The search failed.")
        tokens_of_one = 0.0  # longest pack of one process
        searched = json.loads(answer.read_text())
        last = {found["ranks"]: found["way"] for found in searched}
        for found in searched:
            tokens_of_one = tokens_of_one or found["tokens"] / found["ranks"]
            shown = [str(found["ranks"]), found["way"], f"{found['tokens']:,}"]
            shown += [f"{found['tokens'] / (tokens_of_one * found['ranks']):.2f}", f"{found['planned'] / MIB:.2f}"]
            if not confirm_all and found["way"] != last[found["ranks"]]:
                table.add_row(*shown, "")
                continue
            overrides = case(found["tokens"], found["axes"])
            result = run_on_ranks(run_real, found["ranks"], str(config), overrides, folder, timeout=3000)
            if result.code:
                raise SystemExit(result.stderr)
            measured = json.loads((folder / "real.json").read_text())
            table.add_row(*shown, f"{measured['peak'] / MIB:.2f}")
            print(*shown, measured["peak"] / MIB, file=sys.stderr)
    console.print(table)


OMNI = ROOT / "examples/gpu/qwen3_omni_1m.yaml"
LAYERS, CUTS, WORLD, GIB = 48, (2, 4), 128, 2**30
LENGTHS = (2**20, 2**22, 2**24)
TOWERS = (  # one layer each, because texts do not use the towers
    *("--model.config.vision_config.depth", "1", "--model.config.vision_config.deepstack_visual_indexes", "[0]"),
    *("--model.config.audio_config.encoder_layers", "1"),
)
KEYS: dict[str, list[str]] = {
    "recompute: full": ["--parallel.tile_tokens", "null", "--parallel.offload", "[]"],
    "and tile_tokens: 8192": ["--parallel.tile_tokens", "8192", "--parallel.offload", "[]"],
    "and offload: [activations]": ["--parallel.tile_tokens", "8192", "--parallel.offload", "[activations]"],
}


def plan(lengths: Sequence[int], console: Console) -> None:
    """Print peaks of all layers, extrapolated linearly from plans with two numbers of layers."""
    from omnizoo.cli.plan import quiet
    from omnizoo.planning.devices import DEVICES
    from omnizoo.planning.dry_run import Place, simulate

    quiet()
    table = Table("tokens", "keys", "tokens per rank", "GiB", "host GiB", "module at the peak, with 4 layers", box=None)
    for tokens in lengths:
        for name, keys in KEYS.items():
            results = []
            for layers in CUTS:
                cut = ["--model.config.text_config.num_hidden_layers", str(layers), "--data.pack_tokens", str(tokens)]
                config = load_config(str(OMNI), [*TOWERS, *cut, *keys], needs_data=False)
                results.append(simulate(config, Place(WORLD, 0, DEVICES["h100"])))
            few, more = results
            share = (LAYERS - CUTS[0]) / (CUTS[1] - CUTS[0])
            peak, host = (a + share * (b - a) for a, b in ((few.peak.bytes, more.peak.bytes), (few.host, more.host)))
            location = f"{more.peak.module or 'the loss'}, {more.peak.phase}"
            sizes = (f"{tokens // WORLD:,}", f"{peak / GIB:.1f}", f"{host / GIB:.1f}")
            table.add_row(f"{tokens:,}", name, *sizes, location)
            print(f"{tokens:,} {name}: {sizes}", file=sys.stderr)
    console.print(table)


TOKENIZER = ROOT / "examples/data/tiny/tokenizer"
TURN = 200  # tokens of a turn, for rows with many turns


def data(lengths: Sequence[int], console: Console) -> None:
    """Measure rows of one long text, one long message, and many turns, each in a new process."""
    table = Table("row", "tokens", "CPU s per pack", "memory MiB", box=None)
    start_server()
    with tempfile.TemporaryDirectory() as name:
        for kind in ("text", "message", "turns"):
            for tokens in lengths:
                context = multiprocessing.get_context("forkserver")
                process = context.Process(target=read, args=(kind, tokens, Path(name)))
                process.start()
                process.join()
                found = json.loads((Path(name) / "read.json").read_text())
                row = (f"{found['tokens']:,}", f"{found['seconds']:.2f}", f"{found['memory']:.0f}")
                table.add_row(kind, *row)
                print(kind, *row, file=sys.stderr)
    console.print(table)


def read(kind: str, tokens: int, folder: Path) -> None:
    """Load a pack of one row, and write tokens, CPU seconds and memory to `read.json`."""
    from transformers import AutoTokenizer

    from omnizoo.balancing.batch import collate
    from omnizoo.data.loading.loader import build_loader

    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    stories = " ".join(json.loads(line)["text"] for line in (TOKENIZER.parent / "stories.jsonl").open(encoding="utf-8"))
    characters = int(tokens * 0.97 * 20000 / len(tokenizer(stories[:20000])["input_ids"]))
    text = (stories * (characters // len(stories) + 1))[:characters]
    contents = [text]
    if kind == "turns":
        size = max(1, characters * TURN // tokens)
        contents = [text[i : i + size] for i in range(0, characters - size, size)]
    messages = [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]
    row = {"text": text} if kind == "text" else {"messages": [*messages, {"role": "assistant", "content": "Yes."}]}
    if kind == "turns" and messages[-1]["role"] == "assistant":
        row = {"messages": messages}
    path, config = folder / "rows.jsonl", folder / "data.yaml"
    path.write_text((json.dumps(row) + "\n") * 2, encoding="utf-8")
    sources = {"sources": [{"path": str(path)}], "pack_tokens": tokens, "lanes": 1, "workers": 0}
    config.write_text(yaml.safe_dump(SMALL | {"data": sources}))
    loaded = load_config(str(config), [])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    loader = build_loader(loaded, tokenizer, 0, 1)
    begin = time.process_time()
    (pack,) = loader.next_step().packs
    collate([pack])
    found = {"tokens": len(pack.columns["input_ids"]), "seconds": time.process_time() - begin}
    found["memory"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    loader.close()
    (folder / "read.json").write_text(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("small", "plan", "data"), help="kind of measurement")
    parser.add_argument("--limit", type=float, default=40, help="memory limit of `small` in MiB per rank (default: 40)")
    parser.add_argument("--all", action="store_true", help="run every layout for real, not one per world size")
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[1, 2, 4, 8], help="world sizes of `small` (default: 1 2 4 8)"
    )
    parser.add_argument("--lengths", type=int, nargs="+", help="pack lengths of `plan` or `data`, in tokens")
    options = parser.parse_args()
    console = Console(width=140)
    if options.what == "small":
        small(options.limit, options.ranks, options.all, console)
    elif options.what == "plan":
        plan(options.lengths or LENGTHS, console)
    else:
        data(options.lengths or (2**17, 2**20), console)


if __name__ == "__main__":
    main()
