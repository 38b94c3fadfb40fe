"""Activations on the host: what a block keeps for backward leaves the device after forward, and comes back one block
ahead of its turn.

Copies go by a stream of their own, through pinned memory, so that the device computes meanwhile. Weights stay, and so
does whatever is small. Where the device is the host itself the same code makes plain copies, which tests compare with.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from omnizoo.config.errors import UserError
from omnizoo.ops.device import available_memory, is_host

LEAST = 2**18  # bytes; a copy of less takes as long as its launch


class Host:
    """Memory of the host, and the way there and back."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module: Any = None if is_host(device) else torch.get_device_module(device)
        self._stream: Any = None

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy on the host; it may be still on its way."""
        kept = torch.empty_like(tensor, device="cpu", pin_memory=self._module is not None)
        if self._module is None:
            return kept.copy_(tensor)
        with self._aside():
            kept.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._stream)  # its memory is not given away before the copy is complete
        return kept

    def give(self, kept: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """A copy on the device, and the event to wait for before it is used."""
        tensor = torch.empty_like(kept, device=self.device, pin_memory=False)
        if self._module is None:
            return tensor.copy_(kept), None
        with self._aside():
            tensor.copy_(kept, non_blocking=True)
            return tensor, self._stream.record_event()

    def wait(self, event: Any) -> None:
        if event is not None:
            self._module.current_stream().wait_event(event)

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """After what the device has been given so far, and beside what comes next."""
        if self._stream is None:
            self._stream = self._module.Stream()
        self._stream.wait_stream(self._module.current_stream())
        with self._module.stream(self._stream):
            yield


class Kept:
    """One tensor that is on the host."""

    def __init__(self, host: Host, tensor: torch.Tensor) -> None:
        self._host, self._kept = host, host.take(tensor)
        self._back: tuple[torch.Tensor, Any] | None = None

    def fetch(self) -> None:
        if self._back is None:
            self._back = self._host.give(self._kept)

    def tensor(self) -> torch.Tensor:
        self.fetch()
        assert self._back is not None
        tensor, event = self._back
        self._host.wait(event)
        self._back = tensor, None
        return tensor


class Shelf:
    """What one block has kept in one forward pass."""

    def __init__(self, before: "Shelf | None") -> None:
        self.items: dict[Any, tuple[weakref.ref[Kept], weakref.ref[torch.UntypedStorage]]] = {}
        self.before = None if before is None else weakref.ref(before)
        self.bytes = 0

    def fetch(self) -> None:
        for kept, _ in self.items.values():
            if (item := kept()) is not None:
                item.fetch()

    def put(self, tensor: torch.Tensor, host: Host) -> Kept:
        """Tensors that several operators have saved are there once."""
        storage = tensor.untyped_storage()
        key = (_storage(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version)
        known, same = self.items.get(key, (None, None))
        item = known() if known is not None and same is not None and same() is storage else None
        if item is None:  # or its memory has been freed, and belongs to another by now
            item = Kept(host, tensor)
            self.items[key] = weakref.ref(item), weakref.ref(storage)
            self.bytes += tensor.nbytes
        return item


class Offload:
    """Around the forward pass of each block: `with offload.moving(block): ...`"""

    def __init__(self, device: torch.device, blocks: int, ranks: int) -> None:
        self.host: Any = Host(device)
        self.blocks, self.ranks = blocks, ranks  # of the model; on this node
        self.least = 0 if is_host(device) else LEAST
        self._last: Shelf | None = None
        self._is_checked = False

    @contextmanager
    def moving(self, block: nn.Module) -> Iterator[None]:
        if not torch.is_grad_enabled():
            yield
            return
        shelf = Shelf(self._last)

        def pack(tensor: torch.Tensor) -> Any:
            is_view_of_more = tensor.nbytes > tensor.untyped_storage().nbytes()  # one that is expanded
            if tensor.device != self.host.device or tensor.nbytes < self.least or is_view_of_more:
                return tensor
            # Asked each time: experts inside of a block are gathered when it comes to them.
            if _storage(tensor) in {_storage(getattr(p, "_local_tensor", p)) for p in block.parameters()}:
                return tensor
            return shelf.put(tensor, self.host), shelf  # saved tensors hold the shelf, nobody else does

        def unpack(packed: Any) -> torch.Tensor:
            if isinstance(packed, torch.Tensor):
                return packed
            item, own = packed
            own.fetch()
            if own.before is not None and (before := own.before()) is not None:
                before.fetch()
            tensor: torch.Tensor = item.tensor()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
        self._last = shelf
        self._check(shelf)

    def _check(self, shelf: Shelf) -> None:
        """By the first block that moves anything: would all of them fit?"""
        if self._is_checked or not shelf.bytes:
            return
        self._is_checked = True
        wanted, there = shelf.bytes * (self.blocks - 1) * self.ranks, available_memory()
        if wanted > there:
            raise UserError(
                f"parallel.offload: activations of {self.blocks} blocks x {self.ranks} rank(s) take about "
                f"{(wanted + shelf.bytes * self.ranks) / 2**30:,.3g} GiB on the host, which has {there / 2**30:,.3g} "
                "GiB left: recompute more (parallel.recompute: full), or lower data.pack_tokens"
            )


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
