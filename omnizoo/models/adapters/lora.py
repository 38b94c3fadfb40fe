"""LoRA, DoRA and rsLoRA: small trained adapter matrices next to frozen weights.

Adapters are attached to a model on meta, before it is sharded. The adapter matrices are ordinary parameters of the
module that they adapt, so they belong to its FSDP unit. They have PEFT's names (`q_proj.lora_A.default.weight`). Unlike
PEFT, we do not wrap modules, so base weights keep their names, and published weights, tied weights, recipes and
checkpoints need no second set of names.
"""

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import TypeAdapter
from torch import nn
from transformers import PreTrainedModel

from omnizoo.config.errors import UserError
from omnizoo.config.sections.model import REGEX, AdapterSettings
from omnizoo.modalities.frozen_tokenizer import frozen_tokenizers
from omnizoo.models.adapters.expert_matrices import (
    GATE_UP,
    HALVES,
    OFF,
    attach_to_experts,
    expert_targets,
    initialize,
    merged_delta,
    stored_in,
    widths,
)
from omnizoo.models.hf_private import has_score_head, is_experts, kept_in_fp32, language_model, routers
from omnizoo.models.user_module import tied_names

ALL_LINEAR = "all-linear"
ATTACHED = "_omnizoo_adapter"  # attribute of a model that stores its `AdapterInfo`
DEFAULT = "default"  # PEFT's default adapter name
KEY = "model.adapter"


@dataclass(frozen=True)
class AdapterInfo:
    """An attached adapter. All names are full names, because patterns are already resolved."""

    settings: AdapterSettings
    modules: tuple[str, ...]  # linear layers and embeddings
    experts: tuple[str, ...]  # parameters of fused experts, `[experts, ...]`
    saved: tuple[str, ...]  # modules that are fully trained
    trained: frozenset[str]  # trained parameters: all adapter matrices, and all parameters in `saved`
    started: frozenset[str]  # adapter matrices; the base model has no values for them
    generates: bool = True  # whether the model has transformers' `generate`, as PEFT's task type requires
    classifies: bool = False  # whether the model has a score head, for PEFT's task type
    num_experts: Mapping[str, int] = field(default_factory=dict)  # by name of the fused experts
    fused_gates: tuple[str, ...] = ()  # fused experts with a parameter `gate_up_proj`
    interleaved: tuple[str, ...] = ()  # fused experts whose gate and up projections are interleaved

    def halves(self, owner: str) -> set[str]:
        """Return the targets of the fused experts `owner` that are parts of `gate_up_proj`."""
        return set(HALVES) if owner in self.fused_gates else set()

    def fields(self) -> dict[str, Any]:
        """Return the fields in JSON format."""
        fields: dict[str, Any] = TypeAdapter(AdapterInfo).dump_python(self, mode="json")
        return fields | {name: sorted(fields[name]) for name in ("trained", "started")}

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> "AdapterInfo":
        """Restore an adapter from the result of `fields()`, but without the folder that it was initialized from."""
        settings = fields["settings"] | {"path": None}
        return TypeAdapter(cls).validate_python({**fields, "settings": settings})


def settings_of(settings: AdapterSettings, target: str) -> AdapterSettings:
    """Return the settings of a target: `settings` with the rank and alpha of the first patterns that match it."""
    changes: dict[str, Any] = {}
    for key in ("rank", "alpha"):
        for pattern, value in getattr(settings, f"{key}_pattern").items():
            if matches(target, pattern):
                changes.setdefault(key, value)
    return settings.model_copy(update=changes)


def scaling_of(settings: AdapterSettings, target: str) -> float:
    """Return the factor that scales the product of the adapter matrices of a target."""
    settings = settings_of(settings, target)
    if settings.kind == "rslora":
        return settings.alpha / math.sqrt(settings.rank)
    return settings.alpha / settings.rank


def attached(model: nn.Module) -> AdapterInfo | None:
    """Return the adapter that is attached to `model`, or None."""
    return vars(model).get(ATTACHED)


@contextmanager
def adapter_disabled(model: nn.Module) -> Iterator[None]:
    """Context manager that disables the adapter matrices, so `model` computes the outputs of its base.

    Fully trained modules keep their trained weights.
    """
    adapter = attached(model)
    assert adapter is not None, "the model has no adapter"
    names = {*adapter.modules, *(name.rpartition(".")[0] for name in adapter.experts)}
    modules = [model.get_submodule(name) for name in sorted(names)]
    for module in modules:
        vars(module)[OFF] = True
    try:
        yield
    finally:
        for module in modules:
            del vars(module)[OFF]


def attach(model: nn.Module, settings: AdapterSettings, dtype: torch.dtype, stored: torch.dtype) -> None:
    """Attach adapter matrices to `model`, and freeze everything else except `modules_to_save`.

    Frozen weights need no master copy in higher precision, because FSDP would round it to the precision of the run
    before every use. Must be called with the model's device as the default device.

    Args:
        model: The model, usually on meta.
        settings: The adapter settings.
        dtype: The dtype of the adapter matrices.
        stored: The dtype of frozen weights.
    """
    kinds = _adaptable(model)
    targets = _find_targets(model, settings, kinds)
    saved = _find_saved(model, settings, targets)
    if settings.experts == "shared" and "experts" not in {kinds[name] for name in targets}:
        raise UserError(
            f"{KEY}.experts: shared has no effect, because no target is a weight of fused experts. Remove it."
        )
    for key in ("rank_pattern", "alpha_pattern"):
        _matching(key, list(getattr(settings, key)), targets, "target")
    for name in targets:
        _check_fit(name, model, kinds[name], settings_of(settings, name))

    base_names = {name for name, _ in model.named_parameters()}
    saved_prefixes = tuple(f"{module}." for module in saved)
    fully_trained = {name for name in base_names if name.startswith(saved_prefixes)}
    fully_trained |= _trained_biases(base_names, targets, settings)
    _freeze_base(model, fully_trained, stored)

    num_experts: dict[str, int] = {}
    fused_gates: dict[str, None] = {}
    interleaved: dict[str, None] = {}
    for name in targets:
        target_settings, scaling = settings_of(settings, name), scaling_of(settings, name)
        owner, _, attribute = name.rpartition(".")
        if kinds[name] == "experts":
            experts: Any = model.get_submodule(owner)
            attach_to_experts(experts, attribute, target_settings, scaling, dtype)
            num_experts[owner] = experts.num_experts
            if hasattr(experts, GATE_UP):
                fused_gates[owner] = None
                if not experts.is_concatenated:
                    interleaved[owner] = None
        elif kinds[name] == "embedding":
            _attach_to_embedding(model.get_submodule(name), target_settings, scaling, dtype)
        else:
            _attach_to_linear(model.get_submodule(name), target_settings, scaling, dtype)

    matrices = frozenset(name for name, _ in model.named_parameters()) - base_names
    vars(model)[ATTACHED] = AdapterInfo(
        settings=settings,
        modules=tuple(name for name in targets if kinds[name] != "experts"),
        experts=tuple(name for name in targets if kinds[name] == "experts"),
        saved=saved,
        trained=matrices | fully_trained,
        started=matrices,
        generates=hasattr(model, "prepare_inputs_for_generation"),
        classifies=isinstance(model, PreTrainedModel) and has_score_head(model.config),
        num_experts=num_experts,
        fused_gates=tuple(fused_gates),
        interleaved=tuple(interleaved),
    )


def _trained_biases(names: Collection[str], targets: Sequence[str], settings: AdapterSettings) -> set[str]:
    """Return the parameters in `names` that are biases and are trained. Biases of fused experts are not, as in PEFT."""
    if settings.bias == "none":
        return set()
    if settings.bias == "all":
        trained = {name for name in names if name.rpartition(".")[2] == "bias"}
    else:
        trained = {f"{name}.bias" for name in targets} & set(names)
    if not trained:
        raise UserError(f"{KEY}.bias: {settings.bias} selects no bias. Remove the key, or choose other targets.")
    return trained


def _freeze_base(model: nn.Module, fully_trained: Collection[str], stored: torch.dtype) -> None:
    """Freeze all parameters except `fully_trained`, and store frozen parameters in the dtype `stored`."""
    # Frozen tokenizers must always compute the same codes, so their weights keep their dtype.
    same_dtype = {p for module in frozen_tokenizers(model).values() for p in module.parameters()}
    same_dtype |= set(kept_in_fp32(model).values())
    for name, parameter in model.named_parameters():
        is_trained = name in fully_trained
        parameter.requires_grad_(is_trained)
        if not is_trained and parameter not in same_dtype and parameter.is_floating_point():
            parameter.data = parameter.data.to(stored)


# Target modules


def _adaptable(model: nn.Module) -> dict[str, str]:
    """Return possible targets by full name: linear layers, embeddings and parameters of fused experts."""
    frozen = tuple(f"{name}." for name in frozen_tokenizers(model))
    kinds: dict[str, str] = {}
    for name, module in model.named_modules():
        if name.startswith(frozen):
            continue
        if isinstance(module, nn.Linear):
            kinds[name] = "linear"
        elif isinstance(module, nn.Embedding):
            kinds[name] = "embedding"
        elif is_experts(module):
            for target in expert_targets(module):
                kinds[f"{name}.{target}"] = "experts"
    return kinds


def matches(name: str, pattern: str) -> bool:
    """Whether `pattern` matches `name`.

    A regular expression, which begins with `re:`, or a pattern with wildcards must match the full name. As in PEFT, any
    other pattern must match the end of the name.
    """
    if pattern.startswith(REGEX):
        return re.fullmatch(pattern.removeprefix(REGEX), name) is not None
    if re.search(r"[*?[]", pattern):
        return fnmatchcase(name, pattern)
    return name == pattern or name.endswith(f".{pattern}")


def linear_of_blocks(model: nn.Module) -> list[str]:
    """Return the linear layers in the language model's blocks (members of a module list). Routers are excluded."""
    prefix = ""
    if isinstance(model, PreTrainedModel):
        language = language_model(model)
        prefix = next(f"{name}." if name else "" for name, module in model.named_modules() if module is language)
    routing = set(routers(model))
    linear = [name for name, kind in _adaptable(model).items() if kind == "linear"]
    inside = [name for name in linear if name.startswith(prefix)]
    return [name for name in inside if re.search(r"\.\d+\.", f".{name}") and name not in routing]


def _matching(
    key: str, patterns: Sequence[str], names: Collection[str], expected: str, all_linear: Collection[str] = ()
) -> set[str]:
    """Return the `names` that the patterns of a config key match. Each pattern must match at least one name.

    `expected` describes the names, for messages.
    """
    matched: set[str] = set()
    for i, pattern in enumerate(patterns):
        by_pattern = all_linear if pattern == ALL_LINEAR else _without_parts(names, pattern)
        if not by_pattern:
            hint = nearest_names(pattern, names)
            raise UserError(f"{KEY}.{key}.{i}: {pattern[:80]!r} matches no {expected}; {hint}")
        matched.update(by_pattern)
    return matched


def _without_parts(names: Collection[str], pattern: str) -> list[str]:
    """Return the names that match a pattern, without parts of a fused parameter that matches it, too."""
    matched = {name: None for name in names if matches(name, pattern)}
    for name in list(matched):
        owner, _, attribute = name.rpartition(".")
        if attribute in HALVES and f"{owner}.{GATE_UP}" in matched:
            del matched[name]
    return list(matched)


def _find_targets(model: nn.Module, settings: AdapterSettings, kinds: dict[str, str]) -> list[str]:
    """Return the names of the adapter's targets."""
    expected = "linear layer, embedding or expert weights"
    targets = _matching("targets", settings.targets, kinds, expected, linear_of_blocks(model))
    targets -= _matching("exclude", settings.exclude, targets, "target")
    if not targets:
        raise UserError(
            f"{KEY}.exclude: {settings.exclude} excludes every target of {settings.targets}. Exclude fewer modules."
        )
    for name in sorted(targets):
        owner, _, attribute = name.rpartition(".")
        whole = f"{owner}.{GATE_UP}"
        if attribute in HALVES and kinds[name] == "experts" and whole in targets:
            raise UserError(
                f"{KEY}.targets: {name} is a part of {whole}, which is also a target. Add one of them to {KEY}.exclude."
            )
    return [name for name in kinds if name in targets]  # sorted in the order of the model


def _find_saved(model: nn.Module, settings: AdapterSettings, targets: Sequence[str]) -> tuple[str, ...]:
    """Return the outermost modules that are fully trained."""
    modules = [name for name, module in model.named_modules() if name and any(True for _ in module.parameters())]
    saved = _matching("modules_to_save", settings.modules_to_save, modules, "module with weights")
    prefixes = tuple(f"{name}." for name in saved)
    inside = [target for target in targets if f"{target}.".startswith(prefixes)]
    if inside:
        raise UserError(
            f"{KEY}.modules_to_save: {inside[0]} is in a fully trained module and is also a target of adapter "
            f"matrices. Add it to {KEY}.exclude, or remove its module from {KEY}.modules_to_save."
        )

    # PEFT trains an untied copy of a module. If only one of two tied weights were saved, PEFT would load a model that
    # differs from ours.
    for names in tied_names(model):
        trained = [name for name in names if name.startswith(prefixes)]
        if trained and len(trained) < len(names):
            other = next(name for name in names if name not in trained)
            raise UserError(
                f"{KEY}.modules_to_save: {trained[0]} is tied to {other}, which is not listed. List both modules."
            )
    return tuple(name for name in modules if name in saved and not name.startswith(prefixes))


def nearest_names(pattern: str, names: Iterable[str]) -> str:
    """Return a hint with the nearest names. Names that differ only in the layer number are listed once."""
    by_kind = {re.sub(r"\d+", "*", name): name for name in reversed(list(names))}
    ends = {name.rpartition(".")[2]: name for name in by_kind.values()}
    close = get_close_matches(pattern[:200], [*by_kind.values(), *ends], n=3, cutoff=0)
    return f"the nearest names are {', '.join(dict.fromkeys(close))}" if close else "the model has none"


def _check_fit(name: str, model: nn.Module, kind: str, settings: AdapterSettings) -> None:
    """Check that adapter matrices can be attached to a target. Called before any are attached."""
    if kind != "linear" and settings.kind == "dora":
        raise UserError(
            f"{KEY}.kind: dora supports only linear layers, and {name} is a target. Exclude {name}, or use lora."
        )
    if kind == "experts" and settings.dropout:
        raise UserError(
            f"{KEY}.dropout: {settings.dropout:g} is not supported for experts, and {name} is a target. Set it to 0."
        )

    if kind == "experts":
        owner, _, attribute = name.rpartition(".")
        rows, columns = widths(model.get_submodule(owner), attribute)
    else:
        rows, columns = model.get_parameter(f"{name}.weight").shape
    if settings.rank > min(rows, columns):
        raise UserError(
            f"{KEY}.rank: {settings.rank} exceeds a dim of {name} ({rows} x {columns}); "
            f"expected at most {min(rows, columns)}"
        )


# Linear layers

BASE = "lora_base"  # attribute of a layer with adapter matrices: (base forward, scaling)


def _attach_to_linear(module: Any, settings: AdapterSettings, scaling: float, dtype: torch.dtype) -> None:
    first = nn.Linear(module.in_features, settings.rank, bias=False, dtype=dtype)
    second = nn.Linear(settings.rank, module.out_features, bias=False, dtype=dtype)
    initialize(first.weight, second.weight, settings)
    module.lora_A = nn.ModuleDict({DEFAULT: first})
    module.lora_B = nn.ModuleDict({DEFAULT: second})
    if settings.dropout:
        module.lora_dropout = nn.ModuleDict({DEFAULT: nn.Dropout(settings.dropout)})
    if settings.kind == "dora":
        magnitude = nn.Module()
        # `set_magnitudes` overwrites this value after the base is loaded.
        magnitude.weight = nn.Parameter(torch.ones(module.out_features, dtype=dtype))
        module.lora_magnitude_vector = nn.ModuleDict({DEFAULT: magnitude})
    # `forward` is set on the instance, so models/interfaces/lm_head.py can detect that the head is not a plain linear
    # layer. All layers share one function, because a separate partial for each layer would cause a separate compiled
    # graph.
    vars(module).update({BASE: (module.forward, scaling), "forward": MethodType(_linear, module)})


def set_base(module: nn.Linear, forward: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Make `module` compute its base output with `forward`. Adapter matrices stay attached."""
    if BASE in vars(module):
        vars(module)[BASE] = forward, vars(module)[BASE][1]
    else:
        vars(module)["forward"] = forward


def _linear(module: Any, x: torch.Tensor) -> torch.Tensor:
    """Return the base output of a linear layer plus the output of its adapter matrices."""
    base, scaling = module.lora_base
    out: torch.Tensor = base(x)
    if OFF in vars(module):
        return out
    first, second = module.lora_A[DEFAULT], module.lora_B[DEFAULT]
    inputs = x.to(first.weight.dtype)
    has_dropout = hasattr(module, "lora_dropout") and module.training
    if has_dropout:
        inputs = module.lora_dropout[DEFAULT](inputs)
    added: torch.Tensor = second(first(inputs)) * scaling

    if hasattr(module, "lora_magnitude_vector"):
        weight = module.weight.to(inputs.dtype)
        # The norm is treated as a constant in backward, as in section 4.3 of the DoRA paper and in PEFT.
        norm = row_norms(weight, first.weight, second.weight, scaling)
        ratio = module.lora_magnitude_vector[DEFAULT].weight / norm
        without_bias = out if module.bias is None else out - module.bias
        if has_dropout:
            without_bias = F.linear(inputs, weight)
        added = (ratio - 1) * without_bias + ratio * added
    return out + added.to(out.dtype)


@torch.no_grad()
def row_norms(weight: torch.Tensor, first: torch.Tensor, second: torch.Tensor, scaling: float) -> torch.Tensor:
    """Return the norm of each row of the merged weight."""
    norms: torch.Tensor = torch.linalg.vector_norm(weight + scaling * (second @ first).to(weight.dtype), dim=1)
    return norms


@torch.no_grad()
def set_magnitudes(model: nn.Module, adapter: AdapterInfo) -> None:
    """Initialize DoRA's magnitudes to the row norms, after the base weights are loaded.

    Sharded models are supported.
    """
    if adapter.settings.kind != "dora":
        return
    for name in adapter.modules:
        scaling = scaling_of(adapter.settings, name)
        module: Any = model.get_submodule(name)
        magnitude = module.lora_magnitude_vector[DEFAULT].weight
        first = module.lora_A[DEFAULT].weight
        second = module.lora_B[DEFAULT].weight
        magnitude.copy_(row_norms(module.weight.to(magnitude.dtype), first, second, scaling))


# Embeddings


def _attach_to_embedding(module: Any, settings: AdapterSettings, scaling: float, dtype: torch.dtype) -> None:
    first = nn.Parameter(torch.empty(settings.rank, module.num_embeddings, dtype=dtype))
    second = nn.Parameter(torch.empty(module.embedding_dim, settings.rank, dtype=dtype))
    nn.init.zeros_(first)  # as in PEFT: the second matrix of an embedding is random
    nn.init.normal_(second)
    if settings.init == "random":
        nn.init.normal_(first)
    module.lora_embedding_A = nn.ParameterDict({DEFAULT: first})
    module.lora_embedding_B = nn.ParameterDict({DEFAULT: second})
    vars(module)["forward"] = partial(_embedding, module, module.forward, scaling)


def _embedding(
    module: Any, base: Callable[[torch.Tensor], torch.Tensor], scaling: float, ids: torch.Tensor
) -> torch.Tensor:
    """Return the embeddings plus the adapter output. Dropout does not apply to ids, as in PEFT."""
    out = base(ids)
    if OFF in vars(module):
        return out
    rows = F.embedding(ids, module.lora_embedding_A[DEFAULT].T, module.padding_idx)
    added: torch.Tensor = rows @ module.lora_embedding_B[DEFAULT].T * scaling
    return out + added.to(out.dtype)


# Merging


@torch.no_grad()
def merge(
    model: nn.Module, weights: dict[str, torch.Tensor], adapter: AdapterInfo, state: Mapping[str, torch.Tensor]
) -> None:
    """Merge the adapter `state` (full tensors, keyed by name) into the `weights` of the base `model`, in place."""
    for name in adapter.modules:
        scaling = scaling_of(adapter.settings, name)
        key = f"{name}.weight"
        if f"{name}.lora_embedding_A.{DEFAULT}" in state:
            first, second = (state[f"{name}.lora_embedding_{side}.{DEFAULT}"] for side in "AB")
            weights[key] = weights[key] + scaling * (second @ first).T
            continue
        first, second = (state[f"{name}.lora_{side}.{DEFAULT}.weight"] for side in "AB")
        merged = weights[key] + scaling * (second @ first)
        magnitude = state.get(f"{name}.lora_magnitude_vector.{DEFAULT}.weight")
        if magnitude is not None:
            merged = merged * (magnitude / row_norms(weights[key], first, second, scaling)).unsqueeze(1)
        weights[key] = merged

    for name in adapter.experts:
        owner, _, attribute = name.rpartition(".")
        module: Any = model.get_submodule(owner)
        key = f"{owner}.{stored_in(attribute, module)}"
        scaling = scaling_of(adapter.settings, name)
        weights[key] = weights[key] + merged_delta(module, owner, attribute, scaling, state)
    weights |= {name: tensor for name, tensor in state.items() if name not in adapter.started}
