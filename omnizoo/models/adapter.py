"""Adapters: LoRA, DoRA and rsLoRA as small trained factors next to weights that stay as they are.

Attached to a model on meta, before it is sharded: factors are ordinary parameters of the module they belong to, and so
of its unit of FSDP. They have PEFT's names (`q_proj.lora_A.default.weight`), but the module itself is not wrapped as
PEFT does it: the base keeps its names, so published weights, tied weights, recipes and checkpoints need no second ones.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import partial
from types import MethodType
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from omnizoo.config.errors import UserError
from omnizoo.config.model_section import Adapter
from omnizoo.modalities.frozen import tokenisers
from omnizoo.models.hf_private import is_experts, kept_in_fp32, language_model, routers

ALL_LINEAR = "all-linear"
ATTACHED = "_omnizoo_adapter"  # where a model keeps what was attached to it
OFF = "_omnizoo_adapter_off"  # on a module with factors: they are to be left out for now
DEFAULT = "default"  # PEFT's name of an adapter that has none
KEY = "model.adapter"


@dataclass(frozen=True)
class Attached:
    """An adapter as it was attached: names are full ones, and nothing is left to match."""

    settings: Adapter
    modules: tuple[str, ...]  # linear layers and embeddings
    experts: tuple[str, ...]  # parameters of fused experts, `[experts, ...]`
    saved: tuple[str, ...]  # modules that are trained whole
    trained: frozenset[str]  # parameters: all factors, and those of `saved`
    started: frozenset[str]  # of them, those that have no value in the base
    generates: bool = True  # by transformers' `generate`, which PEFT wants to find in a model that writes text

    @property
    def scaling(self) -> float:
        return scaling_of(self.settings)

    def fields(self) -> dict[str, Any]:
        """As JSON holds it."""
        names = {name: sorted(getattr(self, name)) for name in ("trained", "started")}
        names |= {name: list(getattr(self, name)) for name in ("modules", "experts", "saved")}
        return names | {"settings": self.settings.model_dump(), "generates": self.generates}

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> "Attached":
        """From what `fields` gave; the folder that it began with is of no use any more."""
        settings = Adapter.model_validate(fields["settings"] | {"path": None})
        modules, experts, saved = (tuple(fields[name]) for name in ("modules", "experts", "saved"))
        trained, started = (frozenset(fields[name]) for name in ("trained", "started"))
        return cls(settings, modules, experts, saved, trained, started, fields.get("generates", True))


def scaling_of(settings: Adapter) -> float:
    return settings.alpha / (math.sqrt(settings.rank) if settings.kind == "rslora" else settings.rank)


def attached(model: nn.Module) -> Attached | None:
    """What was attached to `model`; None if it has no adapter."""
    return vars(model).get(ATTACHED)


@contextmanager
def switched_off(model: nn.Module) -> Iterator[None]:
    """Inside it, factors are left out: `model` computes what its base does, but for modules that are trained whole."""
    found = attached(model)
    assert found is not None, "a model without an adapter"
    names = {*found.modules, *(name.rpartition(".")[0] for name in found.experts)}
    modules = [model.get_submodule(name) for name in sorted(names)]
    for module in modules:
        vars(module)[OFF] = True
    try:
        yield
    finally:
        for module in modules:
            del vars(module)[OFF]


def attach(model: nn.Module, settings: Adapter, dtype: torch.dtype, stored: torch.dtype) -> None:
    """Give `model` the factors that `settings` asks for, in `dtype`; freeze all else but `modules_to_save`, and keep
    what is frozen in the precision `stored`. Call under the device that the model is on.

    A frozen weight needs no master copy: FSDP would round it to the precision of the run before every use.
    """
    kinds = _adaptable(model)
    names = _chosen(model, settings, kinds)
    saved = _saved(model, settings, names)
    for name in names:
        _check_fit(name, model, kinds[name], settings)
    before = {name for name, _ in model.named_parameters()}
    kept = {name for name in before if name.startswith(tuple(f"{module}." for module in saved))}
    whole = {p for module in tokenisers(model).values() for p in module.parameters()}  # their codes must not change
    whole |= set(kept_in_fp32(model).values())
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in kept)
        if name not in kept and parameter not in whole and parameter.is_floating_point():
            parameter.data = parameter.data.to(stored)
    for name in names:
        owner, _, own = name.rpartition(".")
        if kinds[name] == "experts":
            _attach_to_experts(model.get_submodule(owner), own, settings, dtype)
        elif kinds[name] == "embedding":
            _attach_to_embedding(cast(nn.Embedding, model.get_submodule(name)), settings, dtype)
        else:
            _attach_to_linear(cast(nn.Linear, model.get_submodule(name)), settings, dtype)
    factors = frozenset(name for name, _ in model.named_parameters()) - before
    found = Attached(
        settings,
        tuple(name for name in names if kinds[name] != "experts"),
        tuple(name for name in names if kinds[name] == "experts"),
        saved,
        factors | kept,
        factors,
        hasattr(model, "prepare_inputs_for_generation"),
    )
    vars(model)[ATTACHED] = found


# Which modules are meant


def _adaptable(model: nn.Module) -> dict[str, str]:
    """What can have factors, by full name: linear layers, embeddings, and parameters of fused experts."""
    frozen = tuple(f"{name}." for name in tokenisers(model))
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        if name.startswith(frozen):
            continue
        if isinstance(module, nn.Linear):
            found[name] = "linear"
        elif isinstance(module, nn.Embedding):
            found[name] = "embedding"
        elif is_experts(module):
            own = [own for own, parameter in module.named_parameters(recurse=False) if parameter.ndim == 3]
            found |= {f"{name}.{own}": "experts" for own in own}
    return found


def matches(name: str, pattern: str) -> bool:
    """A pattern with wildcards is of the full name; anything else is its end, as PEFT has it."""
    if re.search(r"[*?[]", pattern):
        return fnmatchcase(name, pattern)
    return name == pattern or name.endswith(f".{pattern}")


def linear_of_blocks(model: nn.Module) -> list[str]:
    """The linear layers of the language model's blocks, which are in a list; routers keep to their base."""
    prefix = ""
    if isinstance(model, PreTrainedModel):
        language = language_model(model)
        prefix = next(f"{name}." if name else "" for name, module in model.named_modules() if module is language)
    routing = set(routers(model))
    linear = [name for name, kind in _adaptable(model).items() if kind == "linear"]
    inside = [name for name in linear if name.startswith(prefix)]
    return [name for name in inside if re.search(r"\.\d+\.", f".{name}") and name not in routing]


def _chosen(model: nn.Module, settings: Adapter, kinds: dict[str, str]) -> list[str]:
    chosen: set[str] = set()
    for i, pattern in enumerate(settings.targets):
        is_all = pattern == ALL_LINEAR
        found = linear_of_blocks(model) if is_all else [name for name in kinds if matches(name, pattern)]
        if not found:
            what = "linear layer, embedding or expert weights"
            raise UserError(f"{KEY}.targets.{i}: {pattern[:80]!r} matches no {what}; {_nearest(pattern, kinds)}")
        chosen |= set(found)
    for i, pattern in enumerate(settings.exclude):
        left_out = [name for name in chosen if matches(name, pattern)]
        if not left_out:
            raise UserError(f"{KEY}.exclude.{i}: {pattern[:80]!r} matches no target; {_nearest(pattern, chosen)}")
        chosen -= set(left_out)
    if not chosen:
        raise UserError(f"{KEY}.exclude: {settings.exclude} leaves nothing of the targets {settings.targets}")
    return [name for name in kinds if name in chosen]  # in the order of the model


def _saved(model: nn.Module, settings: Adapter, targets: Sequence[str]) -> tuple[str, ...]:
    """Modules that are trained whole, outermost ones only."""
    modules = [name for name, module in model.named_modules() if name and any(True for _ in module.parameters())]
    chosen: list[str] = []
    for i, pattern in enumerate(settings.modules_to_save):
        key = f"{KEY}.modules_to_save.{i}: {pattern[:80]!r}"
        found = [name for name in modules if matches(name, pattern)]
        if not found:
            raise UserError(f"{key} matches no module with weights; {_nearest(pattern, modules)}")
        for name in found:
            if clash := [target for target in targets if f"{target}.".startswith(f"{name}.")]:
                raise UserError(f"{key} is trained whole, and {clash[0]} in it has factors; use one of the two")
        chosen += found
    outermost = [name for name in modules if name in chosen and not name.startswith(tuple(f"{o}." for o in chosen))]
    _check_tied(model, outermost)
    return tuple(outermost)


def _check_tied(model: nn.Module, saved: Sequence[str]) -> None:
    """PEFT trains a copy of a module, which nothing is tied to: a file of one half would mean another model there."""
    inside = tuple(f"{name}." for name in saved)
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    for own in names.values():
        trained = [name for name in own if name.startswith(inside)]
        if inside and trained and len(trained) < len(own):
            other = next(name for name in own if name not in trained)
            raise UserError(f"{KEY}.modules_to_save: {trained[0]} is tied to {other}; name the modules of both")


def _nearest(pattern: str, names: Iterable[str]) -> str:
    """The nearest names; those that differ only in the number of their layer once."""
    by_kind = {re.sub(r"\d+", "*", name): name for name in reversed(list(names))}
    ends = {name.rpartition(".")[2]: name for name in by_kind.values()}
    close = get_close_matches(pattern[:200], [*by_kind.values(), *ends], n=3, cutoff=0)
    return f"the nearest are {', '.join(dict.fromkeys(close))}" if close else "there is none"


def _check_fit(name: str, model: nn.Module, kind: str, settings: Adapter) -> None:
    """Refuse what cannot be, before anything is attached."""
    if kind != "linear" and settings.kind == "dora":
        raise UserError(f"{KEY}.kind: dora is for linear layers; exclude {name}, or use lora")
    if kind == "experts" and settings.dropout:
        raise UserError(f"{KEY}.dropout: {settings.dropout:g} cannot be had for experts ({name}); set it to 0")
    shape = (
        model.get_parameter(name) if kind == "experts" else model.get_submodule(name).get_parameter("weight")
    ).shape
    if settings.rank > min(shape[-2:]):
        sizes = " x ".join(str(size) for size in shape[-2:])
        raise UserError(
            f"{KEY}.rank: {settings.rank} is above a dimension of {name} ({sizes}); expected at most {min(shape[-2:])}"
        )


# Linear layers

BASE = "lora_base"  # of a layer with factors: how it computes without them, and what they are multiplied by


def _attach_to_linear(module: nn.Linear, settings: Adapter, dtype: torch.dtype) -> None:
    first = nn.Linear(module.in_features, settings.rank, bias=False, dtype=dtype)
    second = nn.Linear(settings.rank, module.out_features, bias=False, dtype=dtype)
    _draw(first.weight, second.weight, settings)
    module.lora_A, module.lora_B = nn.ModuleDict({DEFAULT: first}), nn.ModuleDict({DEFAULT: second})
    if settings.dropout:
        module.lora_dropout = nn.ModuleDict({DEFAULT: nn.Dropout(settings.dropout)})
    if settings.kind == "dora":
        magnitude = nn.Module()
        magnitude.weight = nn.Parameter(torch.ones(module.out_features, dtype=dtype))  # set once the base has weights
        module.lora_magnitude_vector = nn.ModuleDict({DEFAULT: magnitude})
    # On the instance: a head that is more than a matrix is then seen to be (models/head.py). A method of one function:
    # layers with a partial each would have compiled graphs each.
    vars(module).update({BASE: (module.forward, scaling_of(settings)), "forward": MethodType(_linear, module)})


def set_base(module: nn.Linear, forward: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Let `module` compute its base by `forward`; its factors, if it has any, stay."""
    if BASE in vars(module):
        vars(module)[BASE] = forward, vars(module)[BASE][1]
    else:
        vars(module)["forward"] = forward


def _draw(first: torch.Tensor, second: torch.Tensor, settings: Adapter) -> None:
    """`first` is drawn and `second` zero, as PEFT begins; both are drawn if `init` says so."""
    if settings.init == "gaussian":
        nn.init.normal_(first, std=1 / settings.rank)
    else:
        nn.init.kaiming_uniform_(first, a=math.sqrt(5))
    if settings.init == "random":
        nn.init.kaiming_uniform_(second, a=math.sqrt(5))
    else:
        nn.init.zeros_(second)


def _linear(module: Any, x: torch.Tensor) -> torch.Tensor:
    base, scaling = module.lora_base
    out: torch.Tensor = base(x)
    if OFF in vars(module):
        return out
    first, second = module.lora_A[DEFAULT], module.lora_B[DEFAULT]
    entering = x.to(first.weight.dtype)
    is_dropped = hasattr(module, "lora_dropout") and module.training
    if is_dropped:
        entering = module.lora_dropout[DEFAULT](entering)
    added: torch.Tensor = second(first(entering)) * scaling
    if hasattr(module, "lora_magnitude_vector"):
        weight = module.weight.to(entering.dtype)
        # Taken as a constant in backward (section 4.3 of the DoRA paper, and PEFT).
        norm = row_norms(weight, first.weight, second.weight, scaling)
        ratio = module.lora_magnitude_vector[DEFAULT].weight / norm
        plain = F.linear(entering, weight) if is_dropped else out if module.bias is None else out - module.bias
        added = (ratio - 1) * plain + ratio * added
    return out + added.to(out.dtype)


@torch.no_grad()
def row_norms(weight: torch.Tensor, first: torch.Tensor, second: torch.Tensor, scaling: float) -> torch.Tensor:
    """The length of each row of the merged weight."""
    norms: torch.Tensor = torch.linalg.vector_norm(weight + scaling * (second @ first).to(weight.dtype), dim=1)
    return norms


@torch.no_grad()
def set_magnitudes(model: nn.Module, found: Attached) -> None:
    """Begin DoRA's magnitudes at the length of the rows, now that the base has weights. Of shards or whole."""
    for name in found.modules if found.settings.kind == "dora" else ():
        module: Any = model.get_submodule(name)
        magnitude = module.lora_magnitude_vector[DEFAULT].weight
        factors = (module.lora_A[DEFAULT].weight, module.lora_B[DEFAULT].weight)
        magnitude.copy_(row_norms(module.weight.to(magnitude.dtype), *factors, found.scaling))


# Embeddings


def _attach_to_embedding(module: nn.Embedding, settings: Adapter, dtype: torch.dtype) -> None:
    first = nn.Parameter(torch.empty(settings.rank, module.num_embeddings, dtype=dtype))
    second = nn.Parameter(torch.empty(module.embedding_dim, settings.rank, dtype=dtype))
    nn.init.zeros_(first)  # as PEFT begins: here the other one is drawn
    nn.init.normal_(second)
    if settings.init == "random":
        nn.init.normal_(first)
    module.lora_embedding_A = nn.ParameterDict({DEFAULT: first})
    module.lora_embedding_B = nn.ParameterDict({DEFAULT: second})
    vars(module)["forward"] = partial(_embedding, module, module.forward, scaling_of(settings))


def _embedding(
    module: Any, base: Callable[[torch.Tensor], torch.Tensor], scaling: float, ids: torch.Tensor
) -> torch.Tensor:
    """PEFT leaves dropout out here, too: there is nothing to drop of an id."""
    out = base(ids)
    if OFF in vars(module):
        return out
    rows = F.embedding(ids, module.lora_embedding_A[DEFAULT].T, module.padding_idx)
    added: torch.Tensor = rows @ module.lora_embedding_B[DEFAULT].T * scaling
    return out + added.to(out.dtype)


# Fused experts


def factor_names(own: str) -> tuple[str, str]:
    """Names of the two factors of the experts' parameter `own`, next to it in the same module."""
    return f"{own}_lora_A", f"{own}_lora_B"


def _attach_to_experts(module: Any, own: str, settings: Adapter, dtype: torch.dtype) -> None:
    """Both factors are `[experts, rank, width]`: experts are spread over ranks by the first dim, shared by the last."""
    experts, rows, columns = getattr(module, own).shape
    entering, leaving = (rows, columns) if module.is_transposed else (columns, rows)
    first = nn.Parameter(torch.empty(experts, settings.rank, entering, dtype=dtype))
    second = nn.Parameter(torch.empty(experts, settings.rank, leaving, dtype=dtype))
    _draw(first.view(-1, entering), second.view(-1, leaving), settings)
    for name, factor in zip(factor_names(own), (first, second), strict=True):
        module.register_parameter(name, factor)
    module.lora_scaling = scaling_of(settings)


# Merging


@torch.no_grad()
def merge(
    model: nn.Module, weights: dict[str, torch.Tensor], found: Attached, state: Mapping[str, torch.Tensor]
) -> None:
    """Put the adapter `state`, whole and by name, into the `weights` of the base `model`, in place."""
    scaling = found.scaling
    for name in found.modules:
        key = f"{name}.weight"
        if f"{name}.lora_embedding_A.{DEFAULT}" in state:
            first, second = (state[f"{name}.lora_embedding_{side}.{DEFAULT}"] for side in "AB")
            weights[key] = weights[key] + scaling * (second @ first).T
            continue
        first, second = (state[f"{name}.lora_{side}.{DEFAULT}.weight"] for side in "AB")
        merged = weights[key] + scaling * (second @ first)
        if (length := state.get(f"{name}.lora_magnitude_vector.{DEFAULT}.weight")) is not None:
            merged = merged * (length / row_norms(weights[key], first, second, scaling)).unsqueeze(1)
        weights[key] = merged
    for name in found.experts:
        owner, _, own = name.rpartition(".")
        first, second = (state[f"{owner}.{factor}"] for factor in factor_names(own))
        module: Any = model.get_submodule(owner)
        added = first.transpose(1, 2) @ second  # [experts, entering, leaving]
        weights[name] = weights[name] + scaling * (added if module.is_transposed else added.transpose(1, 2))
    weights |= {name: tensor for name, tensor in state.items() if name not in found.started}
