"""The contestants of the standing benchmark and their commands."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from peers.assets import AUDIO, RATE, VOCABULARY
from peers.assets import VISION as VISION_TOWER
from peers.venvs import python_of

HERE = Path(__file__).resolve().parent
OURS = "omnizoo"
TEXT = ("dense", "moe", "dense_152k")
TOKENS = 1024  # tokens of a pack


@dataclass(frozen=True)
class Contestant:
    """A trainer, or a variant of OmniZoo, that takes part in the benchmark."""

    name: str
    command: tuple[str, ...]  # after `probe.py`; {assets}, {model}, {steps}, {processes} and {run} are replaced
    models: tuple[str, ...] = TEXT
    processes: tuple[int, ...] = (1, 2, 4)
    env: tuple[tuple[str, str], ...] = ()
    note: str = ""
    python: Path = Path(sys.executable)
    without: str = ""  # the optimization that is disabled; such contestants have a separate table


def ours(*more: str, by: tuple[str, ...] = ("-m", "omnizoo")) -> tuple[str, ...]:
    """Return a command that trains with OmniZoo, with additional arguments."""
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
    """Return the config file of OmniZoo as JSON, which is valid YAML."""
    if model == "omni":
        shuffle = {"kind": "pixel_shuffle", "options": {"factor": 2}}
        audio = {"kind": "audio", "config": AUDIO, "options": {"sample_rate": RATE}}
        modalities = {
            "image": {"encoder": {"kind": "vision", "config": VISION_TOWER}, "projector": shuffle},
            "audio": {"encoder": audio, "projector": {"kind": "pixel_shuffle", "options": {"factor": 4}}},
        }
        foundation = {"config": str(folder)}
        model_section = {"tokenizer": str(folder), "foundation": foundation, "modalities": modalities}
        return json.dumps({"model": model_section, "data": {"sources": [{"path": str(folder / "chat.jsonl")}]}})
    rows = folder / ("chat.jsonl" if model == "vlm" else "text.jsonl")
    return json.dumps({"model": {"path": str(folder)}, "data": {"sources": [{"path": str(rows)}]}})


def peer(file: str, *more: str) -> tuple[str, ...]:
    """Return a command that runs a script of this folder."""
    return (str(HERE / file), "{assets}", "{model}", *more, "--steps", "{steps}")


def without(which: str, *more: str) -> tuple[str, ...]:
    """Return a command that trains with OmniZoo without an optimization (without.py)."""
    return ours(*more, by=(str(HERE / "without.py"), which))


DEFAULT_MALLOC = (("MALLOC_TRIM_THRESHOLD_", "131072"),)  # OmniZoo does not change malloc if the user has set it
LEAN = ("--parallel.recompute", "full", "--parallel.reshard_after_forward", "true", "--parallel.tile_tokens", "256")
ALL_LOGITS = '[{{"kind": "cross_entropy", "options": {{"chunked": false}}}}]'
SEVERAL = (2, 4)
ALL = tuple(VOCABULARY)
LLAMA_FACTORY, VISION = python_of("llama_factory"), python_of("vision")
CONTESTANTS = [
    Contestant(OURS, ours(), models=ALL, note="default settings"),
    Contestant("omnizoo, compiled", ours("--train.compile", "true"), note="`train.compile: true`"),
    Contestant(
        "omnizoo, leanest",
        ours(*LEAN, "--optimizer.moments", "bf16"),
        note="`recompute: full`, resharding, tiles of 256 tokens, bf16 moments",
    ),
    Contestant(
        "omnizoo, adafactor",
        ours(*LEAN, "--optimizer.kind", "adafactor"),
        note="as leanest, with Adafactor, which stores one row and one column of second moments per weight",
    ),
    Contestant("plain", peer("plain.py"), note="loop without a framework: FSDP2, block mask, full logits, resharding"),
    Contestant(
        "tuned", peer("plain.py", "--tuned"), note="loop by an expert: FSDP2, attention per document, chunked loss"
    ),
    Contestant("tuned, resharding", peer("plain.py", "--tuned", "--reshard"), processes=SEVERAL),
    Contestant("transformers, padded", peer("trainers.py", "padded"), note="Trainer, 3 documents per step"),
    Contestant(
        "transformers, packed",
        peer("trainers.py", "packed"),
        note="Trainer, packed documents with restarting positions",
    ),
    Contestant("trl", peer("trainers.py", "trl"), note="SFTTrainer with its best-fit packing"),
    Contestant("llama-factory", peer("llama_factory.py"), python=LLAMA_FACTORY, note="`neat_packing`"),
    Contestant(
        "transformers, padded",
        peer("vision.py", "transformers"),
        models=("vlm",),
        python=VISION,
        note="vision: Trainer, padded by the processor, 4 rows per step",
    ),
    Contestant(
        "trl",
        peer("vision.py", "trl"),
        models=("vlm",),
        python=VISION,
        note="vision: SFTTrainer, padded, 4 rows per step",
    ),
    Contestant(
        "llama-factory",
        peer("llama_factory.py"),
        models=("vlm",),
        python=LLAMA_FACTORY,
        note="vision: padded, 4 rows per step",
    ),
    Contestant(
        "plain, composed",
        peer("composed.py"),
        models=("omni",),
        note="the same towers in a loop, padded, 4 rows per step",
    ),
    Contestant(
        "omnizoo, ep", ours("--parallel.ep", "{processes}"), ("moe",), SEVERAL, without="full experts on every rank"
    ),
    Contestant(
        "omnizoo, memory given back", ours(), models=ALL, env=DEFAULT_MALLOC, without="freed memory kept in the process"
    ),
    Contestant(
        "omnizoo, gloo's collectives", without("direct"), processes=SEVERAL, without="collectives as direct messages"
    ),
    Contestant("omnizoo, clipped apart", without("clip"), without="clipping in the update"),
    Contestant("omnizoo, all logits", ours("--train.losses", ALL_LOGITS), without="head and loss in chunks"),
    Contestant(
        "omnizoo, resharding",
        ours("--parallel.reshard_after_forward", "true"),
        processes=SEVERAL,
        without="weights kept gathered after forward",
    ),
]
