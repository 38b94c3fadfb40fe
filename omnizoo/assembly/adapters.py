"""What a run with an adapter does besides: where factors begin, which base they belong to, and that base again."""

import logging
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from omnizoo.assembly.published import media_model
from omnizoo.checkpoint import manifest
from omnizoo.config.errors import UserError
from omnizoo.config.load import load_config
from omnizoo.config.model_section import Model
from omnizoo.config.schema import Config
from omnizoo.modalities.frozen import Frozen
from omnizoo.models.adapter import KEY, Attached, attached, set_magnitudes
from omnizoo.models.adapter_files import base_of, read_factors
from omnizoo.models.base_identity import base_identity, check_base_identity
from omnizoo.models.build import build_model, is_own_module, tensors_of
from omnizoo.models.initial import initial_weights
from omnizoo.models.weights import Origin, load_weights, weight_origins
from omnizoo.ops.quantised import count_weights
from omnizoo.parallel.shard import allocate, fill

log = logging.getLogger(__name__)


def adapter_record(model: nn.Module, config: Config) -> dict[str, Any] | None:
    """What a checkpoint tells of the adapter of `model` and of its base, which it does not hold. None without one."""
    found = attached(model)
    if found is None:
        return None
    base, path = base_identity(config), found.settings.path
    if path is not None:
        check_base_identity(base_of(Path(path)), base, f"{KEY}.path: {path}")
    folder = config.model.path or (config.model.foundation and config.model.foundation.path)
    return {"base": base, "path": folder, **found.fields()}


def describe_adapter(model: nn.Module) -> str:
    """One line about the adapter of `model`; empty without one."""
    found = attached(model)
    if found is None:
        return ""
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    trained = sum(sizes[name] for name in found.trained)
    places = len(found.modules) + len(found.experts)
    base = f", base in {found.settings.base}" if found.settings.base else ""
    return (
        f"{found.settings.kind} of rank {found.settings.rank} at {places} places, {trained / 1e6:.2f} M parameters "
        f"trained ({trained / count_weights(model):.2%}){base}"
    )


def begin_adapter(model: nn.Module, adapter: Attached) -> None:
    """What an adapter begins with, besides what is drawn: the lengths of rows, or the folder of another adapter."""
    set_magnitudes(model, adapter)
    if adapter.settings.path is not None:
        fill(model, read_factors(adapter))


def base_weights(source: Path, spec: Model) -> tuple[PreTrainedModel, dict[str, torch.Tensor]]:
    """The base of the adapter in the checkpoint `source`: the model on the CPU, and its weights by name, in fp32.

    `spec` builds it from what the checkpoint keeps of it, by code that the user allows; where weights come from is told
    by the config of the run.
    """
    config = load_config(source / "config.yaml", [])
    state = manifest.read_state(source, manifest.read(source))
    if is_own_module(config.model) or config.model.given is not None:
        raise UserError(f"--merge: the base of {source} is a module of your own; merge the adapter in Python")
    check_base_identity(state["adapter"]["base"], base_identity(config), f"--merge: {source}")
    if (adapter := config.model.adapter) is not None and adapter.base is not None:
        log.warning("--merge: trained on a base in %s, and merged into the base as it was before", adapter.base)
    model = build_model(spec, "fp32")
    if any(isinstance(module, Frozen) for module in model.modules()):
        raise UserError(f"--merge: the base of {source} has tokenisers that are read from other folders: not supported")
    origins = weight_origins(model, media_model(model), config.model)
    wanted = {name for name, _ in tensors_of(model)}
    wanted = load_published(model, origins, config.model, torch.device("cpu"), wanted)
    allocate(model, torch.device("cpu"))
    fill(model, initial_weights(partial(build_model, spec, "fp32"), config.train.seed, wanted))
    assert isinstance(model, PreTrainedModel)
    persistent = set(model.state_dict())
    return model, {name: tensor.detach() for name, tensor in tensors_of(model) if name in persistent}


def load_published(
    model: nn.Module, origins: Iterable[Origin], spec: Model, device: torch.device, wanted: set[str]
) -> set[str]:
    """Fill `model` from all folders with published weights; returns what of `wanted` they do not have."""
    adapter = attached(model)
    for origin in origins:
        part = model.get_submodule(origin.module) if origin.module else model
        prefix = origin.module and origin.module + "."
        factors = adapter.started if adapter else frozenset()
        new = {name.removeprefix(prefix) for name in factors if name.startswith(prefix)}
        missing = load_weights(part, origin, spec, device, new)
        own = {prefix + name for name, _ in part.named_parameters()} | {prefix + name for name in part.state_dict()}
        wanted = (wanted - own) | {prefix + name for name in missing}
    return wanted
