"""Estimate the memory and disk space of a run, check that it fits, and choose the default of resharding."""

import os
from collections.abc import Collection, Mapping

import torch
from torch import nn

from omnizoo.config.errors import UserError
from omnizoo.config.schema import Config
from omnizoo.models.adapters.lora import attached
from omnizoo.models.component_settings import ComponentSettings
from omnizoo.ops.device import available_memory, is_host, total_memory
from omnizoo.parallel.mesh import Mesh

# Optimizer state of a trained parameter, in multiples of its size; 8-bit state is saved as fp32.
HELD_STATE = {"adamw": 2, "muon": 1, "adafactor": 0, "adamw_8bit": 0.5}
SAVED_STATE = HELD_STATE | {"adamw_8bit": 2}


def saved_bytes(model: nn.Module, config: Config) -> int:
    """Return the approximate size of a checkpoint of `model` (on meta), in bytes.

    It contains the weights, or only the trained ones with an adapter, and the optimizer state of trained weights.
    """
    adapter = attached(model)
    return _bytes(model, config, SAVED_STATE, gradients=0, only=adapter.trained if adapter else None)


def held_bytes(model: nn.Module, config: Config) -> int:
    """Return the bytes of weights, gradients and optimizer state of `model` (on meta), over all ranks that shard it.

    Activations are not included.
    """
    return _bytes(model, config, HELD_STATE, gradients=1)


def _bytes(
    model: nn.Module, config: Config, state: Mapping[str, float], gradients: int, only: Collection[str] | None = None
) -> int:
    """Return the bytes of weights, gradients and optimizer state.

    The state of a plugin optimizer is unknown and counts as 0.
    """
    treatments, run = ComponentSettings(model, config.model, config.optimizer.groups), config.optimizer
    total = 0.0
    for name, parameter in model.named_parameters():
        if only is not None and name not in only:
            continue
        treatment, group = treatments.of(name), treatments.groups.get(name)
        copies = 1.0
        if parameter.requires_grad and not treatments.is_frozen(name):
            kind = (group and group.kind) or run.kind
            moments = state.get(kind, 0) / (2 if run.moments == "bf16" and kind == "adamw" else 1)
            copies += gradients + moments + (run.ema is not None)
        total += parameter.numel() * (treatment.dtype or parameter.dtype).itemsize * copies
    return int(total)


KEPT_OF_MEMORY = 16  # weights below 1 / KEPT_OF_MEMORY of the memory stay gathered until backward


def memory_per_rank(mesh: Mesh) -> int:
    """Return the bytes of device memory per rank. Ranks on CPU share the host's memory."""
    return total_memory(mesh.device) // (mesh.layout.world if is_host(mesh.device) else 1)


def reshards(model: nn.Module, config: Config, memory: int) -> bool:
    """Whether blocks free their gathered weights after forward. By default they do if the weights are large."""
    if config.parallel.reshard_after_forward is not None:
        return config.parallel.reshard_after_forward
    itemsize = torch.bfloat16.itemsize if config.train.precision == "bf16" else None
    gathered_bytes = sum(p.numel() * (itemsize or p.itemsize) for p in model.parameters())
    return gathered_bytes * KEPT_OF_MEMORY > memory


def check_memory(model: nn.Module, mesh: Mesh, config: Config) -> None:
    """Check that weights, gradients and optimizer state fit in memory.

    Otherwise the process would be killed during allocation.
    """
    each, there = held_bytes(model, config) // mesh.layout.fsdp, total_memory(mesh.device)
    if "parameters" in config.parallel.offload:
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if each * ranks > (left := available_memory()):
            raise UserError(
                f"parallel.offload: weights, gradients and the optimizer's state of {ranks} rank(s) take "
                f"{each * ranks / 2**30:,.3g} GiB on the host, which has {left / 2**30:,.3g} GiB left: leave "
                "`parameters` out, or share the model among more nodes (parallel.dp_shard)"
            )
    elif each > there:
        count = sum(parameter.numel() for parameter in model.parameters())
        raise UserError(
            f"model: {count:,} parameters with gradients and the optimizer's state take {each / 2**30:,.0f} GiB on "
            f"each of {mesh.layout.world} rank(s), and there are {there / 2**30:,.0f} GiB: see the sizes in "
            "model.config, or shard it over more ranks (parallel.dp_shard)"
        )
