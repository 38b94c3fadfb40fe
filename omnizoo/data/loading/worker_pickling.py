"""Pickle objects for loader workers. Large arrays are stored in a file that all workers map into memory.

Workers are not forks of the training process, so they do not share its memory. Without the file, every worker would
have its own copy of large arrays, such as the index of a hundred million rows or the arrays of a user's row source.
"""

import io
import mmap
import pickle
import tempfile
from multiprocessing.reduction import DupFd
from types import FunctionType
from typing import IO, Any

import numpy as np
import torch
from torch import nn

from omnizoo.config.errors import named_line

LARGE = 1 << 16  # bytes; smaller arrays are part of the pickle


class NotPicklable(Exception):  # noqa: N818 (not an error: the run continues without workers)
    """Raised if an object cannot be pickled for another process. The message names the object and the reason."""


class SharedPickle:
    """A pickled copy of an object. Pass it to a new process as an argument, and call `open` there.

    Args:
        value: The object to pickle.

    Raises:
        NotPicklable: If the object cannot be pickled.
    """

    def __init__(self, value: Any) -> None:
        # The file is unnamed: the system deletes it when the last process closes it.
        self.file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self.spans: list[tuple[int, int]] = []
        pickled = io.BytesIO()
        try:
            _Pickler(pickled, self._keep_small).dump(value)
        except NotPicklable:
            raise
        except Exception as error:  # pickling runs user code, and user code may raise any exception
            raise NotPicklable(named_line(error)) from error
        self.file.flush()
        self.pickled = pickled.getvalue()

    def _keep_small(self, buffer: pickle.PickleBuffer) -> bool:
        """Write a large buffer to the file, aligned to a page. Return True to keep a small buffer in the pickle."""
        raw = buffer.raw()
        if raw.nbytes < LARGE:
            return True
        num_pages = -(-self.file.tell() // mmap.PAGESIZE)
        self.file.seek(num_pages * mmap.PAGESIZE)
        self.spans.append((self.file.tell(), raw.nbytes))
        self.file.write(raw)
        return False

    def __getstate__(self) -> tuple[bytes, list[tuple[int, int]], Any]:
        file = DupFd(self.file.fileno()) if self.spans else None
        return self.pickled, self.spans, file

    def __setstate__(self, state: tuple[bytes, list[tuple[int, int]], Any]) -> None:
        self.pickled, self.spans, file = state
        if file is not None:
            self.file = open(file.detach(), "rb")  # noqa: SIM115 (stays open as long as the value is used)

    def open(self) -> Any:
        """Unpickle the value. Its large arrays are mapped from the file."""
        mapped = memoryview(b"")
        if self.spans:
            # The mapping is copy-on-write: processes share a page until one of them writes to it.
            mapped = memoryview(mmap.mmap(self.file.fileno(), 0, access=mmap.ACCESS_COPY))
        buffers = [mapped[start : start + size] for start, size in self.spans]
        return pickle.loads(self.pickled, buffers=buffers)


class _Pickler(pickle.Pickler):
    """A pickler that passes large tensors and arrays as buffers, and pickles modules without hooks."""

    def __init__(self, file: io.BytesIO, keep_small: Any) -> None:
        super().__init__(file, protocol=5, buffer_callback=keep_small)

    def reducer_override(self, value: Any) -> Any:
        """Return the reduction of `value` for pickle, or `NotImplemented` to pickle `value` as usual."""
        if isinstance(value, type | FunctionType) and value.__module__ == "__main__":
            # A worker could only define this class or function by running the user's script again.
            raise NotPicklable(
                f"{value.__qualname__} is defined in the main script. Move it to a module that workers can import."
            )
        if _is_large(value):
            raw = value.contiguous().view(-1).view(torch.uint8).numpy()
            return _rebuild_tensor, (raw, value.dtype, tuple(value.shape))
        if type(value) is np.ndarray and value.nbytes >= LARGE and not value.flags.contiguous:
            return np.ascontiguousarray(value).__reduce_ex__(5)  # non-contiguous arrays are not pickled as buffers
        if isinstance(value, nn.Module):
            return _without_hooks(value)
        return NotImplemented


def _is_large(value: Any) -> bool:
    """Whether a value is a large dense tensor in host memory without gradients."""
    is_plain = type(value) is torch.Tensor and value.device.type == "cpu" and value.layout is torch.strided
    return is_plain and value.nbytes >= LARGE and not value.requires_grad


def _without_hooks(module: nn.Module) -> Any:
    """Return the pickle representation of a module without its hooks and without a replaced `forward`.

    Workers run no forward pass, so they need neither. Our hooks are nested functions, and nested functions cannot be
    pickled.
    """
    reduced = module.__reduce_ex__(5)
    if not isinstance(reduced, tuple) or len(reduced) < 3 or not isinstance(reduced[2], dict):
        return reduced  # the class of the module defines how it is pickled
    state = {}
    for name, part in reduced[2].items():
        is_hooks = "_hooks" in name and isinstance(part, dict)
        if name != "forward":
            state[name] = type(part)() if is_hooks else part
    return (*reduced[:2], state, *reduced[3:])


def _rebuild_tensor(raw: np.ndarray[Any, Any], dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the tensor whose bytes are in `raw`."""
    return torch.from_numpy(raw).view(dtype).view(shape)
