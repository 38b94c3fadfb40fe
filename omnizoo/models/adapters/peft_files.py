"""Read and write PEFT adapter folders: `adapter_config.json` and `adapter_model.safetensors`.

Names in the file are the model's names with the prefix `base_model.model.` and without the adapter name. The adapter
matrices of fused experts are concatenated into one matrix. If PEFT wraps a module several times, names contain
`base_layer` once for each wrapper except the first.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from omnizoo.config.errors import UserError
from omnizoo.config.hub import local_path, pinned_names
from omnizoo.config.sections.model import AdapterSettings
from omnizoo.models.adapters.expert_matrices import GATE_UP, HALVES, factor_names, in_gate_up, shared_names
from omnizoo.models.adapters.lora import DEFAULT, KEY, AdapterInfo, attached, matches, scaling_of, settings_of
from omnizoo.models.untrusted_folders import open_weights, read_json, tensor_names

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
BASE = "omnizoo_base"  # key in the file's metadata: hash of the base model
INITS = {"kaiming": True, "gaussian": "gaussian", "random": False}
# Fields that define the adapter matrices, and fields that do not affect the output of a trained adapter.
READ = {
    "r", "lora_alpha", "use_rslora", "use_dora", "target_parameters", "modules_to_save", "peft_type", "rank_pattern",
    "alpha_pattern", "bias",
}  # fmt: skip
UNIMPORTANT = {
    "lora_dropout", "target_modules", "exclude_modules", "init_lora_weights", "inference_mode", "task_type",
    "base_model_name_or_path", "revision", "auto_mapping", "peft_version", "layers_to_transform", "layers_pattern",
    "megatron_core", "qalora_group_size", "loftq_config", "runtime_config", "ensure_weight_tying",
}  # fmt: skip


def adapter_settings(settings: AdapterSettings) -> AdapterSettings:
    """Return `settings`. If `settings.path` is set, return the settings in that folder, with full names as targets."""
    if settings.path is None:
        return settings
    folder = Path(local_path(settings.path))
    fields = _read_config(folder)
    if fields.get("use_dora") and fields.get("use_rslora"):
        raise UserError(f"{KEY}.path: {folder / CONFIG} sets both use_dora and use_rslora, which is not supported")
    names = [name.removeprefix(PREFIX) for name in tensor_names(folder / WEIGHTS)]
    if not names:
        raise UserError(f"{KEY}.path: {folder / WEIGHTS} contains no weights")

    matrix = re.compile(r"(.+?)(?:\.base_layer)*\.lora_(embedding_)?[AB](\.weight)?$")
    modules: dict[str, None] = {}  # dicts as ordered sets
    saved: dict[str, None] = {}
    for name in names:
        match = matrix.match(name)
        if match:
            modules[match[1]] = None
        elif not name.endswith((".lora_magnitude_vector", ".bias")) or (
            name.endswith(".bias") and fields.get("bias", "none") == "none"
        ):
            saved[name.rpartition(".")[0]] = None

    experts: list[str] = []
    for parameter in fields.get("target_parameters") or ():
        owner, _, attribute = str(parameter).rpartition(".")
        experts += [f"{module}.{attribute}" for module in modules if matches(module, owner)]
    owners = {name.rpartition(".")[0] for name in experts}
    targets = [*(module for module in modules if module not in owners), *experts]
    return settings.model_copy(
        update={
            "kind": _adapter_kind(fields),
            "rank": fields["r"],
            "alpha": float(fields["lora_alpha"]),
            "rank_pattern": _resolve_pattern(fields.get("rank_pattern"), targets),
            "alpha_pattern": _resolve_pattern(fields.get("alpha_pattern"), targets),
            "bias": fields.get("bias") or "none",
            "targets": targets,
            "modules_to_save": list(saved),
        }
    )


def _resolve_pattern(pattern: Mapping[str, float] | None, targets: Iterable[str]) -> dict[str, float]:
    """Return the values of PEFT's `rank_pattern` or `alpha_pattern` by full name of the target.

    A key of PEFT is a regular expression for the end of the name.
    """
    values: dict[str, float] = {}
    for target in targets:
        for key, value in (pattern or {}).items():
            if re.match(rf"(.*\.)?({key})$", target):
                values.setdefault(target, value)
    return values


def _adapter_kind(fields: Mapping[str, Any]) -> str:
    """Return the value of `model.adapter.kind` for the fields of `adapter_config.json`."""
    if fields.get("use_dora"):
        return "dora"
    return "rslora" if fields.get("use_rslora") else "lora"


def _read_config(folder: Path) -> dict[str, Any]:
    """Return the fields of `adapter_config.json`. Raise a `UserError` if one of them is not supported."""
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise UserError(f"{KEY}.path: {folder} has no {name}. Pass the folder of a PEFT adapter.")
    fields = read_json(folder / CONFIG)
    file = f"{KEY}.path: {folder / CONFIG}"
    if fields.get("peft_type") != "LORA":
        raise UserError(f"{file}: peft_type is {fields.get('peft_type')!r}; expected 'LORA'")
    for name in ("r", "lora_alpha"):
        if not isinstance(fields.get(name), int | float) or not fields[name] > 0:
            raise UserError(f"{file}: {name} is {fields.get(name)!r}; expected a number greater than 0")
    if fields.get("init_lora_weights", True) not in (*INITS.values(), "orthogonal", "eva"):
        raise UserError(
            f"{file}: init_lora_weights is {fields['init_lora_weights']!r}, which also changes the base weights. "
            "Convert the adapter to plain LoRA with PEFT first."
        )

    defaults = lora_config(rank=1).to_dict()
    for name, value in fields.items():
        if name not in READ | UNIMPORTANT and value and value != defaults.get(name):
            raise UserError(f"{file}: {name} is {str(value)[:80]!r}, which is not supported")
    return fields


def lora_config(rank: int, **fields: Any) -> Any:
    """Return a PEFT config. PEFT is imported here, because the import takes seconds and most runs do not need it."""
    from peft import LoraConfig

    return LoraConfig(r=rank, **fields)


def check_base(model: nn.Module, settings: AdapterSettings) -> None:
    """Check that the modules of an adapter folder exist in `model`, before adapter matrices are attached."""
    if settings.path is None:
        return
    names = {name for name, _ in model.named_modules()} | {name for name, _ in model.named_parameters()}
    for name in (*settings.targets, *settings.modules_to_save):
        if name not in names:
            raise UserError(
                f"{KEY}.path: {settings.path} belongs to a different base model: this model has no {name}. "
                "Use the base model of the adapter."
            )


def check_shapes(model: nn.Module, settings: AdapterSettings) -> None:
    """Check that the shapes in an adapter folder match `model`, after adapter matrices are attached."""
    adapter = attached(model)
    if settings.path is None or adapter is None:
        return
    with open_weights([Path(local_path(settings.path)) / WEIGHTS]) as weights:
        file_shapes = {key: tuple(weight.get_shape()) for key, weight in weights.items()}
    model_shapes = {}
    for name, key in file_names(adapter).items():
        model_shapes[key] = tuple(_to_file(model.get_parameter(name).detach(), name, adapter).shape)

    for key in (*model_shapes, *file_shapes):
        in_file = file_shapes.get(key, "missing")
        in_model = model_shapes.get(key, "missing")
        if in_file != in_model:
            raise UserError(
                f"{KEY}.path: {settings.path} belongs to a different base model: {key} is {in_file} in the file and "
                f"{in_model} in the model. Use the base model of the adapter."
            )


def file_names(adapter: AdapterInfo) -> dict[str, str]:
    """Return the names of all trained parameters in PEFT's file, keyed by their names in the model."""
    names = {}
    by_owner: dict[str, list[str]] = {}
    for name in adapter.experts:  # in the order of modules, as PEFT wraps them
        owner, _, attribute = name.rpartition(".")
        by_owner.setdefault(owner, []).append(attribute)
    for owner, attributes in by_owner.items():
        for num_wrappers, attribute in enumerate(reversed(attributes)):
            wrapped = f"{PREFIX}{owner}{'.base_layer' * num_wrappers}"
            first, second = factor_names(attribute)
            names[f"{owner}.{first}"] = f"{wrapped}.lora_A.weight"
            names[f"{owner}.{second}"] = f"{wrapped}.lora_B.weight"

    for name in sorted(adapter.trained - set(names)):
        owner, _, attribute = name.rpartition(".")
        if attribute == "bias" and owner in adapter.modules:
            names[name] = f"{PREFIX}{owner}.base_layer.bias"
            continue
        key = name.replace(f".{DEFAULT}", "") if name in adapter.started else name
        if ".lora_magnitude_vector." in key:
            key = key.removesuffix(".weight")
        names[name] = PREFIX + key
    return names


def _to_file(tensor: torch.Tensor, name: str, adapter: AdapterInfo) -> torch.Tensor:
    """Return an adapter matrix in the layout of PEFT's file.

    For fused experts, all matrices A are joined to `[experts * rank, width]`, and all B to `[width, rank * experts]`.
    """
    if name.rpartition("_lora_")[0] not in adapter.experts:
        return tensor
    experts, rank, width = tensor.shape
    if name.endswith("A"):
        return tensor.reshape(experts * rank, width)
    return tensor.permute(2, 1, 0).reshape(width, rank * experts)


def peft_tensors(
    adapter: AdapterInfo, state: Mapping[str, torch.Tensor]
) -> tuple[AdapterInfo, dict[str, torch.Tensor]]:
    """Return the trained parameters `state` by their names in PEFT's file, and the adapter that the file describes."""
    adapter, state = _with_separate_experts(adapter, state)
    tensors = {key: _to_file(state[name], name, adapter).contiguous() for name, key in file_names(adapter).items()}
    return adapter, tensors


def _with_separate_experts(
    adapter: AdapterInfo, state: Mapping[str, torch.Tensor]
) -> tuple[AdapterInfo, Mapping[str, torch.Tensor]]:
    """Return an equivalent adapter that PEFT can represent.

    PEFT has matrices for each expert, and for complete parameters only. Therefore shared matrices are repeated, and
    those of `gate_proj` and `up_proj` are combined to matrices of `gate_up_proj`, whose rank is the sum of both ranks.
    """
    if not adapter.num_experts:
        return adapter, state
    settings = adapter.settings
    result = {name: tensor for name, tensor in state.items() if "_lora_" not in name}
    experts = []
    ranks: dict[str, int] = dict(settings.rank_pattern)
    alphas: dict[str, float] = dict(settings.alpha_pattern)
    for owner, num_experts in adapter.num_experts.items():
        targets = [name for name in adapter.experts if name.rpartition(".")[0] == owner]
        scalings: dict[str, float] = {}
        parts: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for target in targets:
            stored, first, second = _separate(owner, target, num_experts, adapter, state)
            scaling = scaling_of(settings, target)
            common_scaling = scalings.setdefault(stored, scaling)
            parts.setdefault(stored, []).append((first, second * (scaling / common_scaling)))

        for stored in sorted(parts, key=lambda name: name != GATE_UP):  # the order of the module
            name = f"{owner}.{stored}"
            experts.append(name)
            for matrix, values in zip(factor_names(stored), zip(*parts[stored], strict=True), strict=True):
                result[f"{owner}.{matrix}"] = torch.cat(values, 1)
            rank = result[f"{owner}.{factor_names(stored)[0]}"].shape[1]
            alpha = scalings[stored] * (math.sqrt(rank) if settings.kind == "rslora" else rank)
            ranks = {name: rank} | ranks  # the first pattern that matches applies
            alphas = {name: alpha} | alphas

    matrices_of_experts = {f"{name}_lora_{side}" for name in experts for side in "AB"}
    others = {name for name in adapter.started if "_lora_" not in name}
    changes = {"rank_pattern": ranks, "alpha_pattern": alphas, "experts": "separate"}
    return replace(
        adapter,
        settings=settings.model_copy(update=changes),
        experts=tuple(experts),
        started=frozenset(others | matrices_of_experts),
        trained=frozenset(result),
    ), result


def _separate(
    owner: str, target: str, num_experts: int, adapter: AdapterInfo, state: Mapping[str, torch.Tensor]
) -> tuple[str, torch.Tensor, torch.Tensor]:
    """Return the stored parameter of a target, and its matrices for each expert of that parameter."""
    attribute = target.rpartition(".")[2]
    first_name, second_name = (f"{owner}.{name}" for name in shared_names(attribute))
    if first_name in state:
        first = state[first_name].expand(num_experts, -1, -1)
        second = state[second_name].expand(num_experts, -1, -1)
    else:
        first, second = (state[f"{owner}.{name}"] for name in factor_names(attribute))
    if attribute in adapter.halves(owner):
        second = in_gate_up(second, HALVES.index(attribute), owner not in adapter.interleaved)
        attribute = GATE_UP
    return attribute, first, second


def _from_file(tensor: torch.Tensor, name: str, adapter: AdapterInfo) -> torch.Tensor:
    """Convert an adapter matrix from the layout of PEFT's file to the layout of the model."""
    if name.rpartition("_lora_")[0] not in adapter.experts:
        return tensor
    rank = settings_of(adapter.settings, name.rpartition("_lora_")[0]).rank
    if name.endswith("A"):
        return tensor.view(-1, rank, tensor.shape[1])
    return tensor.view(len(tensor), rank, -1).permute(2, 1, 0)


def read_factors(adapter: AdapterInfo) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name in the model, value) for all tensors in the folder `settings.path`."""
    assert adapter.settings.path is not None
    with open_weights([Path(local_path(adapter.settings.path)) / WEIGHTS]) as weights:
        for name, key in file_names(adapter).items():
            yield name, _from_file(weights[key][...], name, adapter)


def base_of(folder: Path) -> str | None:
    """Return the hash of the adapter's base model, or None if the file does not contain it."""
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        metadata: dict[str, str] = file.metadata() or {}
        return metadata.get(BASE) or None


def _patterns(adapter: AdapterInfo) -> tuple[dict[str, int], dict[str, float]]:
    """Return PEFT's `rank_pattern` and `alpha_pattern`: values that differ from the defaults, by name of the target."""
    ranks = {}
    alphas = {}
    for target in (*adapter.modules, *adapter.experts):
        settings = settings_of(adapter.settings, target)
        if settings.rank != adapter.settings.rank:
            ranks[target] = settings.rank
        if not math.isclose(settings.alpha, adapter.settings.alpha):
            alphas[target] = settings.alpha
    return ranks, alphas


def write_folder(
    out: Path, adapter: AdapterInfo, state: Mapping[str, torch.Tensor], path: str | None, base: str
) -> None:
    """Write the trained parameters `state` as a PEFT adapter.

    `path` is the folder of the base model, or its name and commit on the hub, and `base` its hash.
    """
    adapter, tensors = peft_tensors(adapter, state)
    save_file(tensors, out / WEIGHTS, metadata={"format": "pt", BASE: base})
    peft_config(adapter, path).save_pretrained(out)


def peft_config(adapter: AdapterInfo, path: str | None) -> Any:
    """Return the PEFT config of a trained adapter. `path` is the folder of its base model, or its name on the hub."""
    on_hub = pinned_names(path)
    settings = adapter.settings
    ranks, alphas = _patterns(adapter)
    return lora_config(
        settings.rank,
        rank_pattern=ranks,
        alpha_pattern=alphas,
        bias=settings.bias,
        lora_alpha=int(settings.alpha) if settings.alpha == int(settings.alpha) else settings.alpha,
        lora_dropout=settings.dropout,
        use_rslora=settings.kind == "rslora",
        use_dora=settings.kind == "dora",
        init_lora_weights=INITS[settings.init],
        target_modules=list(adapter.modules),
        target_parameters=list(adapter.experts) or None,
        modules_to_save=list(adapter.saved) or None,
        base_model_name_or_path=on_hub[0].address if on_hub else path,
        revision=on_hub[0].commit if on_hub else None,
        task_type=_task_type(adapter),
        inference_mode=True,
    )


def _task_type(adapter: AdapterInfo) -> str | None:
    """Return PEFT's name of the task of a model with an adapter; None if PEFT has none."""
    if adapter.classifies:
        return "SEQ_CLS"
    return "CAUSAL_LM" if adapter.generates else None
