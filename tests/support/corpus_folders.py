"""Damaged and malicious model folders, exports and run folders: each prints one error line.

Code that is run leaves a trace: code in a folder writes a file, and the standard module `this` prints a poem when it is
imported.
"""

import json
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from corpus import Case, run_main
from fixtures import make_tokenizer
from processes import Result
from safetensors.torch import load_file, save_file
from tiny import model_config, write_config
from transformers import AutoConfig, AutoModelForCausalLM

Damage = Callable[[Path], None]
making = Lock()  # shared folders are written once
TRACE = "executed"
POEM = "Zen of Python"


def no_such_tokenizer(folder: Path) -> list[object]:
    return ["train", write_config(folder), "--model.tokenizer", folder / "nowhere"]


# ---- folders and how to damage them


def model_folder(folder: Path) -> Path:
    """Return a copy of a valid model folder."""
    shared = folder.parent / "shared_model"
    with making:
        if not shared.exists():
            fields = model_config("qwen3")
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields))
            model.save_pretrained(shared)
            make_tokenizer(shared)
    return Path(shutil.copytree(shared, folder / "model"))


def run_folder(folder: Path) -> Path:
    """Return a copy of a run with one step."""
    shared = folder.parent / "shared_run"
    with making:
        if not shared.exists():
            result, _ = run_main(["train", str(write_config(shared, train={"steps": 1, "packs_per_step": 1}))])
            assert result.code == 0, result.stderr
    return Path(shutil.copytree(shared / "run", folder / "run"))


def edit(name: str, **changes: Any) -> Damage:
    def damage(model: Path) -> None:
        file = model / name
        fields = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps({k: v for k, v in (fields | changes).items() if v is not ...}))

    return damage


def write(name: str, content: bytes | str) -> Damage:
    def damage(model: Path) -> None:
        (model / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    return damage


def cut(name: str) -> Damage:
    def damage(model: Path) -> None:
        content = (model / name).read_bytes()
        (model / name).write_bytes(content[: len(content) // 2])

    return damage


def remove(*names: str) -> Damage:
    def damage(model: Path) -> None:
        for name in names:
            (model / name).unlink()

    return damage


def folder_for(name: str) -> Damage:
    def damage(model: Path) -> None:
        (model / name).unlink()
        (model / name).mkdir()

    return damage


def both(*damages: Damage) -> Damage:
    def damage(model: Path) -> None:
        for apply in damages:
            apply(model)

    return damage


def plant(name: str) -> Damage:
    """Write Python code that leaves a trace next to the model folder when it is run."""

    def damage(model: Path) -> None:
        (model / name).write_text(f"open({str(model.parent / TRACE)!r}, 'w')\nclass Evil: pass\n")

    return damage


class Trace:
    """An object whose pickle writes a file when it is loaded."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return open, (str(self.file), "w")


def pickled(name: str) -> Damage:
    def damage(model: Path) -> None:
        (model / name).write_bytes(pickle.dumps(Trace(model.parent / TRACE)))

    return damage


def weights(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Damage:
    def damage(model: Path) -> None:
        save_file(change(load_file(model / "model.safetensors")), model / "model.safetensors", {"format": "pt"})

    return damage


def header(length: int, text: bytes = b"{}") -> Damage:
    return write("model.safetensors", struct.pack("<Q", length) + text + bytes(64))


def tensors(**fields: Any) -> Damage:
    text = json.dumps(fields).encode()
    return header(len(text), text)


def index(content: Any) -> Damage:
    return write("model.safetensors.index.json", content if isinstance(content, bytes) else json.dumps(content))


NORM = "model.norm.weight"


def not_numbers(stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return stored | {NORM: stored[NORM] * torch.nan}


FLOAT = {"dtype": "F32", "shape": [4]}
ESCAPE = "{{ ''.__class__.__mro__[1].__subclasses__() }}"

# name: the damage to a valid folder, and what the error line contains
CONFIG: dict[str, tuple[Damage, tuple[str, ...]]] = {
    "no config.json": (remove("config.json"), ("config.json",)),
    "an empty config.json": (write("config.json", ""), ("config.json", "JSON")),
    "a config.json of noise": (write("config.json", bytes(range(256))), ("config.json", "JSON")),
    "half a config.json": (cut("config.json"), ("config.json", "JSON")),
    "a config.json that is a list": (write("config.json", "[1]"), ("config.json", "object")),
    "a config.json that is a number": (write("config.json", "7"), ("config.json", "object")),
    "a folder in place of config.json": (folder_for("config.json"), ("config.json",)),
    "a config.json 100,000 levels deep": (write("config.json", '{"a":' * 100_000), ("config.json",)),
    "a config.json without a family": (edit("config.json", model_type=...), ("model_type",)),
    "a family that is a number": (edit("config.json", model_type=3), ("model_type",)),
    "a family nobody knows": (edit("config.json", model_type="no_such"), ("no_such",)),
    "a family that is a path": (edit("config.json", model_type="../../etc"), ("config.json",)),
    "a negative width": (edit("config.json", hidden_size=-32), ("model",)),
    "a width in words": (edit("config.json", hidden_size="many"), ("config.json",)),
    "no heads": (edit("config.json", num_attention_heads=0), ("model",)),
    "a billion layers": (edit("config.json", num_hidden_layers=10**9, layer_types=...), ("layer",)),
    "a dtype that is none": (edit("config.json", dtype="nonsense"), ("config.json",)),
    "a dtype that is a function": (edit("config.json", dtype="load"), ("config.json",)),
    "an activation nobody knows": (edit("config.json", hidden_act="no_such"), ("no_such",)),
    "attention from a repository": (edit("config.json", attn_implementation="owner/kernel"), ("owner/kernel", "code")),
    "attention from a repository, the private way": (
        edit("config.json", _attn_implementation="owner/kernel"),
        ("owner/kernel", "code"),
    ),
    "experts from a repository": (edit("config.json", experts_implementation="owner/kernel"), ("owner/kernel",)),
    "quantised weights": (edit("config.json", quantization_config={"quant_method": "fp8"}), ("quantization_config",)),
    "code for a family nobody knows": (
        both(edit("config.json", model_type="evil", auto_map={"AutoConfig": "evil.Evil"}), plant("evil.py")),
        ("evil.Evil", "--trust-remote-code"),
    ),
    "code of another repository": (
        edit("config.json", model_type="evil", auto_map={"AutoConfig": "owner/repo--evil.Evil"}),
        ("owner/repo--evil.Evil", "--trust-remote-code"),
    ),
    "an auto_map that is a list": (edit("config.json", model_type="evil", auto_map=["evil.Evil"]), ("evil.Evil",)),
    "a generation_config.json of noise": (write("generation_config.json", bytes(range(256))), ("generation_config",)),
    "half a generation_config.json": (cut("generation_config.json"), ("generation_config", "JSON")),
}
WEIGHTS: dict[str, tuple[Damage, tuple[str, ...]]] = {
    "no weights": (remove("model.safetensors"), ("model.safetensors", "never from pickles")),
    "pickled weights": (both(remove("model.safetensors"), pickled("pytorch_model.bin")), ("never from pickles",)),
    "a pickle called safetensors": (pickled("model.safetensors"), ("model.safetensors",)),
    "empty weights": (write("model.safetensors", ""), ("model.safetensors",)),
    "weights of noise": (write("model.safetensors", bytes(range(256)) * 40), ("model.safetensors",)),
    "half of the weights": (cut("model.safetensors"), ("model.safetensors",)),
    "a folder in place of weights": (folder_for("model.safetensors"), ("model.safetensors",)),
    "a header of 2^60 bytes": (header(2**60), ("model.safetensors",)),
    "a header of 2^64 - 1 bytes": (header(2**64 - 1), ("model.safetensors",)),
    "a header that is no JSON": (header(8, b"not JSON"), ("model.safetensors",)),
    "a header that is a list": (header(2, b"[]"), ("model.safetensors",)),
    "a tensor past the end": (tensors(a=FLOAT | {"data_offsets": [0, 2**40]}), ("model.safetensors",)),
    "a tensor that begins after its end": (tensors(a=FLOAT | {"data_offsets": [16, 0]}), ("model.safetensors",)),
    "tensors one over the other": (
        tensors(a=FLOAT | {"data_offsets": [0, 16]}, b=FLOAT | {"data_offsets": [8, 24]}),
        ("model.safetensors",),
    ),
    "a tensor of a type nobody knows": (
        tensors(a={"dtype": "F7", "shape": [4], "data_offsets": [0, 16]}),
        ("model.safetensors",),
    ),
    "a tensor of negative shape": (
        tensors(a={"dtype": "F32", "shape": [-4], "data_offsets": [0, 16]}),
        ("model.safetensors",),
    ),
    "a weight is missing": (weights(lambda w: {k: v for k, v in w.items() if k != NORM}), (NORM,)),
    "a weight too many": (weights(lambda w: w | {"model.extra": torch.zeros(2)}), ("model.extra",)),
    "a weight of another shape": (weights(lambda w: w | {NORM: torch.zeros(3)}), (NORM,)),
    "weights that are whole numbers": (weights(lambda w: w | {NORM: torch.ones(32, dtype=torch.int64)}), (NORM,)),
    "an index of noise": (index(bytes(range(256))), ("index.json",)),
    "half an index": (index(b'{"weight_map": {"a": '), ("index.json",)),
    "an index that is a list": (index([]), ("index.json",)),
    "an index without a map": (index({"metadata": {}}), ("index.json", "weight_map")),
    "an index of nothing": (index({"weight_map": {}}), ("index.json", "weight_map")),
    "an index to the folder above": (index({"weight_map": {NORM: "../../x.safetensors"}}), ("../../x.safetensors",)),
    "an index to an absolute path": (index({"weight_map": {NORM: "/etc/passwd"}}), ("/etc/passwd",)),
    "an index of numbers": (index({"weight_map": {NORM: 7}}), ("index.json",)),
    "an index to a file that is not there": (index({"weight_map": {NORM: "b.safetensors"}}), ("b.safetensors",)),
    "an index to a pickle": (both(index({"weight_map": {NORM: "a.bin"}}), pickled("a.bin")), ("a.bin",)),
}
TOKENIZER: dict[str, tuple[Damage, tuple[str, ...]]] = {
    "no tokenizer": (remove("tokenizer.json", "tokenizer_config.json"), ("tokenizer",)),
    "an empty tokenizer.json": (write("tokenizer.json", ""), ("tokenizer",)),
    "a tokenizer.json of noise": (write("tokenizer.json", bytes(range(256))), ("tokenizer",)),
    "half a tokenizer.json": (cut("tokenizer.json"), ("tokenizer",)),
    "a tokenizer.json of nothing": (write("tokenizer.json", "{}"), ("tokenizer",)),
    "a tokenizer.json that is a list": (write("tokenizer.json", "[]"), ("tokenizer",)),
    "a folder in place of tokenizer.json": (folder_for("tokenizer.json"), ("tokenizer",)),
    "half a tokenizer_config.json": (cut("tokenizer_config.json"), ("tokenizer_config.json",)),
    "a tokenizer_config.json that is a list": (write("tokenizer_config.json", "[]"), ("tokenizer_config.json",)),
    "code for a tokenizer": (
        both(
            edit("tokenizer_config.json", tokenizer_class="Evil", auto_map={"AutoTokenizer": ["evil.Evil", None]}),
            plant("evil.py"),
        ),
        ("evil.Evil", "--trust-remote-code"),
    ),
    "a chat template that reaches for Python": (write("chat_template.jinja", ESCAPE), ("template",)),
    "a chat template with a mistake": (write("chat_template.jinja", "{% for %}"), ("template",)),
}
FLOW = {"kind": "flow", "options": {"size": 8, "patch": 4, "hidden": 16, "layers": 1}}
MARKS = {"begin": "<|a|>", "placeholder": "<|b|>", "end": "<|c|>"}


def composed(foundation: Any = None, top: dict[str, Any] | None = None, **part: Any) -> Damage:
    """Write the config of a composed model with `part` as its only decoder."""

    def damage(model: Path) -> None:
        fields = foundation if foundation is not None else model_config("qwen3")
        spec = {"marks": MARKS, "decoder": FLOW | part}
        config = {"model_type": "omnizoo", "foundation": fields, "modalities": {"picture": spec}}
        (model / "config.json").write_text(json.dumps(config | (top or {})))

    return damage


def nested() -> dict[str, Any]:
    spec = {"marks": MARKS, "decoder": FLOW | {"kind": "this:Poem"}}
    return {
        "model_type": "omnizoo",
        "foundation": model_config("qwen3"),
        "modalities": {"a": spec},
        "allow_code": ["this"],
        "hidden_size": 32,
    }


OMNI: dict[str, tuple[Damage, tuple[str, ...]]] = {
    "a decoder to import": (composed(kind="this:Poem"), ("this:Poem", "--allow-code this")),
    "a decoder to import from below a module": (composed(kind="xml.this:Poem"), ("--allow-code xml.this",)),
    "an encoder to import": (
        composed(top={"modalities": {"a": {"marks": MARKS, "encoder": {"kind": "this:Poem"}}}}),
        ("this:Poem", "--allow-code this"),
    ),
    "a config that allows itself code": (composed(top={"allow_code": ["this"]}, kind="this:Poem"), ("--allow-code",)),
    "a config that calls itself the user's": (composed(top={"is_own": True}, kind="this:Poem"), ("--allow-code",)),
    "a foundation that allows itself code": (composed(foundation=nested()), ("config.json",)),
    "a folder above": (composed(folder="../../etc"), ("../../etc", "outside")),
    "an absolute folder": (composed(folder="/etc"), ("/etc", "outside")),
    "a folder among the options": (composed(options={"folder": "/etc"}), ("/etc", "outside")),
    "a decoder nobody knows": (composed(kind="no_such"), ("no_such",)),
    "a decoder without a kind": (composed(kind=None), ("kind",)),
    "a kind that is a number": (composed(kind=7), ("kind",)),
    "options that are a list": (composed(options=[1]), ("options",)),
    "options nobody takes": (composed(options={"size": 8, "no_such": 1}), ("no_such",)),
    "a class of diffusers that is no model": (composed(config={"_class_name": "DiffusionPipeline"}), ("Pipeline",)),
    "modalities that are a list": (composed(top={"modalities": [1]}), ("modalities",)),
    "a modality that is a word": (composed(top={"modalities": {"a": "b"}}), ("marks",)),
    "a modality without marks": (composed(top={"modalities": {"a": {"decoder": FLOW}}}), ("marks",)),
    "marks that are numbers": (
        composed(top={"modalities": {"a": {"decoder": FLOW, "marks": dict.fromkeys(MARKS, 1)}}}),
        ("marks",),
    ),
    "no foundation": (composed(top={"foundation": None}), ("foundation",)),
    "a foundation without a family": (composed(foundation={"hidden_size": 32}), ("config.json",)),
    "a foundation nobody knows": (composed(foundation={"model_type": "no_such"}), ("no_such",)),
}


def nothing_was_run(folder: Path, result: Result) -> str | None:
    if (folder / TRACE).exists():
        return "code of the folder was run"
    return "code that the folder names was imported" if POEM in result.stdout + result.stderr else None


def generating(damage: Damage) -> Callable[[Path], list[object]]:
    def prepare(folder: Path) -> list[object]:
        model = model_folder(folder)
        damage(model)
        return ["generate", model, "--prompt", "hello", "--max-tokens", 2]

    return prepare


def empty_prompt(folder: Path) -> list[object]:
    model = model_folder(folder)
    (model / "chat_template.jinja").unlink()
    return ["generate", model, "--prompt", ""]


def training(damage: Damage) -> Callable[[Path], list[object]]:
    def prepare(folder: Path) -> list[object]:
        model = model_folder(folder)
        damage(model)
        shared = folder.parent / "shared_config"
        with making:
            if not shared.exists():
                write_config(shared, train={"steps": 1, "packs_per_step": 1})
        options = ["--model.config", "null", "--model.path", model, "--model.tokenizer", "null"]
        return ["train", shared / "tiny.yaml", *options, "--log.dir", folder / "run"]

    return prepare


def exporting(damage: Damage) -> Callable[[Path], list[object]]:
    def prepare(folder: Path) -> list[object]:
        run = run_folder(folder)
        damage(run)
        return ["export", run, folder / "out"]

    return prepare


def file_for_folder(run: Path) -> None:
    shutil.rmtree(run)
    run.write_text("not a folder")


STEP = Path("checkpoints") / "step_00000001"
RUNS: dict[str, tuple[Damage, tuple[str, ...]]] = {
    "a run without checkpoints": (lambda run: shutil.rmtree(run / "checkpoints"), ("checkpoint",)),
    "a checkpoint without a manifest": (remove(f"{STEP}/manifest.json"), ("checkpoint",)),
    "a manifest of noise": (write(f"{STEP}/manifest.json", bytes(range(256))), ("checkpoint",)),
    "a checkpoint without its config.json": (remove(f"{STEP}/model/config.json"), ("checkpoint",)),
    "a checkpoint of half a config.json": (cut(f"{STEP}/model/config.json"), ("checkpoint",)),
    "a checkpoint without tensors": (lambda run: shutil.rmtree(run / STEP / "tensors"), ("checkpoint",)),
    "a file in place of a run": (file_for_folder, ("not a folder",)),
}
# harmless folders: they are read as plain models, and no code is run
HARMLESS: dict[str, Damage] = {
    "a folder that works": lambda model: None,
    "code for a family that transformers has": both(
        edit("config.json", auto_map={"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}), plant("evil.py")
    ),
    "code for a tokenizer that transformers has": both(
        edit("tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.Evil", "evil.Evil"]}), plant("evil.py")
    ),
    "a pickle beside the weights": both(pickled("pytorch_model.bin"), pickled("optimizer.pt"), pickled("a.ckpt")),
    "python beside the weights": both(plant("sitecustomize.py"), plant("conftest.py"), plant("__init__.py")),
    "generation by code of its own": both(
        edit("generation_config.json", custom_generate="evil"), plant("generate.py"), plant("evil.py")
    ),
}

CASES = [
    Case("a tokenizer folder that does not exist", no_such_tokenizer, ("model.tokenizer", "nowhere")),
    *(
        Case(f"generate: {name}", generating(damage), says, nothing_was_run)
        for table in (CONFIG, WEIGHTS, TOKENIZER, OMNI)
        for name, (damage, says) in table.items()
    ),
    Case(
        "generate: weights that are not numbers",
        generating(weights(lambda w: w | {NORM: w[NORM] * torch.nan})),
        ("finite",),
    ),
    Case("generate: an empty prompt", empty_prompt, ("prompt",)),
    Case("generate: an adapter", generating(edit("adapter_config.json", base_model_name_or_path="/etc")), ("adapter",)),
    *(
        Case(f"train: {name}", training(damage), says, nothing_was_run)
        for table in (CONFIG, WEIGHTS, TOKENIZER, OMNI)
        for name, (damage, says) in table.items()
        if "a billion layers" not in name and "template" not in name
    ),
    *(Case(f"export: {name}", exporting(damage), says, nothing_was_run) for name, (damage, says) in RUNS.items()),
    *(
        Case(f"generate, and well: {name}", generating(damage), (), nothing_was_run)
        for name, damage in HARMLESS.items()
    ),
]
