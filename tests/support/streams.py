"""Streams of a pretended device, and a checker for the order of the work on them.

The CPU runs every operator at once, so a missing wait never shows in numbers there. `StreamChecker` replaces the
streams of `torch.cpu`, which torch's FSDP2 uses on the CPU, and finds missing waits by vector clocks:
`stream.clock[other]` is the last operator on `other` that has certainly finished when the next one on `stream` starts.
"""

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from omnizoo.ops.torch_private import TorchDispatchMode, replaced, tree_leaves, written_arguments


class Event:
    def __init__(self, *_: Any, **__: Any) -> None:
        self.clock: Counter[Stream] = Counter()

    def record(self, stream: "Stream | None" = None) -> "Event":
        self.clock = Counter((stream or Stream.current).clock)
        return self

    def wait(self, stream: "Stream | None" = None) -> None:
        (stream or Stream.current).wait_event(self)

    def synchronize(self) -> None:
        Stream.host |= self.clock


class Stream:
    current: "Stream"
    host: Counter["Stream"]  # operators that the host has waited for

    def __init__(self, *_: Any, **__: Any) -> None:
        self.clock: Counter[Stream] = Counter()

    def wait_event(self, event: Event) -> None:
        self.clock |= event.clock

    def wait_stream(self, stream: "Stream") -> None:
        self.clock |= stream.clock

    def record_event(self, event: Event | None = None) -> Event:
        return (event or Event()).record(self)

    def enqueue(self) -> int:
        """The number of a new operator on this stream. The host enqueues it after whatever the host has waited for."""
        self.clock |= Stream.host
        self.clock[self] += 1
        return self.clock[self]

    def has_waited_for(self, uses: Counter["Stream"]) -> bool:
        return all(stream is self or self.clock[stream] >= number for stream, number in uses.items())


@contextmanager
def use_stream(stream: Stream) -> Iterator[None]:
    before = Stream.current
    Stream.current = stream
    try:
        yield
    finally:
        Stream.current = before


@dataclass
class Buffer:
    allocated_on: Stream | None  # None: pinned memory of the host, whose allocator waits for all streams
    writes: Counter[Stream] = field(default_factory=Counter)  # the last operator of each stream that wrote it
    uses: Counter[Stream] = field(default_factory=Counter)  # that read or wrote it
    recorded: set[Stream] = field(default_factory=set)  # by `Tensor.record_stream`


class StreamChecker(TorchDispatchMode):
    """`races` lists operators that do not wait for the last use of a buffer on another stream, and buffers that are
    freed while another stream may still use them: the allocator gives such memory to the stream that allocated it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.races: list[str] = []
        self._buffers: dict[int, Buffer] = {}  # by storage
        self._compute_stream = Stream()

    @contextmanager
    def watching(self) -> Iterator[None]:
        Stream.current = self._compute_stream
        Stream.host = Counter()
        with (
            replaced(
                (torch.cpu, "Stream", Stream),
                (torch.cpu, "Event", Event),
                (torch.cpu, "stream", use_stream),
                (torch.cpu, "current_stream", lambda *_: Stream.current),
                (torch.accelerator, "current_stream", lambda *_: Stream.current),
                (torch.UntypedStorage, "resize_", self._resized(torch.UntypedStorage.resize_)),
                (torch.Tensor, "record_stream", lambda tensor, stream: self._buffer(tensor).recorded.add(stream)),
            ),
            self,
        ):
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # the operators on its local tensor follow
        kwargs = dict(kwargs or {})
        is_pinned = kwargs.pop("pin_memory", False)  # there is no memory to pin without an accelerator
        result = func(*args, **kwargs)
        if is_pinned:
            self._buffer(result).allocated_on = None
        is_kernel = not func.is_view and "empty" not in func.__name__ and func is not torch.ops.aten.detach.default
        if not is_kernel:
            for leaf in tree_leaves(result):
                self._buffer(leaf)  # notes the stream that allocates it
        else:
            written = {*map(id, written_arguments(func, args, kwargs)), *map(id, tree_leaves(result))}
            self._enqueue(str(func), [*tree_leaves((args, kwargs)), *tree_leaves(result)], written)
        return result

    def _enqueue(self, operator: str, leaves: list[Any], written: set[int]) -> None:
        stream = Stream.current
        number = stream.enqueue()
        for tensor in leaves:
            if not isinstance(tensor, torch.Tensor) or not tensor.untyped_storage().nbytes():
                continue
            buffer = self._buffer(tensor)
            earlier = buffer.uses if id(tensor) in written else buffer.writes
            if not stream.has_waited_for(earlier):
                self.races.append(f"{operator} does not wait for another stream")
            buffer.uses[stream] = number
            if id(tensor) in written:
                buffer.writes[stream] = number

    def _buffer(self, tensor: torch.Tensor) -> Buffer:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._buffers:
            self._buffers[storage._cdata] = Buffer(Stream.current)
            weakref.finalize(storage, self._free, storage._cdata)
        return self._buffers[storage._cdata]

    def _resized(self, resize: Any) -> Any:
        def checked(storage: torch.UntypedStorage, size: int) -> Any:
            if storage._cdata in self._buffers:
                self._free(storage._cdata)
                self._buffers[storage._cdata] = Buffer(Stream.current)
            return resize(storage, size)

        return checked

    def _free(self, key: int) -> None:
        buffer = self._buffers.pop(key)
        uses = Counter({stream: n for stream, n in buffer.uses.items() if stream not in buffer.recorded})
        if buffer.allocated_on is not None and not buffer.allocated_on.has_waited_for(uses):
            self.races.append("a buffer is freed while another stream may use it")
