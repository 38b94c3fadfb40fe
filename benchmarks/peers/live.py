"""Count the bytes of all live tensors of an unchanged training loop.

A storage counts from the operator that allocates or first uses it until it is freed: weights, gradients, optimizer
state, activations, temporary tensors. Workspaces inside kernels and fragmentation are not counted. Counting slows a run
down, so it is disabled in runs that measure speed.
"""

import sys
import weakref
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveTensors(TorchDispatchMode):
    """Context manager: `bytes` is the current size of all tensors, and `peak` its maximum since `begin()`."""

    def __init__(self, explain: bool = False) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self.explain = explain
        self._sizes: dict[int, int] = {}  # bytes of each storage
        self._names: dict[int, str] = {}
        self._current: Counter[str] = Counter()
        self._at_peak: Counter[str] = Counter()
        self._resize = torch.UntypedStorage.resize_

    def __enter__(self) -> "LiveTensors":
        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = self._resize(storage, size)
            if storage._cdata in self._sizes:
                self._set(storage._cdata, size)
            return result

        torch.UntypedStorage.resize_ = resized  # FSDP2 frees gathered weights with it
        super().__enter__()
        return self

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)
        torch.UntypedStorage.resize_ = self._resize

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor dispatches again with its local tensors
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs, result)):
            if isinstance(tensor, torch.Tensor):
                self.add(tensor, func)
        return result

    def add(self, tensor: torch.Tensor, operator: Any = "") -> None:
        """Count the storage of a tensor, unless it is counted already."""
        if tensor.device.type == "meta" or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = 0
            self._names[key] = self._describe(tensor, operator) if self.explain else ""
            weakref.finalize(storage, self._end, key)
            self._set(key, storage.nbytes())

    def begin(self) -> None:
        """Restart the peak at the current size."""
        self.peak = self.bytes
        self._at_peak = self._current.copy()

    def largest(self, count: int) -> list[tuple[str, int]]:
        """Return descriptions and bytes of the largest tensors at the peak, if `explain` is set."""
        return self._at_peak.most_common(count)

    def _set(self, key: int, size: int) -> None:
        self.bytes += size - self._sizes[key]
        if self.explain:
            self._current[self._names[key]] += size - self._sizes[key]
        self._sizes[key] = size
        if self.bytes > self.peak:
            self.peak = self.bytes
            if self.explain:
                self._at_peak = self._current.copy()

    def _end(self, key: int) -> None:
        self._set(key, 0)
        del self._sizes[key], self._names[key]

    def _describe(self, tensor: torch.Tensor, operator: Any) -> str:
        """Return shape, dtype, operator and the two innermost lines of code outside torch."""
        frame, lines = sys._getframe(2), []
        while frame is not None and len(lines) < 2:
            file = frame.f_code.co_filename
            if ("/torch/" not in file or "/fsdp/_fully_shard/" in file) and file != __file__:
                lines.append(f"{'/'.join(Path(file).parts[-2:])}:{frame.f_lineno}")
            frame = frame.f_back  # type: ignore[assignment]
        return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} {operator} {' < '.join(lines)}"
