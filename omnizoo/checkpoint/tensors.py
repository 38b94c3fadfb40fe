"""Sharded tensors on disk: torch's distributed checkpoint (DCP) over safetensors, so nothing is ever unpickled.

Names are flat: `model.<parameter>`, `optimizer.<parameter>.<state>` and `ema.<parameter>`; any layout reads what any
other wrote.
"""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import xxhash
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from omnizoo.checkpoint.manifest import File
from omnizoo.config.errors import UserError
from omnizoo.models.adapter import attached
from omnizoo.parallel.shard import local_of, with_local

MODEL, OPTIMIZER, AVERAGE = "model.", "optimizer.", "ema."


def model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters (tied ones once) and persistent buffers, under their names in a checkpoint.

    Of a model with an adapter, what is trained: its base is there already, and stays as it is. Not so its buffers, some
    of which change in training.
    """
    persistent = set(model.state_dict())
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if name in persistent]
    adapter = attached(model)
    parameters = [(name, p) for name, p in model.named_parameters() if adapter is None or name in adapter.trained]
    return {MODEL + name: tensor.detach() for name, tensor in [*parameters, *buffers]}


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
            if _is_quantised(value):
                local_of(value).copy_(torch.zeros(local_of(value).shape, dtype=torch.float32))
            else:
                value.zero_()


@torch.no_grad()
def begin_average(optimizer: torch.optim.Optimizer) -> None:
    """Start the average of weights, if there is one, at what the weights are now: they came after the optimizer."""
    for parameter, average in getattr(optimizer, "average", {}).items():
        average.copy_(parameter)


def write(tensors: dict[str, torch.Tensor], folder: Path) -> dict[str, File]:
    """Every rank writes its own shards; a failure on one rank is an exception on all.

    Returns size and hash of the files of this rank, by name: of the bytes that were meant to be written, so that what
    a disk does to them later is found, and nothing is read back.
    """
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    writer.fs = files = _HashingFiles()
    plain = {name: _plain(tensor) for name, tensor in tensors.items()}
    _fill_quantised(tensors, plain)
    dcp.save(plain, storage_writer=writer)
    return files.written


class _HashingFiles(FileSystem):
    """The file system of DCP's writer, which notes what goes into each file, and brings it to the disk."""

    def __init__(self) -> None:
        self.written: dict[str, File] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as stream:
            hashing = _HashingStream(stream)
            yield hashing
            hashing.close()
        self.written[Path(path).name] = File(hashing.bytes, hashing.digest.hexdigest())


class _HashingStream:
    """As much of a file as DCP uses to write safetensors: from the start to the end, in any number of pieces."""

    def __init__(self, stream: Any) -> None:
        self._stream, self.bytes, self.digest = stream, 0, xxhash.xxh3_128()

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        self.bytes += len(data)
        return int(self._stream.write(data))

    def tell(self) -> int:
        return int(self._stream.tell())

    def flush(self) -> None:
        self._stream.flush()

    def fileno(self) -> int:
        return int(self._stream.fileno())

    def close(self) -> None:
        if not self._stream.closed:
            self._stream.flush()
            os.fsync(self._stream.fileno())
            self._stream.close()


def read(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Fill `tensors` in place. Names and shapes are compared first: a failed load would leave them half overwritten."""
    saved = _saved(folder)
    for name, tensor in sorted(tensors.items()):
        if name not in saved:
            raise UserError(f"checkpoint {folder.parent} is of another {_whose(name)}: it has no {name}")
        if saved[name].size != tensor.shape:
            raise UserError(
                f"checkpoint {folder.parent} is of another {_whose(name)}: {name} is {tuple(saved[name].size)} there "
                f"and {tuple(tensor.shape)} here"
            )
    kinds = {name.split(".")[0] for name in tensors}
    for name in sorted(saved):
        if name.split(".")[0] in kinds and name not in tensors:
            raise UserError(f"checkpoint {folder.parent} is of another {_whose(name)}: this one has no {name}")
    with warnings.catch_warnings():  # an export reads in one process, and means it
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        plain = {name: _plain(tensor) for name, tensor in tensors.items()}
        dcp.load(plain, storage_reader=HuggingFaceStorageReader(str(folder)))
    _fill_quantised(tensors, plain)


def _is_quantised(tensor: torch.Tensor) -> bool:
    """True for torchao's 8-bit state, whose blocks are of one rank's shard."""
    return hasattr(local_of(tensor), "codes")


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """What a checkpoint holds: quantised tensors as their values, so that any layout can read them."""
    if not _is_quantised(tensor):
        return tensor
    return with_local(tensor, local_of(tensor).dequantize().float())


def _fill_quantised(tensors: dict[str, torch.Tensor], plain: dict[str, torch.Tensor]) -> None:
    """Quantise the plain values again. After a save as well: values may round anew, and the run that goes on must be
    bit for bit the one that is resumed."""
    for name, tensor in tensors.items():
        if _is_quantised(tensor):
            local_of(tensor).copy_(local_of(plain[name]))


def _whose(name: str) -> str:
    """What a tensor tells about the run it is from."""
    return "model" if name.startswith(MODEL) else "`optimizer` section"


def on_meta(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors that were saved, on meta: their shapes, and the precision of each."""
    return {
        name: torch.empty(meta.size, dtype=meta.properties.dtype, device="meta")
        for name, meta in _saved(folder).items()
    }


def _saved(folder: Path) -> dict[str, TensorStorageMetadata]:
    metadata = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {name: meta for name, meta in metadata.items() if isinstance(meta, TensorStorageMetadata)}
