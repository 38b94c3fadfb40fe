"""Counts the bytes of all tensors that are alive: what an allocator would be asked for.

Every storage that an operator takes or gives is seen, and its end. Workspaces inside kernels are not. It slows a run
down, so it is not on where speed is measured.
"""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Live(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self._sizes: dict[int, int] = {}  # by storage
        self._resize = torch.UntypedStorage.resize_
        torch.UntypedStorage.resize_ = self._resized  # how FSDP2 frees what it has gathered

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, result)):
            if isinstance(leaf, torch.Tensor):
                self.see(leaf)
        return result

    def see(self, tensor: torch.Tensor) -> None:
        if hasattr(tensor, "_local_tensor"):  # of a DTensor
            tensor = tensor._local_tensor
        if tensor.is_meta or type(tensor).__name__ == "FakeTensor":
            return
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # sparse ones and wrappers have none
            return
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = 0
            weakref.finalize(storage, self._end, key)
        self._set(key, storage.nbytes())

    def begin(self) -> None:
        """Look for the peak from now on."""
        self.peak = self.bytes

    def _set(self, key: int, size: int) -> None:
        self.bytes += size - self._sizes[key]
        self._sizes[key] = size
        self.peak = max(self.peak, self.bytes)

    def _end(self, key: int) -> None:
        self.bytes -= self._sizes.pop(key)

    @property
    def _resized(self) -> Any:
        live = self

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = live._resize(storage, size)
            if storage._cdata in live._sizes:
                live._set(storage._cdata, storage.nbytes())
            return result

        return resize
