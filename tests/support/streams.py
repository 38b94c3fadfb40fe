"""Streams of a pretended device, and a checker for the order of the work on them.

The CPU runs every operator at once, so a missing wait never shows in numbers there. `StreamChecker` replaces the
streams of `torch.cpu`, which torch's FSDP2 uses on the CPU, and finds missing waits by vector clocks:
`stream.clock[other]` is the last operator on `other` that has certainly finished when the next one on `stream` starts.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
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
    of_collectives: "Stream | None" = None  # runs the collectives that the current stream does not wait for

    def __init__(self, *_: Any, **__: Any) -> None:
        self.clock: Counter[Stream] = Counter()
        self.freed: Counter[Stream] = Counter()  # the last uses of memory that the allocator may give to this stream

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


class AsyncWork:
    """A collective on a stream of its own, as a device's backend runs it. It keeps its tensors until it is waited for,
    as torch does."""

    def __init__(self, run: Callable[[], Any], tensors: Sequence[torch.Tensor]) -> None:
        stream = Stream()
        stream.wait_stream(Stream.current)
        with replaced((Stream, "of_collectives", stream)):
            run()
        self._event = stream.record_event()
        self._tensors = list(tensors)

    def wait(self) -> None:
        Stream.current.wait_event(self._event)
        self._tensors.clear()


def async_all_to_all(all_to_all: Callable[..., Any]) -> Callable[..., Any]:
    """Return an `all_to_all_single` that runs on a stream of its own if it is asynchronous."""

    def run(out: torch.Tensor, sent: torch.Tensor, *sizes: Any, async_op: bool = False, **options: Any) -> Any:
        start = partial(all_to_all, out, sent, *sizes, **options)
        return AsyncWork(start, [out, sent]) if async_op else start()

    return run


def async_messages(batch: Callable[[Sequence[Any]], Sequence[Any]]) -> Callable[..., Any]:
    """Return a `batch_isend_irecv` that runs on a stream of its own."""

    def run(operations: Sequence[Any]) -> list[AsyncWork]:
        def exchange() -> None:
            for work in batch(operations):
                work.wait()

        return [AsyncWork(exchange, [operation.tensor for operation in operations])]

    return run


@dataclass
class Buffer:
    allocated_on: Stream | None  # None: pinned memory of the host, whose allocator waits for all streams
    writes: Counter[Stream] = field(default_factory=Counter)  # the last operator of each stream that wrote it
    uses: Counter[Stream] = field(default_factory=Counter)  # that read or wrote it
    recorded: set[Stream] = field(default_factory=set)  # by `Tensor.record_stream`


class StreamChecker(TorchDispatchMode):
    """`races` lists operators that do not wait for the last use of their memory on another stream.

    The allocator gives freed memory to the stream that allocated it. A new buffer may therefore be any memory that was
    freed before on its stream, and its first operator must wait for the last uses of that memory.
    """

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
                (dist, "all_to_all_single", async_all_to_all(dist.all_to_all_single)),
                (dist, "batch_isend_irecv", async_messages(dist.batch_isend_irecv)),
                (torch.Tensor, "record_stream", lambda tensor, stream: self._buffer(tensor).recorded.add(stream)),
            ),
            self,
        ):
            yield
        compute_stream = self._compute_stream
        if not compute_stream.has_waited_for(compute_stream.freed):
            self.races.append("memory of the compute stream is freed while another stream may use it")

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
        if operator.startswith("c10d.") and Stream.of_collectives is not None:
            stream = Stream.of_collectives
        number = stream.enqueue()
        for tensor in leaves:
            if not isinstance(tensor, torch.Tensor) or not tensor.untyped_storage().nbytes():
                continue
            buffer = self._buffer(tensor)
            earlier = buffer.uses if id(tensor) in written else buffer.writes
            if not stream.has_waited_for(earlier):
                self.races.append(f"{operator} does not wait for another stream")
                stream.clock |= earlier  # report each missing wait once
            buffer.uses[stream] = number
            if id(tensor) in written:
                buffer.writes[stream] = number

    def _buffer(self, tensor: torch.Tensor) -> Buffer:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._buffers:
            self._buffers[storage._cdata] = self._allocated()
            weakref.finalize(storage, self._free, storage._cdata)
        return self._buffers[storage._cdata]

    def _resized(self, resize: Any) -> Any:
        def checked(storage: torch.UntypedStorage, size: int) -> Any:
            if storage._cdata in self._buffers:
                self._free(storage._cdata)
                self._buffers[storage._cdata] = self._allocated()
            return resize(storage, size)

        return checked

    def _free(self, key: int) -> None:
        buffer = self._buffers.pop(key)
        if buffer.allocated_on is not None:
            uses = Counter({stream: n for stream, n in buffer.uses.items() if stream not in buffer.recorded})
            buffer.allocated_on.freed |= uses

    def _allocated(self) -> Buffer:
        """Return a new buffer of the current stream."""
        return Buffer(Stream.current, uses=Counter(Stream.current.freed))
