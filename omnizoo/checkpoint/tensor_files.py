"""Write and read sharded tensors with torch's distributed checkpoint (DCP).

Files are in the safetensors format, so reading them needs no unpickling. Names are flat: `model.<parameter>`,
`optimizer.<parameter>.<state>` and `ema.<parameter>`. Files that one layout wrote can be read by any other.
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
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from omnizoo.checkpoint.manifest import File
from omnizoo.checkpoint.tensor_writer import StreamingWriter
from omnizoo.config.errors import UserError
from omnizoo.models.adapters.lora import attached
from omnizoo.parallel.fsdp.sharded_tensors import local_shard, with_local

# Prefixes of tensor names.
MODEL = "model."
OPTIMIZER = "optimizer."
AVERAGE = "ema."


def model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters (tied ones once) and persistent buffers, by their names in a checkpoint.

    For a model with an adapter, only trained parameters are included, because the base does not change. All buffers are
    included, because some of them change during training.
    """
    persistent = set(model.state_dict())
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if name in persistent]
    adapter = attached(model)
    parameters = [(name, p) for name, p in model.named_parameters() if adapter is None or name in adapter.trained]
    return {MODEL + name: tensor.detach() for name, tensor in [*parameters, *buffers]}


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return the moments, step count and moving average of every trained parameter, by their names in a checkpoint.

    Before the first step, missing state is created and filled with zeros.
    """
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if any(not optimizer.state.get(p) for p in parameters.values()):
        _create_state(optimizer)

    tensors = {}
    for name, p in parameters.items():
        for key, value in optimizer.state[p].items():
            tensors[f"{OPTIMIZER}{name}.{key}"] = value
    average = getattr(optimizer, "average", {})
    for name, p in parameters.items():
        if p in average:
            tensors[f"{AVERAGE}{name}"] = average[p]
    return tensors


def _create_state(optimizer: torch.optim.Optimizer) -> None:
    """Create missing optimizer state with a step that changes no weights.

    Gradients and learning rates are 0 in this step.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    all_parameters = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [p.grad for p in all_parameters]
    parameters = [p for p in all_parameters if not optimizer.state.get(p)]
    for p in all_parameters:
        p.grad = None
    for p in parameters:
        p.grad = torch.zeros_like(p)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for p, gradient in zip(all_parameters, gradients, strict=True):
        p.grad = gradient
    for p in parameters:
        for value in optimizer.state[p].values():
            if _is_quantized(value):
                local_shard(value).copy_(torch.zeros(local_shard(value).shape, dtype=torch.float32))
            else:
                value.zero_()


@torch.no_grad()
def begin_average(optimizer: torch.optim.Optimizer) -> None:
    """Set the moving average, if any, to the current weights. They were loaded after the average was created."""
    for parameter, average in getattr(optimizer, "average", {}).items():
        average.copy_(parameter)


def write(tensors: dict[str, torch.Tensor], folder: Path) -> dict[str, File]:
    """Write the local shards of every rank. Collective: all ranks must call it. Errors are raised on all ranks.

    Returns:
        The size and hash of each file of this rank, by name. Hashes are computed from the bytes in memory. Files are
        not read back, so damage by the disk is detected only when they are loaded.
    """

    def resolve(name: str, local: torch.Tensor) -> torch.Tensor:
        is_placeholder = _is_quantized(tensors[name])
        return _dequantize(tensors[name]) if is_placeholder else local

    writer = StreamingWriter(str(folder), resolve)
    writer.fs = files = _HashingFiles()
    dcp.save({name: _on_disk(tensor) for name, tensor in tensors.items()}, storage_writer=writer)
    for tensor in tensors.values():
        if _is_quantized(tensor):
            # Quantizing again may round differently, and this process must stay bitwise identical to one that resumes.
            local_shard(tensor).copy_(_dequantize(tensor))
    return files.written


class _HashingFiles(FileSystem):
    """File system for DCP's writer. It records the size and hash of each file, and flushes each file with fsync."""

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
    """The file methods that DCP uses to write safetensors. Data is written sequentially, in any number of chunks."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.bytes = 0
        self.digest = xxhash.xxh3_128()

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
    """Load values into `tensors`, in place. Collective if torch.distributed is initialized: all ranks must call it.

    Names and shapes are checked first, because a failed load would leave some tensors overwritten.

    Raises:
        UserError: If the names or shapes in the checkpoint differ from `tensors`.
    """
    saved = _saved(folder)
    for name, tensor in sorted(tensors.items()):
        if name not in saved:
            raise UserError(
                f"{folder.parent}: {name} is missing. The checkpoint was written with another {_section_of(name)}. "
                "Restore it, or choose another checkpoint."
            )
        saved_shape = tuple(saved[name].size)
        if saved_shape != tuple(tensor.shape):
            raise UserError(
                f"{folder.parent}: {name} has shape {saved_shape}, but this run has {tuple(tensor.shape)}. The "
                f"checkpoint was written with another {_section_of(name)}. Restore it, or choose another checkpoint."
            )
    kinds = {name.split(".")[0] for name in tensors}
    for name in sorted(saved):
        if name.split(".")[0] in kinds and name not in tensors:
            raise UserError(
                f"{folder.parent}: {name} does not exist in this run. The checkpoint was written with another "
                f"{_section_of(name)}. Restore it, or choose another checkpoint."
            )
    with warnings.catch_warnings():  # an export reads in a single process on purpose
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        plain = {name: _to_fill(tensor) for name, tensor in tensors.items()}
        dcp.load(plain, storage_reader=HuggingFaceStorageReader(str(folder)))
    for name, tensor in tensors.items():
        if _is_quantized(tensor):
            local_shard(tensor).copy_(local_shard(plain[name]))


def _is_quantized(tensor: torch.Tensor) -> bool:
    """Whether the tensor is torchao's 8-bit optimizer state. Its quantization blocks depend on the local shard."""
    return hasattr(local_shard(tensor), "codes")


def _dequantize(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local shard of a quantized tensor in float32."""
    return local_shard(tensor).dequantize().float()


def _on_disk(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor as described in a checkpoint. Any layout can load it, because it is not quantized.

    For a quantized tensor this is a placeholder without data.
    """
    if not _is_quantized(tensor):
        return tensor
    return with_local(tensor, torch.empty(local_shard(tensor).shape, dtype=torch.float32, device="meta"))


def _to_fill(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that DCP fills: `tensor`, or a float32 tensor if `tensor` is quantized."""
    return with_local(tensor, _dequantize(tensor)) if _is_quantized(tensor) else tensor


def _section_of(name: str) -> str:
    """Return where the shape of a tensor comes from, the model or the optimizer, for error messages."""
    return "model" if name.startswith(MODEL) else "`optimizer` section"


def on_meta(folder: Path) -> dict[str, torch.Tensor]:
    """Return the saved tensors on the meta device, with their shapes and dtypes but no data."""
    return {
        name: torch.empty(meta.size, dtype=meta.properties.dtype, device="meta")
        for name, meta in _saved(folder).items()
    }


def _saved(folder: Path) -> dict[str, TensorStorageMetadata]:
    """Return the shape and dtype of every saved tensor, by name."""
    metadata = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {name: meta for name, meta in metadata.items() if isinstance(meta, TensorStorageMetadata)}
