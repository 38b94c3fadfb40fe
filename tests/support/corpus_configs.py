"""Invalid configs and command lines: each prints one error line that names the key. A few are valid and succeed.

All cases share one folder with a tokenizer, rows and a small model; a case writes only its own YAML.
"""

import atexit
import copy
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from corpus import Case
from fixtures import make_tokenizer
from omni import CODEC, LISTENING, VISION
from tiny import SHAPE, model_config, write_rows

from omnizoo.config import reference
from omnizoo.config.moved_keys import MOVED_KEYS

INFINITE, NAN = float("inf"), float("nan")
LONG = "x" * 100_000
MOE = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16} | SHAPE
GPT_OSS = model_config("gpt_oss")


@cache
def shared() -> Path:
    """Return a folder with the tokenizer and rows that all cases share."""
    folder = Path(tempfile.mkdtemp(prefix="omnizoo_corpus_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    make_tokenizer(folder / "tokenizer")
    write_rows(folder / "rows.jsonl", [{"text": f"The capital of France is Paris, {n}."} for n in range(64)])
    return folder


def base() -> dict[str, Any]:
    folder = shared()
    return {
        "model": {"config": model_config("qwen3"), "tokenizer": str(folder / "tokenizer")},
        "data": {"sources": [{"path": str(folder / "rows.jsonl")}], "pack_tokens": 64, "lanes": 2, "look_ahead": 4},
        "train": {"steps": 1, "packs_per_step": 2},
        "log": {"tensorboard": False},
    }


def composed() -> dict[str, Any]:
    """Return a config of a composed model with all built-in encoders and decoders that need no files."""
    config = base()
    foundation = {"config": model_config("qwen3") | {"vocab_size": 544}}
    modalities = {
        "image": {
            "encoder": {"kind": "vision", "config": VISION},
            "projector": {"kind": "pixel_shuffle", "options": {"factor": 2}},
            "decoder": {"kind": "flow", "options": {"size": 8, "patch": 4, "hidden": 16, "layers": 1}},
        },
        "audio": {
            "encoder": {
                "kind": "audio",
                "config": LISTENING,
                "options": {"sample_rate": 2000, "hop_length": 50, "n_fft": 100},
            },
            "decoder": {"kind": "audio_codec", "config": CODEC},
        },
        "video": {"encoder": {"kind": "video", "config": VISION, "options": {"fps": 2}}},
    }
    tokenizer = config["model"]["tokenizer"]
    config["model"] = {"foundation": foundation, "modalities": modalities, "tokenizer": tokenizer}
    return config


def grouped() -> dict[str, Any]:
    return base() | {"optimizer": {"groups": [{"match": "*norm*"}]}}


def with_loss() -> dict[str, Any]:
    return base() | {"train": base()["train"] | {"losses": [{"kind": "cross_entropy"}]}}


def called() -> dict[str, Any]:
    return base() | {"log": base()["log"] | {"callbacks": [{"kind": "own_callbacks:Quiet"}]}}


def measured() -> dict[str, Any]:
    return base() | {"evaluation": {"samples": 1, "metrics": [{"kind": "exact_match"}]}}


def put(config: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """Return `config` with `value` at a dotted key."""
    config = copy.deepcopy(config)
    place: Any = config
    *path, last = key.split(".")
    for part in path:
        place = place[int(part)] if isinstance(place, list) else place.setdefault(part, {})
    if isinstance(place, list):
        place[int(last) :] = [value]
    else:
        place[last] = value
    return config


def write(folder: Path, config: Any) -> Path:
    if isinstance(config, dict) and isinstance(log := config.get("log"), dict):
        log.setdefault("dir", str(folder / "run"))
    path = folder / "case.yaml"
    path.write_text(yaml.safe_dump(config, allow_unicode=True))
    return path


def show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:30]}... of {len(text)} characters"


def setting(
    key: str, value: Any, *says: str, start: Callable[[], dict[str, Any]] = base, command: str = "train", note: str = ""
) -> Case:
    """Return a case with one key set. Its error names the key or `says`; with `says` ("",) it succeeds."""
    words = () if says == ("",) else says or (key,)

    def prepare(folder: Path) -> list[object]:
        return [*command.split(), write(folder, put(start(), key, value))]

    return Case(f"{note}{key} = {show(value)}", prepare, words)


REST = "model: {path: x}\ndata: {sources: [{path: y}]}\n"


def added(name: str, text: str, *says: str) -> Case:
    """Return a case with `text` appended to a valid config file."""
    return whole(name, REST + text, *says)


def whole(name: str, text: str | bytes, *says: str) -> Case:
    """Return a case with a config file of this content."""

    def prepare(folder: Path) -> list[object]:
        path = folder / "case.yaml"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return ["train", path]

    return Case(f"file: {name}", prepare, says or ("case.yaml",))


def line(*args: object, says: tuple[str, ...]) -> Case:
    """A command line; CONFIG stands for a good config, FOLDER for the case's own folder, RUN for a file in it."""

    def prepare(folder: Path) -> list[object]:
        config = write(folder, base())
        (folder / "file").write_text("a file")
        places = {"CONFIG": config, "FOLDER": folder, "FILE": folder / "file"}
        return [places.get(arg, arg) if isinstance(arg, str) else arg for arg in args]

    shown = " ".join(show(arg) if not isinstance(arg, str) or len(arg) > 40 else arg or "''" for arg in args)
    return Case(f"omnizoo {shown}", prepare, says)


# Every key of the schema, with values of other types


def wrong_types() -> Iterator[Case]:
    of_type: dict[str, tuple[Any, ...]] = {
        "integer": ("ten", 1.5, [1]),
        "number": ("much", {"a": 1}),
        "true or false": ("maybe", 1),
        "text": (["a", "list"], ""),
        "list": ("text", {"a": 1}),
        "mapping": (3, ["a"]),
        "{": ("text", 3),
        "[": ([0.9], "text"),
    }
    for known in reference.all_keys():
        if known.key.startswith(
            ("model.path", "data.eval_sources.N", "model.modalities.NAME.decoder", "log.callbacks.N.kind")
        ):
            continue  # like their siblings
        key = known.key.replace(".NAME", ".image").replace(".N", ".0")
        wrong = next((values for name, values in of_type.items() if known.type.startswith(name)), ("neither",))
        start = composed if key.startswith(("model.modalities", "model.foundation")) else base
        start = grouped if key.startswith("optimizer.groups.") else start
        start = called if key.startswith("log.callbacks.") else start
        start = with_loss if key.startswith("train.losses.") else start
        start = measured if key.startswith("evaluation.metrics.") else start
        for value in wrong:
            yield setting(key, value, start=start)


# Invalid values of the right type

BEYOND: list[tuple[str, Any]] = [
    *((key, value) for key in ("data.pack_tokens", "data.lanes", "data.look_ahead") for value in (0, -1, 10**12)),
    ("data.lanes", 10**6),
    ("data.lanes", 10**30),
    ("data.look_ahead", 10**9),
    ("data.pack_tokens", 10**30),
    ("data.pack_tokens", 1),
    ("data.shuffle_rows", 0),
    ("data.shuffle_rows", 10**30),
    ("data.workers", -1),
    ("data.workers", 10**6),
    ("data.prefetch", 0),
    ("data.prefetch", 10**6),
    ("data.sources.0.weight", 0),
    ("data.sources.0.weight", -1.0),
    ("data.sources.0.weight", 1e300),
    ("data.sources.0.weight", NAN),
    ("data.sources.0.weight", INFINITE),
    ("data.sources.0.path", "a\0b"),
    ("data.sources.0.path", LONG),
    ("data.sources", []),
    ("data.sources", {}),
    ("data.sources", ["rows.jsonl"]),
    ("data.sources.0.split", "a\0b"),
    ("train.steps", 0),
    ("train.steps", -5),
    ("train.steps", 10**18),
    ("train.steps", 10**30),
    ("train.steps", True),
    ("train.steps", 1e30),
    ("train.packs_per_step", 0),
    ("train.packs_per_step", 10**9),
    ("train.packs_per_step", 10**30),
    ("train.micro_batch", 0),
    ("train.micro_batch", 3),
    ("train.micro_batch", 10**18),
    ("train.lr", 0.0),
    ("train.lr", -1e-3),
    ("train.lr", 1e30),
    ("train.lr", NAN),
    ("train.lr", INFINITE),
    ("train.lr", True),
    ("train.warmup_steps", -1),
    ("train.warmup_steps", 10**30),
    ("train.decay_steps", -1),
    ("train.decay_steps", 10**30),
    ("train.min_lr_ratio", 1.5),
    ("train.min_lr_ratio", -0.1),
    ("optimizer.options.betas", [0.9, 1.0]),
    ("optimizer.options.betas", [-0.1, 0.9]),
    ("optimizer.options.betas", [0.9, NAN]),
    ("optimizer.options.betas", [0.9, 0.95, 0.99]),
    ("optimizer.options.betas", []),
    ("optimizer.options.betas", [0.9, "x"]),
    ("optimizer.options.eps", 0.0),
    ("optimizer.options.eps", 1e30),
    ("optimizer.weight_decay", -1.0),
    ("optimizer.weight_decay", 1e30),
    ("train.grad_clip", -1.0),
    ("train.grad_clip", INFINITE),
    ("train.router_bias_rate", 1e300),
    ("train.router_bias_rate", -1.0),
    ("train.seed", -1),
    ("train.seed", 2**64),
    ("train.seed", 10**100),
    ("optimizer.no_decay", ["junk"]),
    ("optimizer.no_decay", [["norm"]]),
    ("train.max_bad_steps", 0),
    ("evaluation.every", -1),
    ("evaluation.packs", 0),
    ("train.schedule", "cosinus"),
    ("parallel.dp_shard", 0),
    ("parallel.dp_shard", 10**30),
    ("parallel.dp_replicate", 10**18),
    ("parallel.ring", 10**18),
    ("parallel.ring", 3),
    ("parallel.ulysses", -1),
    ("parallel.ep", 10**18),
    ("train.precision", "fp8"),
    ("checkpoint.keep", 0),
    ("checkpoint.every", -1),
    ("checkpoint.every", 10**30),
    ("checkpoint.dir", "a\0b"),
    ("checkpoint.dir", LONG),
    ("checkpoint.dir", "/proc/nowhere"),
    ("checkpoint.resume", "nowhere"),
    ("checkpoint.resume", "a\0b"),
    ("checkpoint.resume", LONG),
    ("log.dir", "a\0b"),
    ("log.dir", LONG),
    ("log.dir", "/proc/nowhere"),
    ("log.dir", "/dev/null"),
    ("log.dir", "/dev/null/below"),
    ("log.every", 0),
    ("model.tokenizer", "a\0b"),
    ("model.tokenizer", LONG),
    ("model.tokenizer", "nowhere"),
    ("model.tokenizer", "/dev/null"),
    ("model.attention", "nonsense"),
    ("model.attention", "a\0b"),
    ("model.part", "nothing"),
    ("model.adapter.rank", 0),
    ("model.adapter.rank", 10**30),
    ("model.adapter.alpha", 0.0),
    ("model.adapter.dropout", 1.0),
    ("model.adapter.targets", []),
    ("model.adapter.targets", [LONG]),
    ("model.adapter.targets", ["[a"]),
    ("model.adapter.path", "nowhere"),
    ("model.adapter.path", "a\0b"),
    ("model.adapter.path", "/dev/null"),
    ("model.allow_missing", [3]),
    ("model.config", "nowhere"),
    ("model.config", "/dev/null"),
    ("model.config", LONG),
    ("model.config", []),
    ("model.config", {}),
    ("model.modalities", {"ima ge": {}}),
]
FINE: list[tuple[str, Any]] = [
    ("data.shuffle_rows", 10**12),
    ("data.sources.0.weight", 1e-300),
    ("data.sources.0.weight", 3),
    ("data.pack_tokens", 2**30),
    ("data.lanes", 65536),
    ("evaluation.packs", 10**9),
    ("train.warmup_steps", 100),
    ("train.decay_steps", 100),
    ("train.grad_clip", 1e30),
    ("train.seed", 2**63 - 1),
    ("train.steps", 1),
    ("optimizer.no_decay", []),
]


def relations() -> Iterator[Case]:
    """Yield combinations of keys that exclude each other."""

    def both(name: str, changes: dict[str, Any], *says: str, start: Callable[[], dict[str, Any]] = base) -> Case:
        def prepare(folder: Path) -> list[object]:
            config = start()
            for key, value in changes.items():
                config = put(config, key, value)
            return ["train", write(folder, config)]

        return Case(f"together: {name}", prepare, says)

    yield both("path and config", {"model.path": "x"}, "model.path", "model.config")
    yield both("neither path nor config", {"model.config": None}, "model.path", "model.config")
    yield both("a module without arguments", {"model.config": "x", "model.module": "a:b"}, "model.module")
    yield both("micro batch over global batch", {"train.micro_batch": 4}, "train.micro_batch")
    yield both("a module of a composed model", {"model.module": "a:b"}, "model.module", start=composed)
    yield both(
        "weights that add up to nothing",
        {"data.sources": [{"path": "rows.jsonl", "weight": 1e308}, {"path": "rows.jsonl"}]},
        "data.sources.0.weight",
    )


# Keys inside model.config

SHAPES: list[tuple[str, Any]] = [
    *((name, value) for name in ("vocab_size", "hidden_size", "num_attention_heads") for value in (0, -1, 10**9, "x")),
    ("vocab_size", 3),
    ("vocab_size", 10**30),
    ("vocab_size", True),
    ("vocab_size", 1.5),
    ("hidden_size", 10**18),
    ("hidden_size", [32]),
    ("hidden_size", None),
    ("intermediate_size", 0),
    ("intermediate_size", -4),
    ("intermediate_size", 10**12),
    ("num_hidden_layers", 0),
    ("num_hidden_layers", -1),
    ("num_hidden_layers", 10**9),
    ("num_hidden_layers", 10**30),
    ("num_key_value_heads", 0),
    ("num_key_value_heads", 3),
    ("num_key_value_heads", 8),
    ("num_key_value_heads", -2),
    ("head_dim", 0),
    ("head_dim", -8),
    ("head_dim", 7),
    ("head_dim", "wide"),
    ("max_position_embeddings", 0),
    ("max_position_embeddings", -1),
    ("max_position_embeddings", 10**30),
    ("rms_norm_eps", -1.0),
    ("rms_norm_eps", NAN),
    ("rms_norm_eps", "small"),
    ("initializer_range", -1.0),
    ("initializer_range", INFINITE),
    ("attention_dropout", 2.0),
    ("attention_dropout", -1.0),
    ("attention_dropout", NAN),
    ("hidden_act", "nonsense"),
    ("hidden_act", 3),
    ("rope_theta", -1),
    ("rope_theta", 0),
    ("rope_theta", "big"),
    ("rope_theta", NAN),
    ("rope_parameters", 5),
    ("rope_parameters", {"rope_type": "nonsense", "rope_theta": 1e4}),
    ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4, "factor": 0.0}),
    ("rope_parameters", {"rope_type": "default", "rope_theta": -1.0}),
    ("rope_scaling", {"type": "linear"}),
    ("rope_scaling", {"rope_type": "linear", "factor": -1.0}),
    ("rope_scaling", "linear"),
    ("layer_types", ["full_attention"]),
    ("layer_types", ["full_attention", "nonsense"]),
    ("layer_types", "full_attention"),
    ("layer_types", []),
    ("layer_types", ["linear_attention", "full_attention"]),
    ("use_sliding_window", "x"),
    ("tie_word_embeddings", "x"),
    ("dtype", "nonsense"),
    ("id2label", 5),
    ("model_type", "qwen33"),
    ("model_type", "qwen3-moe"),
    ("model_type", ""),
    ("model_type", 3),
    ("model_type", None),
    ("model_type", ["qwen3"]),
    ("model_type", "a\0b"),
    ("model_type", "siglip_vision_model"),
    ("model_type", "whisper"),
    ("model_type", "vit"),
    ("model_type", "os:system"),
    ("model_type", "../../etc/passwd"),
    ("model_type", LONG),
]
MISSPELT = {
    "hidden_sise": "hidden_size",
    "num_hiden_layers": "num_hidden_layers",
    "n_layers": "num_hidden_layers",
    "vocab": "vocab_size",
    "Hidden_Size": "hidden_size",
    "rope_tetha": "",
    "nonsense": "",
    "num_experts_per_token": "",
    "hidden size": "hidden_size",
    "tie_embeddings": "tie_word_embeddings",
}
EXPERTS: list[tuple[str, Any]] = [
    ("num_experts_per_tok", 5),
    ("num_experts_per_tok", 0),
    ("num_experts_per_tok", -1),
    ("num_experts", 0),
    ("num_experts", 1),
    ("num_experts", 10**9),
    ("num_experts", "many"),
    ("moe_intermediate_size", 0),
    ("moe_intermediate_size", 10**12),
    ("decoder_sparse_step", 0),
    ("num_experts_per_token", 2),
]


def shapes() -> Iterator[Case]:
    for name, value in SHAPES:
        yield setting(f"model.config.{name}", value, "model.config", start=base)
    for name, meant in MISSPELT.items():
        yield setting(f"model.config.{name}", 4, name, *([meant] if meant else []), note="misspelt: ")

    def experts() -> dict[str, Any]:
        return put(base(), "model.config", MOE)

    def windows() -> dict[str, Any]:
        return put(base(), "model.config", GPT_OSS)

    for name, value in EXPERTS:
        yield setting(f"model.config.{name}", value, "model.config", start=experts, note="experts: ")
    for value in (0, -1, "wide", 10**30):
        yield setting("model.config.sliding_window", value, "sliding_window", start=windows)
    for name, value in (("num_local_experts", 0), ("num_experts_per_tok", 9), ("rope_parameters", [])):
        yield setting(f"model.config.{name}", value, "model.config", start=windows, note="gpt_oss: ")
    # Keys that model code reads although the config classes do not declare them.
    legacy: dict[str, Any] = {
        "rope_theta": 5e5,
        "torch_dtype": "float32",
        "architectures": ["X"],
        "transformers_version": "4.40.0",
    }
    legacy |= {"bos_token_id": 1, "use_cache": False, "dtype": "bfloat16"}
    for name, value in legacy.items():
        yield setting(f"model.config.{name}", value, "")
    yield setting("model.config.rope_scaling", {"type": "linear", "factor": 2.0}, "")

    def several() -> dict[str, Any]:
        return put(base(), "model.config", {"model_type": "qwen3_vl", "text_config": dict(SHAPE), "vision_config": {}})

    for name, value in (
        ("text_config", 5),
        ("text_config", [1]),
        ("text_config.hidden_sise", 4),
        ("text_config.num_hidden_layers", 10**9),
        ("vision_config", "x"),
        ("vision_config.depht", 2),
        ("vision_config.depth", 10**9),
        ("vision_config.patch_size", 0),
        ("vision_config.hidden_size", -1),
    ):
        yield setting(f"model.config.{name}", value, "model.config", start=several)


# Components of composed models

PARTS: list[tuple[str, Any]] = [
    ("image.encoder.kind", "nonsense"),
    ("image.encoder.kind", "os:system"),
    ("image.encoder.kind", "nowhere:Class"),
    ("image.encoder.kind", "a.b"),
    ("image.encoder.kind", ":x"),
    ("image.encoder.kind", "os:"),
    ("image.encoder.kind", ".os:system"),
    ("image.encoder.kind", "omnizoo.modalities.base:Encoder"),
    ("image.encoder.kind", "flow"),
    ("image.encoder.path", "nowhere"),
    ("image.encoder.config", {}),
    ("image.encoder.config", {"model_type": "nonsense"}),
    ("image.encoder.config", {"model_type": "qwen3"} | SHAPE),
    ("image.encoder.config.patch_size", 0),
    ("image.encoder.config.patch_size", -8),
    ("image.encoder.config.patch_size", "x"),
    ("image.encoder.config.image_size", 10**9),
    ("image.encoder.config.image_size", 0),
    ("image.encoder.config.num_channels", -3),
    ("image.encoder.config.num_attention_heads", 3),
    ("image.encoder.config.num_hidden_layers", 10**9),
    ("image.encoder.config.hidden_sise", 16),
    ("image.encoder.options", {"nonsense": 1}),
    ("image.encoder.options", {"image_size": 0}),
    ("image.encoder.options", {"image_size": -16}),
    ("image.encoder.options", {"image_size": "x"}),
    ("image.encoder.options", {"image_size": [1, 2, 3]}),
    ("image.encoder.options", {"image_size": 10**9}),
    ("image.encoder.options", {"image_size": NAN}),
    ("image.encoder.options", {"max_pixels": -1}),
    ("image.encoder.options", {"max_pixels": "x"}),
    ("image.encoder.options", {"mean": "x"}),
    ("image.encoder.options", {"mean": [0.5]}),
    ("image.encoder.options", {"std": [0, 0, 0]}),
    ("image.encoder.options", {"fit": "nonsense"}),
    ("image.encoder.options", {"width": 3}),
    ("image.encoder.options", {"self": 3}),
    ("image.encoder.options", {"config": 3}),
    ("image.projector.kind", "nonsense"),
    ("image.projector.options", {"factor": 0}),
    ("image.projector.options", {"factor": -1}),
    ("image.projector.options", {"factor": "x"}),
    ("image.projector.options", {"factor": True}),
    ("image.projector.options", {"factor": 10**9}),
    ("image.projector.options", {"nonsense": 1}),
    ("image.projector.options", {"kind": "mlp"}),
    ("image.projector", {"kind": "resampler", "options": {"rows": 0}}),
    ("image.projector", {"kind": "resampler", "options": {"heads": 7}}),
    ("image.projector", {"kind": "resampler", "options": {"rows": 10**12}}),
    ("image.decoder.kind", "vision"),
    ("image.decoder.options", {"size": 0}),
    ("image.decoder.options", {"size": -8, "patch": 4}),
    ("image.decoder.options", {"size": "x"}),
    ("image.decoder.options", {"size": [8, 8, 8]}),
    ("image.decoder.options", {"size": []}),
    ("image.decoder.options", {"size": None}),
    ("image.decoder.options", {"size": 8, "patch": 0}),
    ("image.decoder.options", {"size": 8, "patch": 3}),
    ("image.decoder.options", {"size": 8, "patch": "x"}),
    ("image.decoder.options", {"size": 8, "hidden": 0}),
    ("image.decoder.options", {"size": 8, "hidden": 10**12}),
    ("image.decoder.options", {"size": 8, "layers": -1}),
    ("image.decoder.options", {"size": 8, "layers": 10**9}),
    ("image.decoder.options", {"size": 8, "steps": 0}),
    ("image.decoder.options", {"size": 8, "channels": -1}),
    ("image.decoder.options", {"size": 8, "channels": 7}),
    ("image.decoder.options", {"size": 8, "solver": "nonsense"}),
    ("image.decoder.options", {"size": 8, "solver": 3}),
    ("image.decoder.options", {}),
    ("image.decoder.weight", -1.0),
    ("image.decoder.weight", INFINITE),
    ("image.decoder.weight", 1e300),
    ("image.decoder", {"kind": "image_tokens"}),
    ("image.decoder", {"kind": "image_tokens", "options": {"size": 0}}),
    ("image.decoder", {"kind": "image_tokens", "path": "nowhere"}),
    ("audio.encoder.options", {"max_seconds": 0}),
    ("audio.encoder.options", {"max_seconds": "x"}),
    ("audio.encoder.options", {"max_seconds": NAN}),
    ("audio.encoder.options", {"sample_rate": -1}),
    ("audio.encoder.options", {"sample_rate": "x"}),
    ("audio.encoder.options", {"hop_length": -1}),
    ("audio.encoder.options", {"hop_length": 10**12}),
    ("audio.encoder.options", {"n_fft": 10**12}),
    ("audio.encoder.options", {"n_fft": 1}),
    ("audio.encoder.options", {"n_fft": "x"}),
    ("audio.encoder.config.num_mel_bins", 0),
    ("audio.encoder.config.max_source_positions", -5),
    ("audio.encoder.config.max_source_positions", 10**12),
    ("audio.encoder.config.encoder_layers", 10**9),
    ("audio.encoder.config.d_model", 7),
    ("audio.decoder.options", {"codebooks": 0}),
    ("audio.decoder.options", {"codebooks": -1}),
    ("audio.decoder.options", {"codebooks": 99}),
    ("audio.decoder.options", {"codebooks": "x"}),
    ("audio.decoder.options", {"max_seconds": -1}),
    ("audio.decoder.options", {"max_seconds": "x"}),
    ("audio.decoder.config.codebook_size", 0),
    ("audio.decoder.config.codebook_size", 10**12),
    ("audio.decoder.config.upsampling_ratios", []),
    ("audio.decoder.config.upsampling_ratios", [0]),
    ("audio.decoder.config.sampling_rate", 0),
    ("audio.decoder.config", {"model_type": "qwen3"} | SHAPE),
    ("video.encoder.options", {"fps": 0}),
    ("video.encoder.options", {"fps": "x"}),
    ("video.encoder.options", {"fps": NAN}),
    ("video.encoder.options", {"max_frames": 0}),
    ("video.encoder.options", {"max_frames": 1.5}),
    ("video.encoder.options", {"max_seconds": -1}),
    ("video.encoder.options", {"times": "x"}),
    ("video.encoder.options", {"time_embedding": 3}),
    ("image.marks", {"begin": ""}),
    ("image.marks", {"begin": 3}),
    ("image.marks", {"nonsense": "x"}),
]


def parts() -> Iterator[Case]:
    for key, value in PARTS:
        name, role, *_ = key.split(".")
        # A whole model is built by then, and the row of keys that leads to its part is what helps.
        yield setting(f"model.modalities.{key}", value, name, role, start=composed)
    yield setting("model.modalities.text", {"encoder": {"kind": "vision"}}, start=composed)
    yield setting("model.modalities.nothing", {}, start=composed)
    yield setting("model.foundation.config.hidden_sise", 3, "hidden_size", start=composed)
    yield setting("model.foundation.config.model_type", "qwen33", "model.foundation", start=composed)
    yield setting("model.foundation.config.num_hidden_layers", 10**9, "model.foundation", start=composed)
    yield setting("model.foundation.lr", -1.0, start=composed)


# Plugin modules

MODULE_FILE = """
import torch
def raises(**given): raise KeyError('inside')
def exits(**given): raise SystemExit(3)
def number(**given): return 3
def divides(**given): return 1 / 0
def asserts(**given): assert False, 'no'
class Wrong(torch.nn.Module):
    def __init__(self, width): super().__init__()
"""
MODULES = {
    "os:system": "os:system",
    "nowhere:Class": "nowhere",
    "a.b": "model.module",
    ":x": "model.module",
    "os:": "model.module",
    "corpus_module:missing": "missing",
    "corpus_module:raises": "inside",
    "corpus_module:number": "int",
    "corpus_module:divides": "division",
    "corpus_module:asserts": "no",
    "corpus_module:Wrong": "corpus_module:Wrong",
    "..:x": "model.module",
    "corpus module:x": "model.module",
}


def modules() -> Iterator[Case]:
    for module, said in MODULES.items():

        def prepare(folder: Path, module: str = module) -> list[object]:
            (shared() / "corpus_module.py").write_text(MODULE_FILE)
            if str(shared()) not in sys.path:
                sys.path.append(str(shared()))  # the forked process inherits it
            model = base()["model"] | {"module": module, "config": {"vocab_size": 512}}
            return ["train", write(folder, base() | {"model": model})]

        yield Case(f"model.module = {module}", prepare, ("model.module",) if "corpus" in module else (said,))


# Invalid optimizers

OPTIMIZER_FILE = """
import torch
number = 3
def function(train): return 1.0
def nothing(train, step): return None
class Bare(torch.optim.Optimizer):
    def __init__(self, speed): super().__init__(speed, {})
class Fails(torch.optim.Optimizer):
    def __init__(self, params, lr, weight_decay): super().__init__(params, {'lr': lr / 0})
class Idle(torch.optim.Optimizer):
    def __init__(self, params, lr, weight_decay): super().__init__(params, {'lr': lr})
"""
OWN = "corpus_optimizer"
OPTIMIZERS: list[tuple[str, Any, str]] = [
    ("kind", "sgd", "optimizer.kind"),
    ("kind", "AdamW", "did you mean adamw"),
    ("kind", ":x", "optimizer.kind"),
    ("kind", "os:", "optimizer.kind"),
    ("kind", ".os:system", "optimizer.kind"),
    ("kind", "a b:c", "optimizer.kind"),
    ("kind", LONG, "optimizer.kind"),
    ("kind", "os:system", "not a subclass"),
    ("kind", "nowhere:Class", "nowhere"),
    ("kind", "torch.optim:AdaamW", "did you mean AdamW"),
    ("kind", f"{OWN}:number", "not a subclass"),
    ("kind", f"{OWN}:function", "not a subclass"),
    ("kind", f"{OWN}:Bare", "Bare(speed)"),
    ("kind", f"{OWN}:Fails", "division"),
    ("kind", f"{OWN}:Idle", "Idle"),
    ("kind", "torch.optim:LBFGS", "LBFGS"),
    ("options", {"betas": "x"}, "optimizer.options.betas"),
    ("options", {"betas": {"a": 1}}, "optimizer.options.betas"),
    ("options", {"eps": True}, "optimizer.options.eps"),
    ("options", {"eps": NAN}, "optimizer.options.eps"),
    ("options", {"momentum": 0.9}, "optimizer.options.momentum"),
    ("options", {"foreach": True}, "optimizer.options.foreach"),
    ("options", {"params": []}, "optimizer.options.params"),
    ("options", {"lr": 1}, "train.lr"),
    ("options", {"nonsense": [[[[]]]]}, "optimizer.options.nonsense"),
    ("options", {3: 4}, "optimizer.options"),
    ("groups", [{"match": "nothing.*", "lr": 1.0}], "optimizer.groups.0.match"),
    ("groups", [{"match": "[", "lr": 1.0}], "optimizer.groups.0.match"),
    ("groups", [{"match": "\x1b[31m\n", "lr": 1.0}], "optimizer.groups.0.match"),
    ("groups", [{"match": "*a" * 2000, "lr": 1.0}], "optimizer.groups.0.match"),
    ("groups", [{"match": "*", "lr": 1.0}, {"match": "*", "lr": 2.0}], "optimizer.groups.1.match"),
    ("groups", [{"match": "*", "freeze": True}], "frozen"),
    ("groups", [{"match": "*", "freeze": True, "lr": 1.0}], "frozen"),
    ("groups", [{"match": ""}], "optimizer.groups.0.match"),
    ("groups", [{"lr": 1.0}], "optimizer.groups.0.match"),
    ("groups", [{"match": "*", "lr": 0.0}], "optimizer.groups.0.lr"),
    ("groups", [{"match": "*", "lr": INFINITE}], "optimizer.groups.0.lr"),
    ("groups", [{"match": "*", "weight_decay": -1}], "optimizer.groups.0.weight_decay"),
    ("groups", [{"match": "*", "kind": "nonsense"}], "optimizer.groups.0.kind"),
    ("groups", [{"match": "*", "learning_rate": 1.0}], "optimizer.groups.0.learning_rate"),
    ("groups", ["*"], "optimizer.groups"),
    ("ema", {"decay": 2}, "optimizer.ema.decay"),
    ("ema", {"decay": 0}, "optimizer.ema.decay"),
    ("ema", {"decay": NAN}, "optimizer.ema.decay"),
    ("ema", {"every": 0}, "optimizer.ema.every"),
    ("ema", {"every": 10**30}, "optimizer.ema.every"),
    ("ema", 0.999, "optimizer.ema"),
]


def optimizers() -> Iterator[Case]:
    def start() -> dict[str, Any]:
        (shared() / f"{OWN}.py").write_text(OPTIMIZER_FILE)
        if str(shared()) not in sys.path:
            sys.path.append(str(shared()))
        return base()

    def of_kind(kind: str) -> Callable[[], dict[str, Any]]:
        return lambda: base() | {"optimizer": {"kind": kind}}

    for key, value, said in OPTIMIZERS:
        yield setting(f"optimizer.{key}", value, said, start=start)
    for kind, name, value in (
        ("muon", "ns_steps", 10**30),
        ("muon", "ns_steps", 2.0),
        ("muon", "ns_coefficients", [1, 2]),
        ("muon", "ns_coefficients", [1, 2, INFINITE]),
        ("muon", "adjust_lr_fn", "none"),
        ("muon", "dtype", "bf16"),
        ("adafactor", "eps", [0.1]),
        ("adafactor", "eps", [None, None]),
        ("adafactor", "betas", [0.9, 0.95]),
        ("adafactor", "d", NAN),
        ("adamw_8bit", "block_size", 0),
    ):
        yield setting(f"optimizer.options.{name}", value, start=of_kind(kind), note=f"{kind}: ")
    for name in ("function", "nothing", "number", "missing"):
        yield setting("train.schedule", f"{OWN}:{name}", start=start)
    yield setting("train.schedule", "builtins:print", "gave None")
    yield setting("train.betas", [0.9, 0.95], "case.yaml", "optimizer.options.betas")


LOSSES_FILE = """
import torch
from omnizoo import Loss
number = 3
class Sum(Loss):
    def from_logits(self, logits, batch): return logits.sum()
class Bare: pass
class Blind(Loss): pass
class Fails(Sum):
    def __init__(self): self.rate = 1 / 0
class Late(Sum):
    def count(self, totals): return self.seen
class Tensor(Sum):
    def count(self, totals): return torch.ones(())
class Odd(Sum):
    def count(self, totals): return -0.5
class Rows(Loss):
    def from_logits(self, logits, batch): return logits
class Short(Loss):
    def from_logits(self): return None
class Upset(Sum):
    def set_up(self): pass
"""
OWN_LOSSES = "corpus_losses"
LOSSES: list[tuple[Any, tuple[str, ...]]] = [
    ([], ("train.losses",)),
    (["cross_entropy"], ("train.losses",)),
    ([None], ("train.losses",)),
    ({"cross_entropy": 1.0}, ("train.losses",)),
    ([{"kind": "balance"}], ("train.losses", "cross_entropy")),
    ([{"kind": "cross-entropy"}], ("train.losses.0.kind", "did you mean cross_entropy")),
    ([{"kind": "router"}], ("train.losses.0.kind", "did you mean router_z")),
    ([{"kind": ":x"}], ("train.losses.0.kind",)),
    ([{"kind": LONG}], ("train.losses.0.kind",)),
    ([{"weight": -1}], ("train.losses.0.weight",)),
    ([{"weight": NAN}], ("train.losses.0.weight",)),
    ([{"weight": 1e300}], ("train.losses.0.weight",)),
    ([{"wieght": 1}], ("train.losses.0.wieght", "did you mean train.losses.0.weight")),
    ([{"name": "a/b"}], ("train.losses.0.name",)),
    ([{"name": "\x1b[31m\n"}], ("train.losses.0.name",)),
    ([{"name": LONG}], ("train.losses.0.name",)),
    ([{}, {}], ("train.losses.1", "'text'")),
    ([{}, {"kind": "balance", "name": "text"}], ("train.losses.1", "'text'")),
    ([{"options": {"label_smoothing": 1.0}}], ("train.losses.0.options.label_smoothing",)),
    ([{"options": {"label_smoothing": True}}], ("train.losses.0.options.label_smoothing",)),
    ([{"options": {"z_loss": -1}}], ("train.losses.0.options.z_loss",)),
    ([{"options": {"z_loss": INFINITE}}], ("train.losses.0.options.z_loss",)),
    ([{"options": {"smoothing": 0.1}}], ("train.losses.0.options.smoothing", "label_smoothing")),
    ([{}, {"kind": "balance", "options": {"z_loss": 0.1}}], ("train.losses.1.options.z_loss",)),
    ([{"kind": "os:system"}], ("train.losses.0.kind", "not a subclass")),
    ([{"kind": "nowhere:Class"}], ("train.losses.0.kind", "nowhere")),
    ([{"kind": f"{OWN_LOSSES}:number"}], ("train.losses.0.kind", "not a subclass")),
    ([{"kind": f"{OWN_LOSSES}:Bare"}], ("train.losses.0.kind", "not a subclass")),
    ([{"kind": f"{OWN_LOSSES}:Blind"}], ("train.losses.0.kind", "from_logits(logits, batch)")),
    ([{"kind": f"{OWN_LOSSES}:Summ"}], ("train.losses.0.kind", "did you mean Sum")),
    ([{"kind": f"{OWN_LOSSES}:Sum", "options": {"rate": 1}}], ("train.losses.0.options", "rate")),
    ([{"kind": f"{OWN_LOSSES}:Sum", "options": {3: 4}}], ("train.losses.0.options",)),
    ([{"kind": f"{OWN_LOSSES}:Fails"}], ("train.losses.0.options", "division")),
    ([{"kind": f"{OWN_LOSSES}:Late"}], ("train.losses.0.kind", "before the forward pass")),
    ([{"kind": f"{OWN_LOSSES}:Tensor"}], ("train.losses.0.kind", "count(totals)")),
    ([{"kind": f"{OWN_LOSSES}:Odd"}], ("train.losses.0.kind", "-0.5")),
    ([{"kind": f"{OWN_LOSSES}:Rows"}], ("train.losses.0.kind", "expected the sum")),
    ([{"kind": f"{OWN_LOSSES}:Short"}], ("train.losses.0.kind", "Short.from_logits()")),
    ([{"kind": f"{OWN_LOSSES}:Upset"}], ("train.losses.0.kind", "Upset.set_up()")),
]


def losses() -> Iterator[Case]:
    def start() -> dict[str, Any]:
        (shared() / f"{OWN_LOSSES}.py").write_text(LOSSES_FILE)
        if str(shared()) not in sys.path:
            sys.path.append(str(shared()))
        return base()

    for value, says in LOSSES:
        yield setting("train.losses", value, *says, start=start)
    yield setting("train.losses", [{"kind": f"{OWN_LOSSES}:Sum", "weight": 0}, {}], "", start=start)
    for old, new in MOVED_KEYS.items():
        yield setting(old, 1, f"{old} is now {new}")
    yield setting("train.early_stop.patience", 3, "train.early_stop is now evaluation.early_stop")
    yield setting("train.router_bias_rate", 0.1, "router", start=lambda: base() | {"router": 3})
    yield setting(
        "train.losses", [{"name": "image"}], "train.losses.0", "'image'", "decoder", start=composed, note="composed: "
    )


# Files that are not configs


def bomb(width: int, depth: int) -> str:
    lines = ["a0: &a0 [" + ", ".join("x" * width) + "]"]
    lines += [f"a{n}: &a{n} [" + ", ".join([f"*a{n - 1}"] * width) + "]" for n in range(1, depth)]
    return "\n".join(lines) + "\n"


def good() -> str:
    return yaml.safe_dump(base())


def files() -> Iterator[Case]:
    yield whole("empty", "", "empty")
    yield whole("a comment", "# nothing\n", "empty")
    yield whole("a list", "- a\n- b\n")
    yield whole("a number", "17\n")
    yield whole("text", "hello\n")
    yield whole("null", "~\n")
    yield whole("a bomb of lists", bomb(9, 9), "alias")
    yield whole(
        "a bomb of mappings",
        "a: &a {x: 1}\n"
        + "".join(
            f"{b}: &{b} {{{', '.join(f'k{i}: *{a}' for i in range(9))}}}\n"
            for a, b in zip("abcdefgh", "bcdefghi", strict=True)
        ),
        "alias",
    )
    yield whole(
        "a bomb of merges",
        "a: &a {x: 1}\n"
        + "".join(
            f"{b}: &{b}\n  <<: [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
        ),
    )
    yield whole(
        "a bomb in model.config", "model:\n  config:\n" + "".join(f"    {row}\n" for row in bomb(9, 9).splitlines())
    )
    yield whole("an anchor in itself", "train: &t\n  steps: *t\n", "itself")
    yield whole("a list in itself", "data: &d [*d]\n", "itself")
    yield whole("an unknown alias", "train: *nowhere\n", "nowhere")
    yield whole("nested 100,000 deep", "a: " + "[" * 100_000, "nested")
    yield whole("nested 100,000 deep and closed", "a: " + "[" * 100_000 + "]" * 100_000, "nested")
    yield whole("mappings nested 5,000 deep", "".join(" " * n + "a:\n" for n in range(500)), "nested")
    yield whole("nested 200 deep in model.config", "model: {config: {a: " + "[" * 200 + "]" * 200 + "}}", "nested")
    yield whole("a tab", "train:\n\tsteps: 1\n", ":2")
    yield whole("a Python object", "train: !!python/object:os.system {}\n")
    yield whole("a Python call", "train: !!python/object/apply:os.system ['true']\n")
    yield whole("a tag", "train: {steps: !mine 3}\n")
    yield added("bytes", "train: {steps: !!binary aGVsbG8=}\n")
    yield whole("a set", "model: {config: !!set {a, b}}\n")
    yield whole("a timestamp", "model: {config: {x: !!timestamp 2024-01-01}}\n")
    yield whole("a bad tagged number", "train: {steps: !!int abc}\n")
    yield whole("two documents", "a: 1\n---\nb: 2\n")
    yield whole("a key twice", "train: {steps: 1}\ntrain: {steps: 2}\n", "twice", ":2")
    yield whole("an inner key twice", "train:\n  steps: 1\n  steps: 2\n", "train.steps", "twice")
    yield whole("a key twice in model.config", "model:\n  config: {model_type: llama, a: 1, a: 2}\n", "twice")
    yield whole("a list as a key", "? [a, b]\n: 3\n")
    yield whole("a mapping as a key", "? {a: b}\n: 3\n")
    yield added("a number as a key", "1: 2\n", "1")
    yield added("null as a key", "~: 2\n")
    yield whole("no closing quote", 'train: {steps: "1}\n')
    yield whole("no closing brace", "train: {steps: 1\n")
    yield whole("JSON cut short", json.dumps({"train": {"steps": 1}})[:-1])
    yield whole("UTF-16", "train: {steps: 1}\n".encode("utf-16"))
    yield whole("Latin-1", "log: {dir: caf\xe9}\n".encode("latin-1"))
    yield whole("bytes of nothing", bytes(1000))
    yield whole("random bytes", bytes(range(256)) * 20)
    yield whole("an ELF file", Path("/bin/true").read_bytes()[:5000] if Path("/bin/true").exists() else b"\x7fELF\0")
    yield added("NUL in a value", 'log: {dir: "a\\0b"}\n', "log.dir")
    yield added("NUL in a key", '"a\\0b": 1\n')
    yield added("a lone surrogate", 'log: {dir: "\\ud800"}\n', "log.dir")
    yield added("line breaks in a key", '"tr\\nain\\u2028x\\u0085": 1\n', "not a key")
    yield added("an escape sequence in a key", '"\\e[31mred": 1\n', "not a key")
    yield added("a key of 100,000 characters", f"? {LONG}\n: 1\n", "not a key")
    yield added("a number of 100,000 digits", f"train: {{steps: {'9' * 100_000}}}\n", "train.steps")
    yield added("a hexadecimal number of 100,000 digits", f"train: {{steps: 0x{'f' * 100_000}}}\n", "train.steps")
    yield whole("25,000 keys", "".join(f"k{n}: 1\n" for n in range(25_000)))
    yield whole("a file of 2 MB", "# comment\n" * 200_000, "bytes")
    yield whole(
        "dates",
        "log: {dir: 2024-01-01}\ntrain: {steps: 2024-01-01}\nmodel: {path: x}\ndata: {sources: [{path: y}]}\n",
        "train.steps",
    )
    for text in ("1:30", "0o17", "017", "yes", "on", "1_0e", "\uff10", "1.0", ".5", "1,000", "0b11", "~", "''", "' 3'"):
        yield whole(
            f"train.steps: {text}",
            f"{REST}train: {{steps: {text}}}\n" if text != "1,000" else f"{REST}train:\n  steps: 1,000\n",
            "train.steps",
        )
    for text in ("1:30", "1e", "1e-4x", "e-4", "1 e-4", "nan", ".nan", ".inf", "-.inf", "1e999", "0x10.5", "infinity"):
        yield whole(f"train.lr: {text}", f"{REST}train: {{lr: {text}}}\n", "train.lr")
    for text in ("yes", "on", "1", "'true'", "y", "tRue"):
        yield whole(
            f"data.shuffle: {text}",
            f"model: {{path: x}}\ndata: {{sources: [{{path: y}}], shuffle: {text}}}\n",
            "data.shuffle",
        )

    def special(name: str, make: Callable[[Path], Path], *says: str) -> Case:
        return Case(f"file: {name}", lambda folder: ["train", make(folder)], says)

    def fifo(folder: Path) -> Path:
        os.mkfifo(folder / "case.yaml")
        return folder / "case.yaml"

    def large(folder: Path) -> Path:
        with (folder / "case.yaml").open("wb") as file:
            file.truncate(100 * 2**20)
        return folder / "case.yaml"

    def loop(folder: Path) -> Path:
        (folder / "case.yaml").symlink_to(folder / "case.yaml")
        return folder / "case.yaml"

    yield special("a folder", lambda folder: folder, "folder")
    yield special("a named pipe", fifo, "case.yaml")
    yield special("100 MB", large, "case.yaml", "bytes")
    yield special("a link to itself", loop, "case.yaml")
    yield special("a device", lambda folder: Path("/dev/zero"), "/dev/zero")
    yield special("nothing there", lambda folder: folder / "no.yaml", "no such")
    yield special("below a file", lambda folder: write(folder, base()) / "below.yaml", "below.yaml")
    yield special("a long name", lambda folder: folder / LONG[:5000], "name")
    yield special("NUL in its name", lambda folder: Path(f"{folder}/a\0b"), "config")


# Command lines

LINES: list[Case] = [
    line(says=("command",)),
    line("tarin", says=("train",)),
    line("", says=("COMMAND",)),
    line("train", says=("CONFIG",)),
    line("train", "", says=("config",)),
    line("train", "CONFIG", "CONFIG", says=("argument",)),
    line("train", "CONFIG", "--train.steps", says=("--train.steps",)),
    line("train", "CONFIG", "--train.steps=", says=("train.steps",)),
    line("train", "CONFIG", "--train.steps", "--train.lr", "1", says=("--train.steps",)),
    line("train", "CONFIG", "--train", says=("--train",)),
    line("train", "CONFIG", "--train=3", says=("--train",)),
    line("train", "CONFIG", "--train.", "3", says=("train",)),
    line("train", "CONFIG", "--.steps", "3", says=("steps",)),
    line("train", "CONFIG", "--train..steps", "3", says=("train.",)),
    line("train", "CONFIG", "--train.steps.deeper", "3", says=("train.steps",)),
    line("train", "CONFIG", "--trian.steps", "3", says=("train.steps",)),
    line("train", "CONFIG", "--train.setps", "3", says=("train.steps",)),
    line("train", "CONFIG", "--steps", "3", says=("--train.steps",)),
    line("train", "CONFIG", "-train.steps", "3", says=("argument",)),
    line("train", "CONFIG", "train.steps=3", says=("train.steps=3",)),
    line("train", "CONFIG", "--train.steps", "nope", says=("train.steps", "nope")),
    line("train", "CONFIG", "--train.steps", "[1", says=("train.steps",)),
    line("train", "CONFIG", "--train.steps", "1\n2", says=("train.steps",)),
    line("train", "CONFIG", "--train.steps", "9" * 5000, says=("train.steps",)),
    line("train", "CONFIG", "--train.steps", "1: 2: 3", says=("train.steps",)),
    line("train", "CONFIG", "--train.steps", "!!python/name:os.system", says=("train.steps",)),
    line("train", "CONFIG", "--train.lr", "1e-4x", says=("train.lr",)),
    line("train", "CONFIG", "--train", "{steps: 3}", says=("argument",)),
    line("train", "CONFIG", "--model.config.vocab_size", "nope", says=("model.config", "vocab_size")),
    line("train", "CONFIG", "--model.config.vocab_sise", "512", says=("vocab_sise", "vocab_size")),
    line("train", "CONFIG", "--model.config", "nope", says=("model.config", "nope")),
    line("train", "CONFIG", "--data.sources.5.path", "x", says=("data.sources",)),
    line("train", "CONFIG", "--data.sources.-1.path", "x", says=("data.sources",)),
    line("train", "CONFIG", "--data.sources.first.path", "x", says=("data.sources",)),
    line("train", "CONFIG", "--data.sources.99999999999999999999.path", "x", says=("data.sources",)),
    line("train", "CONFIG", "--data.sources.1" + "0" * 5000 + ".path", "x", says=("data.sources",)),
    line("train", "CONFIG", "--data.sources.²", "x", says=("data.sources",)),
    line("train", "CONFIG", "--data.sources.0", "x", says=("data.sources",)),
    line("train", "CONFIG", "--model.config." + ".".join("a" * 5000), "x", says=("model.config",)),
    line("train", "CONFIG", "--log.dir", "\udcff", says=("log.dir",)),
    line("train", "CONFIG", "--log.dir", "FILE", says=("log.dir",)),
    line("train", "CONFIG", "--checkpoint.dir", "FILE", says=("checkpoint.dir",)),
    line("train", "CONFIG", "--train.steps", "1", "--train.steps", "0", says=("train.steps",)),
    line("train", "CONFIG", "--nproc", "0", says=("--nproc",)),
    line("train", "CONFIG", "--nproc", "-1", says=("--nproc",)),
    line("train", "CONFIG", "--nproc", "two", says=("--nproc",)),
    line("train", "CONFIG", "--nproc", "1000000000", says=("--nproc",)),
    line("train", "CONFIG", "--nproc", "1000000000", "--parallel.ring", "3", says=("--nproc",)),
    line("train", "CONFIG", "--nproc", "9" * 5000, says=("--nproc",)),
    line("train", "CONFIG", "--nproc", says=("--nproc",)),
    line("train", "CONFIG", "--nporc", "2", says=("--nproc",)),
    line("train", "CONFIG", "\x1b[31mred\nline", says=("argument",)),
    line("verify", "CONFIG", "--world", "0", says=("--world",)),
    line("verify", "CONFIG", "--world", "-1", says=("--world",)),
    line("verify", "CONFIG", "--world", "1000000000", says=("--world",)),
    line("verify", "CONFIG", "--world", "x", says=("--world",)),
    line("verify", "CONFIG", "--world", "1.5", says=("--world",)),
    line("verify", "CONFIG", "--layouts", "", says=("--layouts",)),
    line("verify", "CONFIG", "--layouts", ",", says=("--layouts",)),
    line("verify", "CONFIG", "--layouts", "dp0", says=("--layouts",)),
    line("verify", "CONFIG", "--layouts", "dp3", says=("--layouts",)),
    line("verify", "CONFIG", "--layouts", "nonsense4", says=("--layouts",)),
    line("verify", "CONFIG", "--layouts", "dp2.dp2", says=("--layouts",)),
    line("verify", "CONFIG", "--layouts", "dp²", says=("--layouts",)),
    line("verify", "CONFIG", "--layouts", "dp4.ep4", says=("ep",)),
    line("verify", "CONFIG", "--layouts", "dp" + "9" * 5000, says=("--layouts",)),
    line("verify", "CONFIG", "--layouts", "dp4.ep0", says=("--layouts",)),
    line("verify", "CONFIG", "--precision", "fp8", says=("--precision",)),
    line("verify", "CONFIG", "--families", "nonsense", says=("nonsense",)),
    line("verify", "CONFIG", "--families", "", says=("--families",)),
    line("verify", "CONFIG", "--families", "qwen3,,llama", says=("--families",)),
    line("verify", "CONFIG", "--families", "../x", says=("--families",)),
    line("verify", "FOLDER", says=("folder",)),
    line("data", says=("inspect",)),
    line("data", "nonsense", "CONFIG", says=("inspect",)),
    line("data", "inspect", says=("CONFIG",)),
    line("data", "inspect", "CONFIG", "--samples", "-1", says=("--samples",)),
    line("data", "inspect", "CONFIG", "--samples", "x", says=("--samples",)),
    line("data", "inspect", "CONFIG", "--samples", "9" * 5000, says=("--samples",)),
    line("data", "inspect", "CONFIG", "--samples", "1000000000000", says=()),
    line("data", "inspect", "CONFIG", "--out", "FOLDER", says=("--out",)),
    line("data", "inspect", "CONFIG", "--out", "/proc/nowhere/page.html", says=("--out",)),
    line("data", "inspect", "CONFIG", "--out", "", says=("--out",)),
    line("data", "inspect", "CONFIG", "--out", "a\0b", says=("--out",)),
    line("data", "inspect", "CONFIG", "--out", LONG, says=("--out",)),
    line("data", "inspect", "CONFIG", "--data.lanes", "0", says=("data.lanes",)),
    line("export", says=("CHECKPOINT",)),
    line("export", "FOLDER", says=("OUT_DIR",)),
    line("export", "nowhere", "out", says=("nowhere",)),
    line("export", "FILE", "out", says=("folder",)),
    line("export", "FOLDER", "FILE", says=("step_",)),
    line("export", "a\0b", "out", says=("folder",)),
    line("export", LONG, "out", says=("folder",)),
    line("export", "FOLDER", "out", "more", says=("more",)),
    line("generate", says=("MODEL",)),
    line("generate", "nowhere", says=("--prompt",)),
    line("generate", "nowhere", "--prompt", "x", says=("nowhere",)),
    line("generate", "FILE", "--prompt", "x", says=("file",)),
    line("generate", "FOLDER", "--prompt", "x", says=("config.json",)),
    line("generate", "a\0b", "--prompt", "x", says=("folder",)),
    line("generate", "FOLDER", "--prompt", "x", "--messages", "y", says=("--messages",)),
    line("generate", "FOLDER", "--messages", "nowhere.json", says=("nowhere.json",)),
    line("generate", "FOLDER", "--messages", "FOLDER", says=("--messages",)),
    line("generate", "FOLDER", "--messages", "CONFIG", says=("--messages",)),
    line("generate", "FOLDER", "--messages", "a\0b", says=("--messages",)),
    line("generate", "FOLDER", "--prompt", "x", "--max-tokens", "0", says=("--max-tokens",)),
    line("generate", "FOLDER", "--prompt", "x", "--max-tokens", "-1", says=("--max-tokens",)),
    line("generate", "FOLDER", "--prompt", "x", "--max-tokens", "1e3", says=("--max-tokens",)),
    line("generate", "FOLDER", "--prompt", "x", "--temperature", "-1", says=("--temperature",)),
    line("generate", "FOLDER", "--prompt", "x", "--temperature", "nan", says=("--temperature",)),
    line("generate", "FOLDER", "--prompt", "x", "--temperature", "inf", says=("--temperature",)),
    line("generate", "FOLDER", "--prompt", "x", "--top-p", "0", says=("--top-p",)),
    line("generate", "FOLDER", "--prompt", "x", "--top-p", "nan", says=("--top-p",)),
    line("generate", "FOLDER", "--prompt", "x", "--top-k", "-1", says=("--top-k",)),
    line("generate", "FOLDER", "--prompt", "x", "--seed", "x", says=("--seed",)),
    line("generate", "FOLDER", "--prompt", "x", "--seed", str(2**64), says=("--seed",)),
    line("generate", "FOLDER", "--prompt", "x", "--seed", "-1", says=("--seed",)),
    line("generate", "FOLDER", "--prompt", "x", "--out", "FILE", says=("--out",)),
    line("doctor", "more", says=("more",)),
    line("doctor", "--jsno", says=("--json",)),
    line("recipes", "more", says=("more",)),
    line("--versoin", says=("--version",)),
]


CASES: list[Case] = [
    *files(),
    *wrong_types(),
    *(setting(key, value) for key, value in BEYOND),
    *(setting(key, value, "") for key, value in FINE),
    *relations(),
    *shapes(),
    *parts(),
    *modules(),
    *optimizers(),
    *losses(),
    *LINES,
]
