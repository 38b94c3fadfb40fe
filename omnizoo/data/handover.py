"""What loader workers are given: a copy by pickle, with large arrays in a file that all workers map.

Workers are no forks of the training process, so nothing of its memory is theirs. An index of a hundred million rows, or
a user's own arrays, would otherwise be there once for every worker.
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

LARGE = 1 << 16  # bytes; below it, an array travels with the rest


class NotPicklable(Exception):  # noqa: N818 (no error: the run goes on without workers)
    """Something that no other process can be given; the message says what and why."""


class Handover:
    """A copy of `value`. Given to a process as it starts; `open` there makes the value again."""

    def __init__(self, value: Any) -> None:
        # Without a name: it goes with the last process that has it open.
        self.file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self.spans: list[tuple[int, int]] = []
        pickled = io.BytesIO()
        try:
            _Pickler(pickled, self._keep_small).dump(value)
        except NotPicklable:
            raise
        except Exception as error:  # whatever the code of a user's class raises
            raise NotPicklable(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}") from error
        self.file.flush()
        self.pickled = pickled.getvalue()

    def _keep_small(self, buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < LARGE:
            return True
        self.file.seek(-(-self.file.tell() // mmap.PAGESIZE) * mmap.PAGESIZE)
        self.spans.append((self.file.tell(), raw.nbytes))
        self.file.write(raw)
        return False

    def __getstate__(self) -> tuple[bytes, list[tuple[int, int]], Any]:
        return self.pickled, self.spans, DupFd(self.file.fileno()) if self.spans else None

    def __setstate__(self, state: tuple[bytes, list[tuple[int, int]], Any]) -> None:
        self.pickled, self.spans, file = state
        if file is not None:
            self.file = open(file.detach(), "rb")  # noqa: SIM115 (as long as the value is used)

    def open(self) -> Any:
        # a private mapping: pages are shared until somebody writes into one
        mapped = (
            memoryview(mmap.mmap(self.file.fileno(), 0, access=mmap.ACCESS_COPY)) if self.spans else memoryview(b"")
        )
        return pickle.loads(self.pickled, buffers=[mapped[start : start + size] for start, size in self.spans])


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, keep_small: Any) -> None:
        super().__init__(file, protocol=5, buffer_callback=keep_small)

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, type | FunctionType) and value.__module__ == "__main__":
            # Its process would have to run the user's script once more to know it.
            raise NotPicklable(f"{value.__qualname__} is defined in the script that was started, not in a module")
        if _is_large(value):
            raw = value.contiguous().view(-1).view(torch.uint8).numpy()
            return _tensor, (raw, value.dtype, tuple(value.shape))
        if type(value) is np.ndarray and value.nbytes >= LARGE and not value.flags.contiguous:
            return np.ascontiguousarray(value).__reduce_ex__(5)  # as it is, it would travel with the rest
        if isinstance(value, nn.Module):
            return _without_hooks(value)
        return NotImplemented


def _is_large(value: Any) -> bool:
    is_plain = type(value) is torch.Tensor and value.device.type == "cpu" and value.layout is torch.strided
    return is_plain and value.nbytes >= LARGE and not value.requires_grad


def _without_hooks(module: nn.Module) -> Any:
    """Hooks, and a forward of the instance's own, are about forward passes, of which workers make none. Ours are
    functions inside of functions, which no other process can be given."""
    reduced = module.__reduce_ex__(5)
    if not isinstance(reduced, tuple) or len(reduced) < 3 or not isinstance(reduced[2], dict):
        return reduced  # its own way
    state = {
        name: type(part)() if "_hooks" in name and isinstance(part, dict) else part
        for name, part in reduced[2].items()
        if name != "forward"
    }
    return (*reduced[:2], state, *reduced[3:])


def _tensor(raw: np.ndarray[Any, Any], dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(raw).view(dtype).view(shape)
