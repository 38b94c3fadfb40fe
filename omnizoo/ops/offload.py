"""Memory of the host for what the device does not need at once.

Activations: what a block keeps for backward leaves the device after forward, and comes back one block ahead of its
turn. The optimizer's state is away while a step goes forward and backward.

Copies go by a stream of their own, through pinned memory, so that the device computes meanwhile. Weights stay, and so
does whatever is small. Where the device is the host itself the same code makes plain copies, which tests compare with.
"""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

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
        self.refill(kept, tensor)
        return kept

    def give(self, kept: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """A copy on the device, and the event to wait for before it is used."""
        tensor = torch.empty_like(kept, device=self.device, pin_memory=False)
        if self._module is None:
            return tensor.copy_(kept), None
        with self._aside():
            tensor.copy_(kept, non_blocking=True)
            return tensor, self._stream.record_event()

    def refill(self, kept: torch.Tensor, tensor: torch.Tensor) -> None:
        """`take` into memory of the host that is there already."""
        if self._module is None:
            kept.copy_(tensor)
            return
        with self._aside():
            kept.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._stream)  # its memory is not given away before the copy is complete

    def put_back(self, kept: torch.Tensor, tensor: torch.Tensor) -> None:
        tensor.copy_(kept, non_blocking=True)  # in the order of the work: what comes next finds it

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


class StateAway:
    """Tensors that leave the device for a while, the same ones every step, and come back into their own places."""

    def __init__(self, device: torch.device, ranks: int) -> None:
        self.host: Any = Host(device)
        self.ranks = ranks  # on this node
        self.least = 0 if is_host(device) else LEAST
        self._kept = WeakTensorKeyDictionary()
        self._away: list[torch.Tensor] = []

    def leave(self, tensors: Sequence[torch.Tensor]) -> None:
        """Free what `tensors` take on the device, once it is on the host. None of them may be looked at meanwhile."""
        tensors = [tensor for tensor in tensors if self._is_movable(tensor)]
        new = sum(tensor.nbytes for tensor in tensors if tensor not in self._kept) * self.ranks
        if new > (there := available_memory()):
            raise UserError(
                f"parallel.offload: the optimizer's state of {self.ranks} rank(s) takes {new / 2**30:,.3g} GiB on the "
                f"host, which has {there / 2**30:,.3g} GiB left: leave `optimizer` out, or share the model among more "
                "nodes (parallel.dp_shard)"
            )
        for tensor in tensors:
            if tensor in self._kept:
                self.host.refill(self._kept[tensor], tensor)
            else:
                self._kept[tensor] = self.host.take(tensor)
            tensor.untyped_storage().resize_(0)
            self._away.append(tensor)

    def come_back(self) -> None:
        while self._away:
            tensor = self._away.pop()
            tensor.untyped_storage().resize_(tensor.nbytes)
            self.host.put_back(self._kept[tensor], tensor)

    def _is_movable(self, tensor: torch.Tensor) -> bool:
        """One with memory of its own, and of a size that is worth it."""
        fits = tensor.device == self.host.device and tensor.ndim > 0 and tensor.nbytes >= max(1, self.least)
        return fits and tensor.untyped_storage().nbytes() == tensor.nbytes


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
