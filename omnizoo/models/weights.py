"""Published weights into a model on meta: finds the safetensors, loads them, and accounts for every key."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from omnizoo.config.errors import UserError, first_line, is_out_of_memory
from omnizoo.config.model_section import Model
from omnizoo.modalities.base import Port
from omnizoo.models.artefact import inside, read_json, tensor_names
from omnizoo.models.build import read_model_config
from omnizoo.models.hf_private import (
    auto_class,
    conversion_mapping,
    drop_prefix,
    load_files,
    loader_of,
    names_in_model,
    retie,
)
from omnizoo.models.media_model import MediaModel
from omnizoo.models.published_files import carry, read_published
from omnizoo.models.shell import open_shell
from omnizoo.models.vocabulary import PublishedRows, may_grow, rows_of_files


@dataclass(frozen=True)
class Origin:
    """Published weights for a model, or for one Hugging Face model inside of it."""

    module: str  # its name in the whole; empty: the whole
    path: str
    key: str  # what the config calls it
    mapping: list[Any]  # how published keys become the model's own


def weight_origins(model: nn.Module, media: MediaModel, spec: Model) -> list[Origin]:
    """Where the weights of `model` come from. Ask before it is sharded."""
    paths = {"": ("model.path", spec.path)}
    names = {id(module): name for name, module in model.named_modules()}
    if spec.foundation is not None:
        paths = {names[id(media.language)]: ("model.foundation.path", spec.foundation.path)}
    modalities = media.modalities(spec)
    for name, role in media.ports:
        part = getattr(spec.modalities.get(name), role, None)
        if part is not None and part.path is not None:
            inner = Port(name, role).module(modalities).pretrained
            if inner is not None:  # others read their folder themselves
                paths[names[id(inner)]] = (f"model.modalities.{name}.{role}.path", part.path)
    origins = []
    for name, (key, path) in paths.items():
        if path is not None:
            owner: Any = model.get_submodule(name) if name else model
            mapping = conversion_mapping(owner)
            if key.startswith("model.modalities"):
                mapping += drop_prefix(weight_files(Path(path), key), owner)
            origins.append(Origin(name, path, key, mapping))
    return origins


def load_weights(
    model: nn.Module, origin: Origin, spec: Model, device: torch.device, new: Collection[str] = ()
) -> set[str]:
    """Fill `model` from `origin`; returns the names it lacks, all of them allowed by `spec.allow_missing` or `new`, or
    of a vocabulary that has grown (`grown_rows`).

    `new` are weights of the run's own, which no folder has: factors of an adapter. A part of a model may be published
    as part of another one: what else is in its folder is left alone.
    """
    assert isinstance(model, PreTrainedModel)
    path, key = origin.path, origin.key
    if getattr(model.config, "quantization_config", None):
        raise UserError(f"{key}: {path}/config.json has a quantization_config; quantised weights cannot be read")
    is_trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    grown = grown_rows(model, [replace(origin, module="")], spec)
    loaded = load_files(model, weight_files(Path(path), key), origin.mapping, device)
    retie(model)
    for name, parameter in model.named_parameters():  # loading makes new ones of what is not sharded: frozen tokenisers
        parameter.requires_grad_(is_trained[name])
    missing = sorted(name for name in loaded.missing.difference(new) if not _allowed(name, spec.allow_missing))
    unexpected = sorted(name for name in loaded.unexpected if not _allowed(name, spec.allow_unexpected))
    mismatched = sorted(f"{name}: {shapes}" for name, shapes in loaded.mismatched.items() if name not in grown)
    unknown = f"; the files have what the model does not know: {_some(unexpected)}" if unexpected else ""
    if loaded.unconverted:
        name, reason = min(loaded.unconverted.items())
        raise UserError(f"{key}: {path}: {name} cannot be made of the weights in the files: {reason}{unknown}")
    if mismatched:
        raise UserError(f"{key}: {path} does not fit its own config.json: {_some(mismatched)}")
    if missing:
        raise UserError(
            f"{key}: {path} lacks weights of the model: {_some(missing)}; "
            f"name them in model.allow_missing to have them initialised{unknown}"
        )
    if unexpected and not origin.key.startswith("model.modalities"):
        raise UserError(
            f"{key}: {path} has weights the model does not know: {_some(unexpected)}; "
            "name them in model.allow_unexpected to ignore them"
        )
    return loaded.missing | set(grown)


def grown_rows(model: nn.Module, origins: Iterable[Origin], spec: Model) -> dict[str, PublishedRows]:
    """Weights of a vocabulary that has grown, by name in `model`: what published files have of them."""
    grown: dict[str, PublishedRows] = {}
    for origin in origins if may_grow(spec) else ():
        part: Any = model.get_submodule(origin.module) if origin.module else model
        prefix = origin.module and origin.module + "."
        files = weight_files(Path(origin.path), origin.key)
        found = rows_of_files(part, files, names_in_model(part, files, origin.mapping))
        grown |= {prefix + name: rows for name, rows in found.items()}
    return grown


def load_whole(spec: Model, dtype: torch.dtype) -> PreTrainedModel:
    """The model of the folder `spec.path` with its weights, whole and on the CPU, every weight accounted for."""
    assert spec.path is not None
    folder = Path(spec.path)
    config = read_model_config(spec)
    builder = auto_class(config, spec.trust_remote_code)
    if builder is None:
        raise UserError(f"{folder}: transformers has no model of type `{config.model_type}` that writes text")
    if (folder / "adapter_config.json").exists():
        raise UserError(f"{folder} holds an adapter (adapter_config.json), which is not read; merge it into its model")
    tensors = sum(len(tensor_names(file)) for file in weight_files(folder, "its weights"))
    layers = getattr(config.get_text_config(), "num_hidden_layers", 0)
    if isinstance(layers, int) and layers > tensors:  # building them would take for ever
        raise UserError(f"{folder}: config.json says {layers} layers, but the files hold {tensors} weights")
    if getattr(config, "quantization_config", None):
        raise UserError(
            f"{folder}: config.json has a quantization_config; only weights that are not quantised are read"
        )
    try:
        model, info = loader_of(builder, config)(
            folder,
            config=config,
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=spec.trust_remote_code,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except UserError as error:
        raise UserError(f"{folder}: {error}") from error
    except Exception as error:  # whatever a model's constructor or its loader makes of numbers that do not fit
        if is_out_of_memory(error):
            raise
        raise UserError(f"{folder}: the model cannot be built as config.json says: {first_line(error)}") from error
    assert isinstance(model, PreTrainedModel)
    for kind in ("missing", "unexpected", "mismatched"):
        if keys := sorted(str(key) for key in info[f"{kind}_keys"]):
            what = {"missing": "lacks", "unexpected": "has unknown", "mismatched": "has other shapes of"}[kind]
            raise UserError(f"{folder} {what} weights of the model that its config.json describes: {_some(keys)}")
    open_shell(model)
    carry(model, read_published(folder, config, has_weights=True))
    return model


def weight_files(folder: Path, key: str) -> list[Path]:
    """The safetensors of a HF folder: those of the index where there is one."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        places = read_json(index).get("weight_map")
        if not isinstance(places, dict) or not places:
            raise UserError(f"{key}: {index} has no weight_map: a mapping of weights to files")
        files = sorted({inside(folder, name, f"{key}: {index}") for name in places.values()})
    else:
        files = [folder / "model.safetensors"]
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise UserError(
            f"{key}: {folder} has no {_some(absent)}; weights are read from safetensors only (never from pickles)"
        )
    for file in files:
        tensor_names(file)
    return files


def _allowed(name: str, patterns: list[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
