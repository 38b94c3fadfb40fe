"""Estimate the memory and disk space of a run, check that the run fits, and choose the default for resharding."""

from collections.abc import Collection, Mapping

import torch
from torch import nn

from omnizoo.config.errors import UserError
from omnizoo.config.schema import Config
from omnizoo.models.adapters.lora import attached
from omnizoo.models.component_settings import ComponentSettings
from omnizoo.ops.device import available_memory, is_host, total_memory
from omnizoo.parallel.mesh import Mesh
from omnizoo.parallel.rendezvous import ranks_on_node

# Optimizer state in memory and in a checkpoint, in multiples of the size of the trained parameter. 8-bit state is saved
# as fp32.
HELD_STATE = {"adamw": 2, "muon": 1, "adafactor": 0, "adamw_8bit": 0.5}
SAVED_STATE = HELD_STATE | {"adamw_8bit": 2}


def saved_bytes(model: nn.Module, config: Config) -> int:
    """Return the approximate size of a checkpoint of `model` (on meta), in bytes.

    The checkpoint contains the weights (with an adapter, only trained weights) and the optimizer state of trained
    weights.
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
    optimizer = config.optimizer
    components = ComponentSettings(model, config.model, optimizer.groups)
    total = 0.0
    for name, parameter in model.named_parameters():
        if only is not None and name not in only:
            continue
        copies = 1.0  # total bytes, in multiples of the size of the weight
        if parameter.requires_grad and not components.is_frozen(name):
            group = components.groups.get(name)
            kind = (group and group.kind) or optimizer.kind
            moments = state.get(kind, 0)
            if optimizer.moments == "bf16" and kind == "adamw":
                moments = moments / 2
            copies += gradients + moments + (optimizer.ema is not None)
        dtype = components.of(name).dtype or parameter.dtype
        total += parameter.numel() * dtype.itemsize * copies
    return int(total)


KEPT_OF_MEMORY = 16  # weights smaller than 1 / KEPT_OF_MEMORY of the memory stay gathered until backward


def memory_per_rank(mesh: Mesh) -> int:
    """Return the bytes of device memory per rank. Ranks on CPU share the host's memory."""
    memory = total_memory(mesh.device)
    return memory // mesh.layout.world if is_host(mesh.device) else memory


def reshards(model: nn.Module, config: Config, memory: int) -> bool:
    """Whether blocks free their gathered weights after forward. By default, they do so if the weights are large."""
    if config.parallel.reshard_after_forward is not None:
        return config.parallel.reshard_after_forward
    itemsize = torch.bfloat16.itemsize if config.train.precision == "bf16" else None
    gathered_bytes = sum(p.numel() * (itemsize or p.itemsize) for p in model.parameters())
    return gathered_bytes * KEPT_OF_MEMORY > memory


def check_memory(model: nn.Module, mesh: Mesh, config: Config) -> None:
    """Check that weights, gradients and optimizer state fit in memory.

    Without this check, a process would be killed when it allocates too much memory.
    """
    bytes_per_rank = held_bytes(model, config) // mesh.layout.fsdp
    device_memory = total_memory(mesh.device)
    if "parameters" in config.parallel.offload:
        num_ranks = ranks_on_node()
        needed = bytes_per_rank * num_ranks
        available = available_memory()
        if needed > available:
            raise UserError(
                f"parallel.offload: weights, gradients and optimizer state need {needed / 2**30:,.3g} GiB of host "
                f"memory for the ranks of this node ({num_ranks}), but {available / 2**30:,.3g} GiB are available. "
                "Remove `parameters` from parallel.offload, or shard the model over more nodes (parallel.dp_shard)."
            )
    elif bytes_per_rank > device_memory:
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        raise UserError(
            f"model: {num_parameters:,} parameters with gradients and optimizer state need "
            f"{bytes_per_rank / 2**30:,.0f} GiB per rank (world size {mesh.layout.world}), but a device has "
            f"{device_memory / 2**30:,.0f} GiB. Reduce the sizes in model.config, or shard the model over more ranks "
            "(parallel.dp_shard)."
        )
