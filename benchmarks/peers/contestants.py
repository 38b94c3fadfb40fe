"""Who takes part in the standing benchmark, and with which command."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from peers.assets import EARS, EYES, RATE, VOCABULARY
from peers.venvs import python_of

HERE = Path(__file__).resolve().parent
OURS = "omnizoo"
TEXT = ("dense", "moe", "dense_152k")
TOKENS = 1024  # of a pack


@dataclass(frozen=True)
class Contestant:
    name: str
    command: tuple[str, ...]  # after `probe.py`; {assets}, {model}, {steps}, {processes} and {run} are filled in
    models: tuple[str, ...] = TEXT
    processes: tuple[int, ...] = (1, 2, 4)
    env: tuple[tuple[str, str], ...] = ()
    note: str = ""
    python: Path = Path(sys.executable)
    without: str = ""  # which of our own is off: a row of another table


def ours(*more: str, by: tuple[str, ...] = ("-m", "omnizoo")) -> tuple[str, ...]:
    fixed = {
        "data.pack_tokens": str(TOKENS),
        "train.steps": "{steps}",
        "train.packs_per_step": "{processes}",
        "train.lr": "1e-4",
        "train.schedule": "constant",
        "train.grad_clip": "1.0",
        "optimizer.weight_decay": "0.1",
        "log.dir": "{run}/log",
    }
    keys = [part for key, value in fixed.items() for part in (f"--{key}", value)]
    return (*by, "train", "{run}/config.yaml", *keys, *more)


def config_of(model: str, folder: Path) -> str:
    """The config file of OmniZoo, as JSON, which is YAML, too."""
    if model == "omni":
        shuffle = {"kind": "pixel_shuffle", "options": {"factor": 2}}
        sound = {"kind": "audio", "config": EARS, "options": {"sample_rate": RATE}}
        modalities = {
            "image": {"encoder": {"kind": "vision", "config": EYES}, "projector": shuffle},
            "audio": {"encoder": sound, "projector": {"kind": "pixel_shuffle", "options": {"factor": 4}}},
        }
        foundation = {"config": str(folder)}
        built = {"tokenizer": str(folder), "foundation": foundation, "modalities": modalities}
        return json.dumps({"model": built, "data": {"sources": [{"path": str(folder / "chat.jsonl")}]}})
    rows = folder / ("chat.jsonl" if model == "vlm" else "text.jsonl")
    return json.dumps({"model": {"path": str(folder)}, "data": {"sources": [{"path": str(rows)}]}})


def peer(file: str, *more: str) -> tuple[str, ...]:
    return (str(HERE / file), "{assets}", "{model}", *more, "--steps", "{steps}")


def without(which: str, *more: str) -> tuple[str, ...]:
    return ours(*more, by=(str(HERE / "without.py"), which))


AS_IT_WAS = (("MALLOC_TRIM_THRESHOLD_", "131072"),)  # a setting of the user's, which OmniZoo leaves alone
LEAN = ("--parallel.recompute", "full", "--parallel.reshard_after_forward", "true", "--parallel.tile_tokens", "256")
ALL_LOGITS = '[{{"kind": "cross_entropy", "options": {{"chunked": false}}}}]'
SEVERAL = (2, 4)
ALL = tuple(VOCABULARY)
LLAMA_FACTORY, VISION = python_of("llama_factory"), python_of("vision")
CONTESTANTS = [
    Contestant(OURS, ours(), models=ALL, note="as it is"),
    Contestant("omnizoo, compiled", ours("--train.compile", "true"), note="`train.compile: true`"),
    Contestant(
        "omnizoo, leanest",
        ours(*LEAN, "--optimizer.moments", "bf16"),
        note="recompute full, resharding, tiles of 256 tokens, moments in bf16",
    ),
    Contestant(
        "omnizoo, adafactor",
        ours(*LEAN, "--optimizer.kind", "adafactor"),
        note="the same, but another optimizer, whose moments are a row and a column of each weight",
    ),
    Contestant("plain", peer("plain.py"), note="no framework: FSDP2, block mask, all logits, resharding"),
    Contestant(
        "tuned", peer("plain.py", "--tuned"), note="an expert's loop: FSDP2, attention per document, chunked loss"
    ),
    Contestant("tuned, resharding", peer("plain.py", "--tuned", "--reshard"), processes=SEVERAL),
    Contestant("transformers, padded", peer("trainers.py", "padded"), note="Trainer, 3 documents a step"),
    Contestant("transformers, packed", peer("trainers.py", "packed"), note="Trainer, positions start again"),
    Contestant("trl", peer("trainers.py", "trl"), note="SFTTrainer, its packing (best fit)"),
    Contestant("llama-factory", peer("llama_factory.py"), python=LLAMA_FACTORY, note="its neat_packing"),
    Contestant(
        "transformers, padded",
        peer("vision.py", "transformers"),
        models=("vlm",),
        python=VISION,
        note="Trainer, the processor's collation, 4 rows a step",
    ),
    Contestant("trl", peer("vision.py", "trl"), models=("vlm",), python=VISION, note="SFTTrainer, padded, 4 rows"),
    Contestant("llama-factory", peer("llama_factory.py"), models=("vlm",), python=LLAMA_FACTORY, note="padded, 4 rows"),
    Contestant(
        "plain, composed", peer("composed.py"), models=("omni",), note="the same towers in a loop, padded, 4 rows"
    ),
    Contestant(
        "omnizoo, ep", ours("--parallel.ep", "{processes}"), ("moe",), SEVERAL, without="experts whole everywhere"
    ),
    Contestant("omnizoo, memory given back", ours(), models=ALL, env=AS_IT_WAS, without="freed memory kept (malloc)"),
    Contestant("omnizoo, gloo's collectives", without("direct"), processes=SEVERAL, without="direct messages"),
    Contestant("omnizoo, clipped apart", without("clip"), without="clipping inside the update"),
    Contestant("omnizoo, all logits", ours("--train.losses", ALL_LOGITS), without="head and loss in chunks"),
    Contestant(
        "omnizoo, resharding",
        ours("--parallel.reshard_after_forward", "true"),
        processes=SEVERAL,
        without="weights stay gathered after forward",
    ),
]
