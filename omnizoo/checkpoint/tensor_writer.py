"""Write the tensors of a rank to a safetensors file one after the other, so that saving needs little host memory.

torch's `HuggingFaceStorageWriter` first copies all tensors of the rank to the host, and then builds the whole file in
memory. This writer computes the header from shapes and dtypes, and then copies and writes one tensor at a time.
"""

import json
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

# Names of dtypes in the safetensors format.
DTYPE_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
}
HEADER_ALIGNMENT = 8  # bytes; the safetensors library pads its headers in the same way
# Metadata key under which DCP's reader finds the offsets of each shard in its full tensor.
SHARDING_KEY = "DCP_SHARDING_INFO"


class StreamingWriter(HuggingFaceStorageWriter):
    """DCP storage writer. It writes one safetensors file per rank, and copies one tensor at a time to the host.

    Args:
        folder: Folder of the files.
        resolve: Returns the values to write for a name and the planner's tensor.
    """

    def __init__(self, folder: str, resolve: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
        super().__init__(folder, save_distributed=True)
        self._resolve = resolve

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the tensors in `plan`. Called by DCP on every rank."""
        results: list[WriteResult] = []
        if plan.items:
            file_name = f"shard-{plan.storage_data['shard_index']:05d}-model-00001-of-00001.safetensors"
            # The safetensors format requires aligned tensors, so the tensors with the widest elements come first.
            items = sorted(plan.items, key=lambda item: (-_dtype(item).itemsize, item.index.fqn))
            with self.fs.create_stream(self.fs.concat_path(self.path, file_name), "wb") as stream:
                stream.write(_header(items))
                for item in items:
                    planned = planner.resolve_data(item)
                    assert isinstance(planned, torch.Tensor)
                    values = self._resolve(item.index.fqn, planned)
                    results.append(_write(stream, item, values))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future


def _dtype(item: WriteItem) -> torch.dtype:
    """Return the dtype of a tensor in the plan."""
    assert item.tensor_data is not None  # all items are tensors
    return item.tensor_data.properties.dtype


def _num_bytes(item: WriteItem) -> int:
    """Return the size of the part of a tensor that this rank writes."""
    assert item.tensor_data is not None
    return item.tensor_data.chunk.sizes.numel() * _dtype(item).itemsize


def _header(items: list[WriteItem]) -> bytes:
    """Return the first bytes of a safetensors file: the length of the JSON header, and the header."""
    offsets: dict[str, dict[str, Any]] = {}
    header: dict[str, Any] = {}
    end = 0
    for item in items:
        name = item.index.fqn
        assert item.tensor_data is not None
        if name in header:
            raise RuntimeError(f"{name}: this rank has several parts of this tensor. A file can contain only one.")
        begin, end = end, end + _num_bytes(item)
        header[name] = {
            "dtype": DTYPE_NAMES[_dtype(item)],
            "shape": list(item.tensor_data.chunk.sizes),
            "data_offsets": [begin, end],
        }
        offsets[name] = {"saved_offsets": item.tensor_data.chunk.offsets}
    header["__metadata__"] = {
        SHARDING_KEY: json.dumps(offsets),
        "format": "pt",
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % HEADER_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _write(stream: Any, item: WriteItem, values: torch.Tensor) -> WriteResult:
    """Write the values of one tensor."""
    on_host = values.detach().to("cpu").contiguous()
    num_bytes = _num_bytes(item)
    if on_host.dtype != _dtype(item) or on_host.numel() * on_host.itemsize != num_bytes:
        raise RuntimeError(f"{item.index.fqn}: dtype or size changed while the checkpoint was written.")
    if num_bytes:
        stream.write(on_host.reshape(-1).view(torch.uint8).numpy().data)
    return WriteResult(index=item.index, size_in_bytes=num_bytes, storage_data=None)
