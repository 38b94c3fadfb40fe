"""Sharded tensors on disk: torch's distributed checkpoint (DCP) over safetensors, so nothing is ever unpickled.

Names are flat: `model.<parameter>` and `optimizer.<parameter>.<state>`; any layout reads what any other wrote.
"""

import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from omnizoo.config.errors import UserError

MODEL, OPTIMIZER, AVERAGE = "model.", "optimizer.", "ema."


def model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters (tied ones once) and persistent buffers, under their names in a checkpoint."""
    persistent = set(model.state_dict())
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if name in persistent]
    return {MODEL + name: tensor.detach() for name, tensor in [*model.named_parameters(), *buffers]}


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Moments, step counts and average of every trained parameter; creates them (moments as zeros) where no step was
    taken yet."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if any(not optimizer.state.get(p) for p in parameters.values()):
        _create_state(optimizer)
    state = {
        f"{OPTIMIZER}{name}.{key}": value for name, p in parameters.items() for key, value in optimizer.state[p].items()
    }
    average = getattr(optimizer, "average", {})
    return state | {f"{AVERAGE}{name}": average[p] for name, p in parameters.items() if p in average}


def _create_state(optimizer: torch.optim.Optimizer) -> None:
    """One step with zero gradients and zero learning rate makes the state that is missing, and moves nothing."""
    rates = [group["lr"] for group in optimizer.param_groups]
    everyone = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [p.grad for p in everyone]
    parameters = [p for p in everyone if not optimizer.state.get(p)]
    for p in everyone:
        p.grad = None
    for p in parameters:
        p.grad = torch.zeros_like(p)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for p, gradient in zip(everyone, gradients, strict=True):
        p.grad = gradient
    for p in parameters:
        for value in optimizer.state[p].values():
            value.zero_()


def write(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Every rank writes its own shards; a failure on one rank is an exception on all."""
    dcp.save(dict(tensors), storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))


def read(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Fill `tensors` in place. Names and shapes are compared first: a failed load would leave them half overwritten."""
    saved = _saved(folder)
    for name, tensor in sorted(tensors.items()):
        if name not in saved:
            raise UserError(f"checkpoint {folder.parent} is of another model: it has no {name}")
        if saved[name].size != tensor.shape:
            raise UserError(
                f"checkpoint {folder.parent} is of another model: {name} is {tuple(saved[name].size)} there "
                f"and {tuple(tensor.shape)} here"
            )
    kinds = {name.split(".")[0] for name in tensors}
    for name in sorted(saved):
        if name.split(".")[0] in kinds and name not in tensors:
            raise UserError(f"checkpoint {folder.parent} is of another model: this one has no {name}")
    with warnings.catch_warnings():  # an export reads in one process, and means it
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(dict(tensors), storage_reader=HuggingFaceStorageReader(str(folder)))


def dtypes(folder: Path) -> dict[str, torch.dtype]:
    """The precision each tensor was saved in."""
    return {name: meta.properties.dtype for name, meta in _saved(folder).items()}


def _saved(folder: Path) -> dict[str, TensorStorageMetadata]:
    metadata = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {name: meta for name, meta in metadata.items() if isinstance(meta, TensorStorageMetadata)}
