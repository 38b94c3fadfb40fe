"""Published weights into a model on meta: finds the safetensors, loads them, and accounts for every key."""

import json
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from omnizoo.config.errors import UserError
from omnizoo.config.schema import Model
from omnizoo.models.hf_private import load_files, retie


def load_weights(model: PreTrainedModel, mapping: list[Any], spec: Model, device: torch.device) -> set[str]:
    """Fill `model` from `spec.path`; returns the names it lacks, all of them allowed by `spec.allow_missing`."""
    assert spec.path is not None
    loaded = load_files(model, weight_files(Path(spec.path)), mapping, device)
    retie(model)
    missing = sorted(name for name in loaded.missing if not _allowed(name, spec.allow_missing))
    unexpected = sorted(name for name in loaded.unexpected if not _allowed(name, spec.allow_unexpected))
    if loaded.mismatched:
        raise UserError(f"model.path: {spec.path} does not fit its own config.json: {_some(sorted(loaded.mismatched))}")
    if missing:
        raise UserError(
            f"model.path: {spec.path} lacks weights of the model: {_some(missing)}; "
            "name them in model.allow_missing to have them initialised"
        )
    if unexpected:
        raise UserError(
            f"model.path: {spec.path} has weights the model does not know: {_some(unexpected)}; "
            "name them in model.allow_unexpected to ignore them"
        )
    return loaded.missing


def weight_files(folder: Path) -> list[Path]:
    """The safetensors of a HF folder: those of the index where there is one."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    else:
        files = [folder / "model.safetensors"]
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise UserError(
            f"model.path: {folder} has no {_some(absent)}; weights are read from safetensors only (never from pickles)"
        )
    return files


def _allowed(name: str, patterns: list[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
