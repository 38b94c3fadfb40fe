"""PEFT's adapter folders: `adapter_config.json` and `adapter_model.safetensors`, read as a beginning and written.

Names in the file are those of the model after `base_model.model.` and without the adapter's own name. Fused experts
have their factors side by side in one matrix, and names that count how often PEFT wraps the module.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from omnizoo.config.errors import UserError
from omnizoo.config.model_section import Adapter
from omnizoo.models.adapter import DEFAULT, KEY, Attached, attached, factor_names, matches
from omnizoo.models.artefact import read_json, tensor_names

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
BASE = "omnizoo_base"  # in the file's metadata: the hash of the base that it was trained on
INITS = {"kaiming": True, "gaussian": "gaussian", "random": False}
# Fields that say what the factors are; and those that change nothing of what a trained adapter computes.
READ = {"r", "lora_alpha", "use_rslora", "use_dora", "target_parameters", "modules_to_save", "peft_type"}
UNIMPORTANT = {
    "lora_dropout", "target_modules", "exclude_modules", "init_lora_weights", "inference_mode", "task_type",
    "base_model_name_or_path", "revision", "auto_mapping", "peft_version", "layers_to_transform", "layers_pattern",
    "megatron_core", "qalora_group_size", "loftq_config", "runtime_config", "ensure_weight_tying",
}  # fmt: skip


def adapter_settings(settings: Adapter) -> Adapter:
    """`settings`, or those of the folder in `settings.path`, with full names for targets."""
    if settings.path is None:
        return settings
    folder = Path(settings.path)
    fields = _read_config(folder)
    kind = "dora" if fields.get("use_dora") else "rslora" if fields.get("use_rslora") else "lora"
    if fields.get("use_dora") and fields.get("use_rslora"):
        raise UserError(f"{KEY}.path: {folder / CONFIG} is of DoRA and rsLoRA at once, which is not supported")
    names = [name.removeprefix(PREFIX) for name in tensor_names(folder / WEIGHTS)]
    if not names:
        raise UserError(f"{KEY}.path: {folder / WEIGHTS} holds no weights")
    factor = re.compile(r"(.+?)((?:\.base_layer)*)\.lora_(embedding_)?[AB](\.weight)?$")
    modules: dict[str, int] = {}  # and how often each is wrapped
    whole: dict[str, None] = {}
    for name in names:
        if found := factor.match(name):
            modules[found[1]] = max(modules.get(found[1], 0), found[2].count("base_layer"))
        elif not name.endswith(".lora_magnitude_vector"):
            whole[name.rpartition(".")[0]] = None
    experts: list[str] = []
    for parameter in fields.get("target_parameters") or ():
        owner, _, own = str(parameter).rpartition(".")
        experts += [f"{module}.{own}" for module in modules if matches(module, owner)]
    owners = {name.rpartition(".")[0] for name in experts}
    return settings.model_copy(
        update={
            "kind": kind,
            "rank": fields["r"],
            "alpha": float(fields["lora_alpha"]),
            "targets": [*(module for module in modules if module not in owners), *experts],
            "modules_to_save": list(whole),
        }
    )


def _read_config(folder: Path) -> dict[str, Any]:
    """The fields of a folder's `adapter_config.json`, if all that it says is understood."""
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise UserError(f"{KEY}.path: {folder} is not the folder of a PEFT adapter (no {name} in it)")
    fields = read_json(folder / CONFIG)
    where = f"{KEY}.path: {folder / CONFIG}"
    if fields.get("peft_type") != "LORA":
        raise UserError(f"{where}: peft_type is {fields.get('peft_type')!r}; expected 'LORA'")
    for name in ("r", "lora_alpha"):
        if not isinstance(fields.get(name), int | float) or not fields[name] > 0:
            raise UserError(f"{where}: {name} is {fields.get(name)!r}; expected a number above 0")
    if fields.get("init_lora_weights", True) not in (*INITS.values(), "orthogonal", "eva"):
        raise UserError(
            f"{where}: init_lora_weights is {fields['init_lora_weights']!r}, which changes the base as well; convert "
            "the adapter to plain LoRA with PEFT first"
        )
    usual = lora_config(rank=1).to_dict()
    for name, value in fields.items():
        if name not in READ | UNIMPORTANT and value and value != usual.get(name):
            raise UserError(f"{where}: {name} is {str(value)[:80]!r}, which is not supported")
    return fields


def lora_config(rank: int, **fields: Any) -> Any:
    """PEFT's own config. Imported here: it takes seconds, which a run without files of PEFT need not wait for."""
    from peft import LoraConfig

    return LoraConfig(r=rank, **fields)


def check_base(model: nn.Module, settings: Adapter) -> None:
    """Before factors are attached: refuse a folder that is of another model, by the first module that is not here."""
    if settings.path is not None:
        here = {name for name, _ in model.named_modules()} | {name for name, _ in model.named_parameters()}
        for name in (*settings.targets, *settings.modules_to_save):
            if name not in here:
                raise UserError(f"{KEY}.path: {settings.path} is of another base: this model has no {name}")


def check_shapes(model: nn.Module, settings: Adapter) -> None:
    """After factors are attached: refuse a folder that is of another model, by the first shape that differs."""
    found = attached(model)
    if settings.path is None or found is None:
        return
    shapes = {}
    with safe_open(Path(settings.path) / WEIGHTS, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - not a dict
            shapes[name] = tuple(file.get_slice(name).get_shape())
    wanted = {}
    for name, key in file_names(found).items():
        wanted[key] = tuple(_to_file(model.get_parameter(name).detach(), name, found).shape)
    for key in (*wanted, *shapes):
        if wanted.get(key) != shapes.get(key):
            there, here = (side.get(key, "nothing") for side in (shapes, wanted))
            raise UserError(f"{KEY}.path: {settings.path} is of another base: {key} is {there} there and {here} here")


def file_names(found: Attached) -> dict[str, str]:
    """What each trained parameter is called in PEFT's file."""
    names = {}
    by_owner: dict[str, list[str]] = {}
    for name in found.experts:  # in the order of the module, in which PEFT wraps them
        owner, _, own = name.rpartition(".")
        by_owner.setdefault(owner, []).append(own)
    for owner, owns in by_owner.items():
        for outside, own in enumerate(reversed(owns)):
            for side, factor in zip("AB", factor_names(own), strict=True):
                names[f"{owner}.{factor}"] = f"{PREFIX}{owner}{'.base_layer' * outside}.lora_{side}.weight"
    for name in sorted(found.trained - set(names)):
        key = name.replace(f".{DEFAULT}", "") if name in found.started else name
        names[name] = PREFIX + (key.removesuffix(".weight") if ".lora_magnitude_vector." in key else key)
    return names


def _is_of_experts(name: str, found: Attached) -> bool:
    return name.endswith(("_lora_A", "_lora_B")) and name[: -len("_lora_A")] in found.experts


def _to_file(tensor: torch.Tensor, name: str, found: Attached) -> torch.Tensor:
    """A factor as PEFT's file has it. There, experts are the rows of the first and, fastest, columns of the second."""
    if not _is_of_experts(name, found):
        return tensor
    experts, rank, width = tensor.shape
    if name.endswith("A"):
        return tensor.reshape(experts * rank, width)
    return tensor.permute(2, 1, 0).reshape(width, rank * experts)


def published_factor(name: str, tensor: torch.Tensor, found: Attached) -> tuple[str, torch.Tensor]:
    """A trained parameter, whole, as PEFT's file has it."""
    return file_names(found)[name], _to_file(tensor, name, found)


def _from_file(tensor: torch.Tensor, name: str, found: Attached) -> torch.Tensor:
    if not _is_of_experts(name, found):
        return tensor
    rank = found.settings.rank
    if name.endswith("A"):
        return tensor.view(-1, rank, tensor.shape[1])
    return tensor.view(len(tensor), rank, -1).permute(2, 1, 0)


def read_factors(found: Attached) -> Iterator[tuple[str, torch.Tensor]]:
    """(name in the model, value) of all that the folder of `settings.path` holds."""
    assert found.settings.path is not None
    with safe_open(Path(found.settings.path) / WEIGHTS, framework="pt") as file:
        for name, key in file_names(found).items():
            yield name, _from_file(file.get_tensor(key), name, found)


def base_of(folder: Path) -> str | None:
    """The hash of the base that an adapter was trained on, if its file tells."""
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        metadata: dict[str, str] = file.metadata() or {}
        return metadata.get(BASE) or None


def write_folder(out: Path, found: Attached, state: Mapping[str, torch.Tensor], path: str | None, base: str) -> None:
    """Write the trained parameters `state`, by name, as a PEFT adapter of the model at `path`, whose hash is `base`."""
    settings = found.settings
    tensors = {key: _to_file(state[name], name, found).contiguous() for name, key in file_names(found).items()}
    save_file(tensors, out / WEIGHTS, metadata={"format": "pt", BASE: base})
    config = lora_config(
        settings.rank,
        lora_alpha=int(settings.alpha) if settings.alpha == int(settings.alpha) else settings.alpha,
        lora_dropout=settings.dropout,
        use_rslora=settings.kind == "rslora",
        use_dora=settings.kind == "dora",
        init_lora_weights=INITS[settings.init],
        target_modules=list(found.modules),
        target_parameters=list(found.experts) or None,
        modules_to_save=list(found.saved) or None,
        base_model_name_or_path=path,
        task_type="CAUSAL_LM" if found.generates else None,
        inference_mode=True,
    )
    config.save_pretrained(out)
