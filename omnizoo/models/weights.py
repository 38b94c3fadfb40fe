"""Published weights into a model on meta: finds the safetensors, loads them, and accounts for every key."""

import json
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from omnizoo.config.errors import UserError
from omnizoo.config.schema import Model
from omnizoo.models.hf_private import conversion_mapping, drop_prefix, load_files, retie
from omnizoo.models.omni import OmniModel


@dataclass(frozen=True)
class Origin:
    """Published weights for a model, or for one Hugging Face model inside of it."""

    module: str  # its name in the whole; empty: the whole
    path: str
    key: str  # what the config calls it
    mapping: list[Any]  # how published keys become the model's own


def weight_origins(model: nn.Module, spec: Model) -> list[Origin]:
    """Where the weights of `model` come from. Ask before it is sharded."""
    paths = {"": ("model.path", spec.path)}
    if isinstance(model, OmniModel) and spec.foundation is not None:
        names = {id(module): name for name, module in model.named_modules()}
        paths = {"foundation": ("model.foundation.path", spec.foundation.path)}
        for name, modality in spec.modalities.items():
            for role, part in (("encoder", modality.encoder), ("decoder", modality.decoder)):
                if part is not None and part.path is not None:
                    inner = (model.encoder(name) if role == "encoder" else model.decoder(name)).pretrained
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


def load_weights(model: nn.Module, origin: Origin, spec: Model, device: torch.device) -> set[str]:
    """Fill `model` from `origin`; returns the names it lacks, all of them allowed by `spec.allow_missing`.

    A part of a model may be published as part of another one: what else is in its folder is left alone.
    """
    assert isinstance(model, PreTrainedModel)
    path, key = origin.path, origin.key
    loaded = load_files(model, weight_files(Path(path), key), origin.mapping, device)
    retie(model)
    missing = sorted(name for name in loaded.missing if not _allowed(name, spec.allow_missing))
    unexpected = sorted(name for name in loaded.unexpected if not _allowed(name, spec.allow_unexpected))
    if loaded.mismatched:
        raise UserError(f"{key}: {path} does not fit its own config.json: {_some(sorted(loaded.mismatched))}")
    if missing:
        raise UserError(
            f"{key}: {path} lacks weights of the model: {_some(missing)}; "
            "name them in model.allow_missing to have them initialised"
        )
    if unexpected and not origin.key.startswith("model.modalities"):
        raise UserError(
            f"{key}: {path} has weights the model does not know: {_some(unexpected)}; "
            "name them in model.allow_unexpected to ignore them"
        )
    return loaded.missing


def weight_files(folder: Path, key: str) -> list[Path]:
    """The safetensors of a HF folder: those of the index where there is one."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    else:
        files = [folder / "model.safetensors"]
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise UserError(
            f"{key}: {folder} has no {_some(absent)}; weights are read from safetensors only (never from pickles)"
        )
    return files


def _allowed(name: str, patterns: list[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
