"""The longest pack for a fixed memory per rank, as ranks are added.

    python benchmarks/long_packs.py small                 # a small model on this machine, for real: minutes
    python benchmarks/long_packs.py small --limit 32 --ranks 1 2 4
    python benchmarks/long_packs.py plan                  # the Qwen3-Omni thinker on 128 devices: figures of a plan
    python benchmarks/long_packs.py data                  # the loader's CPU seconds and memory for a pack of one row

`small`: for each way to share a pack, the longest one whose dry run stays within the limit, then that step for real, on
as many processes, with the memory of its tensors counted (tests/support/dry_runs.py): for one way of each number
of ranks, or with `--all` for every way. A pack is one text.
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
sys.path.insert(0, str(ROOT / "tests"))

from dry_runs import measure, run_dry  # noqa: E402
from processes import run_on_ranks, start_server  # noqa: E402

from omnizoo.config.load import load_config  # noqa: E402

MIB, STEP = 2**20, 64  # tokens per rank: how finely a length is searched
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


def ways(ranks: int) -> dict[str, tuple[int, int]]:
    """How so many ranks may share a pack: Ulysses x ring."""
    if ranks == 1:
        return {"one process": (1, 1)}
    found = {"ulysses": (ranks, 1), "ring": (1, ranks)}
    return found | ({"ulysses x ring": (ranks // 2, 2)} if ranks > 2 else {})


def case(tokens: int, way: tuple[int, int]) -> list[str]:
    keys = {"data.pack_tokens": tokens, "parallel.ulysses": way[0], "parallel.ring": way[1]}
    return [word for key, value in keys.items() for word in (f"--{key}", str(value))]


def longest(peak: Callable[[int], int], limit: int, ranks: int, begin: int) -> int:
    """Tokens of the longest pack within the limit, to `STEP` per rank. Memory is nearly a line over tokens, so the next
    guess is on the line through the last two."""
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
    """In a process of its own, for torch has another device there from then on."""
    found: list[dict[str, Any]] = []
    begin = 2048.0  # tokens per rank, to try first
    for count in ranks:
        for name, way in ways(count).items():

            @cache
            def peak(tokens: int, count: int = count, way: tuple[int, int] = way) -> int:
                run_dry([(config, case(tokens, way))], count, answer.parent)
                (dry,) = json.loads((answer.parent / "dry.json").read_text())
                if "error" in dry:
                    raise SystemExit(dry["error"])
                return int(dry["peak"])

            tokens = longest(peak, limit, count, int(begin * count))
            begin = tokens / count
            found.append({"ranks": count, "way": name, "axes": way, "tokens": tokens, "planned": peak(tokens)})
            print(f"{count} {name}: {tokens:,}", file=sys.stderr)
    answer.write_text(json.dumps(found))


def real(process: Any, config: str, overrides: list[str], folder: Path) -> None:
    found = measure(load_config(config, overrides, needs_data=False), process)
    if process.rank == 0:
        (folder / "real.json").write_text(json.dumps(found))


def small(limit: float, ranks: Sequence[int], confirm_all: bool, console: Console) -> None:
    table = Table("ranks", "shared by", "longest pack", "of linear", "planned MiB", "real MiB", box=None)
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
            raise SystemExit("the search has failed")
        one = 0.0
        searched = json.loads(answer.read_text())
        last = {found["ranks"]: found["way"] for found in searched}
        for found in searched:
            one = one or found["tokens"] / found["ranks"]
            shown = [str(found["ranks"]), found["way"], f"{found['tokens']:,}"]
            shown += [f"{found['tokens'] / (one * found['ranks']):.2f}", f"{found['planned'] / MIB:.2f}"]
            if not confirm_all and found["way"] != last[found["ranks"]]:
                table.add_row(*shown, "")
                continue
            given = (str(config), case(found["tokens"], found["axes"]), folder)
            result = run_on_ranks(real, found["ranks"], *given, timeout=3000)
            if result.code:
                raise SystemExit(result.stderr)
            ran = json.loads((folder / "real.json").read_text())
            table.add_row(*shown, f"{ran['peak'] / MIB:.2f}")
            print(*shown, ran["peak"] / MIB, file=sys.stderr)
    console.print(table)


OMNI = ROOT / "examples/gpu/qwen3_omni_1m.yaml"
LAYERS, CUTS, WORLD, GIB = 48, (2, 4), 128, 2**30
LENGTHS = (2**20, 2**22, 2**24)
TOWERS = (  # one layer each is enough: texts have no use for them
    *("--model.config.vision_config.depth", "1", "--model.config.vision_config.deepstack_visual_indexes", "[0]"),
    *("--model.config.audio_config.encoder_layers", "1"),
)
KEYS: dict[str, list[str]] = {
    "recompute: full": ["--parallel.tile_tokens", "null", "--parallel.offload", "[]"],
    "and tile_tokens: 8192": ["--parallel.tile_tokens", "8192", "--parallel.offload", "[]"],
    "and offload: [activations]": ["--parallel.tile_tokens", "8192", "--parallel.offload", "[activations]"],
}


def plan(lengths: Sequence[int], console: Console) -> None:
    """Peaks at two numbers of layers, and along the line through them at all layers."""
    from omnizoo.cli.plan import quiet
    from omnizoo.planning.devices import DEVICES
    from omnizoo.planning.dry_run import Place, simulate

    quiet()
    table = Table("tokens", "keys", "tokens per rank", "GiB", "host GiB", "at the peak, of 4 layers", box=None)
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
            at = f"{more.peak.module or 'the loss'}, {more.peak.phase}"
            sizes = (f"{tokens // WORLD:,}", f"{peak / GIB:.1f}", f"{host / GIB:.1f}")
            table.add_row(f"{tokens:,}", name, *sizes, at)
            print(f"{tokens:,} {name}: {sizes}", file=sys.stderr)
    console.print(table)


TOKENIZER, TURN = ROOT / "examples/data/tiny/tokenizer", 200  # tokens of a turn, where there are many


def data(lengths: Sequence[int], console: Console) -> None:
    """Rows of one long text, one long message, and many turns: a process for each, as memory is that of the process."""
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
    from transformers import AutoTokenizer

    from omnizoo.balancing.batch import collate
    from omnizoo.data.loading.loader import build_loader

    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    stories = " ".join(json.loads(line)["text"] for line in (TOKENIZER.parent / "stories.jsonl").open(encoding="utf-8"))
    characters = int(tokens * 0.97 * 20000 / len(tokenizer(stories[:20000])["input_ids"]))
    text = (stories * (characters // len(stories) + 1))[:characters]
    said = [text]
    if kind == "turns":
        size = max(1, characters * TURN // tokens)
        said = [text[i : i + size] for i in range(0, characters - size, size)]
    messages = [{"role": ("user", "assistant")[i % 2], "content": each} for i, each in enumerate(said)]
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
    parser.add_argument("what", choices=("small", "plan", "data"))
    parser.add_argument("--limit", type=float, default=40, help="MiB per rank")
    parser.add_argument("--all", action="store_true", help="run every way for real, not one for each number of ranks")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--lengths", type=int, nargs="+", help="tokens of packs to plan, or to read")
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
