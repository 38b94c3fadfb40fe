"""Every private name of transformers that OmniZoo relies on, checked on 5.22.2; tests/test_private.py sees them move.

Public ways were tried first: `from_pretrained` cannot fill a model that FSDP2 has already sharded, and builds masks and
buffers that packing must not have.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.modeling_utils import LoadStateDictConfig


def block_class_names(model: PreTrainedModel) -> set[str]:
    """Classes that the model's authors declare indivisible: its blocks."""
    return set(model._no_split_modules or ())


def uses_attention_interface(model: PreTrainedModel) -> bool:
    return bool(model._supports_attention_backend)


def attention_name(model: PreTrainedModel) -> str:
    return str(model.config._attn_implementation)


def carries_state(model: PreTrainedModel) -> bool:
    """True for recurrent models (state-space and the like)."""
    return bool(model._is_stateful)


def init_module(owner: PreTrainedModel, module: nn.Module) -> None:
    """Draw the weights of `module` (not of its children) by the rules of the model it belongs to."""
    owner._init_weights(module)


def modules_children_first(model: PreTrainedModel) -> Iterator[tuple[nn.Module, PreTrainedModel]]:
    """Modules in the order transformers initialises them, each with the sub-model whose rules apply to it."""

    def walk(module: nn.Module, owner: PreTrainedModel) -> Iterator[tuple[nn.Module, PreTrainedModel]]:
        owner = module if isinstance(module, PreTrainedModel) else owner
        for child in module.children():
            yield from walk(child, owner)
        yield module, owner

    return walk(model, model)


@dataclass(frozen=True)
class Loaded:
    missing: set[str]  # parameters and persistent buffers of the model that the files do not have
    unexpected: set[str]  # keys of the files that the model does not have
    mismatched: set[str]  # "name: shape in file, shape in model"


def conversion_mapping(model: PreTrainedModel) -> list[Any]:
    """How published keys become the model's own. Ask before `fully_shard`, which renames the classes it looks at."""
    return list(get_model_conversion_mapping(model))


def load_files(model: PreTrainedModel, files: list[Path], mapping: list[Any], device: torch.device) -> Loaded:
    """Fill `model` (on meta, sharded or not) from safetensors; of a sharded parameter only this rank's part is read."""
    load_config = LoadStateDictConfig(device_map={"": device}, weight_mapping=mapping, ignore_mismatched_sizes=True)
    info, _ = PreTrainedModel._load_pretrained_model(model, None, [str(file) for file in files], load_config)
    if info.conversion_errors or info.error_msgs:
        raise RuntimeError(f"weights could not be converted: {info.conversion_errors or info.error_msgs}")
    model._adjust_missing_and_unexpected_keys(info)
    tied = set(model.all_tied_weights_keys)
    mismatched = {
        f"{name}: {tuple(found)} in the files, {tuple(wanted)} in the model"
        for name, found, wanted in info.mismatched_keys
    }
    return Loaded(set(info.missing_keys) - tied, set(info.unexpected_keys), mismatched)


def retie(model: PreTrainedModel) -> None:
    """Make tied weights one parameter again after loading has replaced their source."""
    for target, source in model.all_tied_weights_keys.items():
        module, _, name = target.rpartition(".")
        setattr(model.get_submodule(module), name, model.get_parameter(source))
