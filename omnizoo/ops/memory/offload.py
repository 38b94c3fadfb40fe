"""CPU offload of activations and of optimizer state.

Activations that a block saves for backward are copied to host memory in the forward pass, and are prefetched one block
early in the backward pass. Optimizer state is in host memory during the forward and backward passes of a step.

Copies use pinned memory and a separate stream, so that they overlap with computation. Weights and small tensors stay on
the device. On CPUs the same code makes plain copies, which tests use as a reference.
"""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from omnizoo.config.errors import UserError
from omnizoo.ops.device import available_memory, is_host
from omnizoo.ops.torch_private import storage_key

MIN_BYTES = 2**18  # smaller tensors are not offloaded, because launching the copy takes as long as the copy itself


@dataclass
class DeviceCopy:
    """A tensor on the device, to which the copy stream may still be writing."""

    tensor: torch.Tensor
    event: Any = None  # recorded when the copy is complete; None if no wait is needed
    stream: Any = None  # the compute stream, which allocated `tensor`

    def wait(self) -> None:
        """Make the compute stream wait for the copy."""
        if self.event is not None:
            self.stream.wait_event(self.event)
            self.event = None


class HostBuffers:
    """Copies tensors between the device and host memory on a separate stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module: Any = None if is_host(device) else torch.get_device_module(device)
        self._stream: Any = None

    def copy_to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Start a copy to host memory and return it. The copy may still be in progress."""
        host_tensor = torch.empty_like(tensor, device="cpu", pin_memory=self._module is not None)
        self.refill(host_tensor, tensor)
        return host_tensor

    def copy_to_device(self, host_tensor: torch.Tensor) -> DeviceCopy:
        """Start a copy to the device. Call `DeviceCopy.wait` before the copy is used, and before it is freed."""
        tensor = torch.empty_like(host_tensor, device=self.device, pin_memory=False)
        if self._module is None:
            return DeviceCopy(tensor.copy_(host_tensor))
        compute_stream = self._module.current_stream()
        with self._side_stream():  # the stream of `refill`, so this copy runs after the one that fills `host_tensor`
            tensor.copy_(host_tensor, non_blocking=True)
            return DeviceCopy(tensor, self._stream.record_event(), compute_stream)

    def refill(self, host_tensor: torch.Tensor, tensor: torch.Tensor) -> None:
        """Copy `tensor` into the existing host tensor `host_tensor`."""
        if self._module is None:
            host_tensor.copy_(tensor)
            return
        with self._side_stream():
            host_tensor.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._stream)  # prevents reuse of the tensor's memory before the copy is complete

    def put_back(self, host_tensor: torch.Tensor, tensor: torch.Tensor) -> None:
        """Copy `host_tensor` into `tensor` on the compute stream. All later uses of `tensor` run on the same stream."""
        if self._module is not None:
            # The copy stream fills `host_tensor` in `refill`. The compute stream has not waited for this copy yet.
            self._module.current_stream().wait_stream(self._stream)
        tensor.copy_(host_tensor, non_blocking=True)

    @contextmanager
    def _side_stream(self) -> Iterator[None]:
        """Context manager: run copies on the copy stream, after all earlier work and in parallel with later work."""
        if self._stream is None:
            self._stream = self._module.Stream()
        self._stream.wait_stream(self._module.current_stream())
        with self._module.stream(self._stream):
            yield


class OffloadedTensor:
    """One tensor in host memory."""

    def __init__(self, host: HostBuffers, tensor: torch.Tensor) -> None:
        self._copy: DeviceCopy | None = None
        self._host = host
        self._host_tensor = host.copy_to_host(tensor)

    def fetch(self) -> None:
        """Start the copy to the device, unless it was started before."""
        if self._copy is None:
            self._copy = self._host.copy_to_device(self._host_tensor)

    def tensor(self) -> torch.Tensor:
        """Return the tensor on the device. The compute stream waits for the copy."""
        self.fetch()
        assert self._copy is not None
        self._copy.wait()
        return self._copy.tensor

    def __del__(self) -> None:
        # Backward may end before it uses a fetched tensor. The allocator then gives its memory to the compute stream,
        # which must wait until the copy stream has finished writing. `record_stream` would also be correct, but would
        # always delay the reuse of memory while the host runs ahead of the device.
        if self._copy is not None:
            self._copy.wait()


class BlockActivations:
    """The offloaded activations of one block in one forward pass."""

    def __init__(self, previous: "BlockActivations | None") -> None:
        self.items: dict[Any, tuple[weakref.ref[OffloadedTensor], weakref.ref[torch.UntypedStorage]]] = {}
        self.previous = None if previous is None else weakref.ref(previous)  # activations of the block before this one
        self.bytes = 0

    def fetch(self) -> None:
        """Start the copies of all activations to the device."""
        for reference, _ in self.items.values():
            item = reference()
            if item is not None:
                item.fetch()

    def put(self, tensor: torch.Tensor, host: HostBuffers) -> OffloadedTensor:
        """Offload a tensor. A tensor that several operators save is offloaded once."""
        storage = tensor.untyped_storage()
        key = (
            storage_key(tensor),
            tensor.storage_offset(),
            tensor.shape,
            tensor.stride(),
            tensor.dtype,
            tensor._version,
        )
        item = None
        if key in self.items:
            offloaded, offloaded_storage = self.items[key]
            if offloaded_storage() is storage:
                item = offloaded()
        if item is None:  # the tensor is new, or has the address of a freed tensor
            item = OffloadedTensor(host, tensor)
            self.items[key] = weakref.ref(item), weakref.ref(storage)
            self.bytes += tensor.nbytes
        return item


class Offload:
    """Offload of activations. Wrap the forward pass of each block in `with offload.offload_saved(block)`."""

    def __init__(self, device: torch.device, blocks: int, ranks: int) -> None:
        self.host: Any = HostBuffers(device)
        self.blocks = blocks  # number of blocks of the model
        self.ranks = ranks  # number of ranks on this node
        self.min_bytes = 0 if is_host(device) else MIN_BYTES
        self._last: BlockActivations | None = None
        self._is_checked = False

    @contextmanager
    def offload_saved(self, block: nn.Module) -> Iterator[None]:
        """Context manager: offload the tensors that `block` saves for backward, except weights and small tensors."""
        if not torch.is_grad_enabled():
            yield
            return
        activations = BlockActivations(self._last)

        def pack(tensor: torch.Tensor) -> Any:
            is_expanded = tensor.nbytes > tensor.untyped_storage().nbytes()
            if tensor.device != self.host.device or tensor.nbytes < self.min_bytes or is_expanded:
                return tensor
            # Compute this for each tensor, because the experts of a block are gathered during the forward pass of the
            # block.
            weight_keys = {storage_key(getattr(p, "_local_tensor", p)) for p in block.parameters()}
            if storage_key(tensor) in weight_keys:
                return tensor
            return activations.put(tensor, self.host), activations  # only saved tensors keep `activations` alive

        def unpack(packed: Any) -> torch.Tensor:
            if isinstance(packed, torch.Tensor):
                return packed
            item, block_activations = packed
            block_activations.fetch()
            previous = None
            if block_activations.previous is not None:
                previous = block_activations.previous()
            if previous is not None:
                previous.fetch()
            tensor: torch.Tensor = item.tensor()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
        self._last = activations
        self._check_host_memory(activations)

    def _check_host_memory(self, activations: BlockActivations) -> None:
        """Check that the activations of all blocks fit in host memory, if each needs as much as the first."""
        if self._is_checked or not activations.bytes:
            return
        self._is_checked = True
        bytes_per_block = activations.bytes * self.ranks
        needed = bytes_per_block * (self.blocks - 1)  # the activations of the first block are already in host memory
        available = available_memory()
        if needed > available:
            raise UserError(
                f"parallel.offload: the activations of {self.blocks} blocks need about "
                f"{(needed + bytes_per_block) / 2**30:,.3g} GiB of host memory for the ranks of this node "
                f"({self.ranks}), but {available / 2**30:,.3g} GiB are available. Recompute more activations "
                "(parallel.recompute: full), or lower data.pack_tokens."
            )


class OffloadedState:
    """Moves tensors that persist over steps, such as optimizer state, to host memory and back.

    `restore` fills the same tensor objects again, so references to them stay valid.
    """

    def __init__(self, device: torch.device, ranks: int) -> None:
        self.host: Any = HostBuffers(device)
        self.ranks = ranks  # number of ranks on this node
        self.min_bytes = 0 if is_host(device) else MIN_BYTES
        self._host_tensors = WeakTensorKeyDictionary()  # device tensor -> its copy in host memory
        self._offloaded: list[torch.Tensor] = []  # device tensors whose memory is freed

    def offload(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy `tensors` to host memory and free them on the device. They must not be used before `restore` is called.

        Raises:
            UserError: If the tensors do not fit in host memory.
        """
        tensors = [tensor for tensor in tensors if self._is_movable(tensor)]
        needed = sum(tensor.nbytes for tensor in tensors if tensor not in self._host_tensors) * self.ranks
        available = available_memory()
        if needed > available:
            raise UserError(
                f"parallel.offload: the optimizer state needs {needed / 2**30:,.3g} GiB of host memory for the ranks "
                f"of this node ({self.ranks}), but {available / 2**30:,.3g} GiB are available. Remove `optimizer` "
                "from parallel.offload, or shard the model over more nodes (parallel.dp_shard)."
            )

        for tensor in tensors:
            if tensor in self._host_tensors:
                self.host.refill(self._host_tensors[tensor], tensor)
            else:
                self._host_tensors[tensor] = self.host.copy_to_host(tensor)
            tensor.untyped_storage().resize_(0)
            self._offloaded.append(tensor)

    def restore(self) -> None:
        """Copy all offloaded tensors back to the device, into the same tensor objects."""
        while self._offloaded:
            tensor = self._offloaded.pop()
            tensor.untyped_storage().resize_(tensor.nbytes)
            self.host.put_back(self._host_tensors[tensor], tensor)

    def _is_movable(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` is on the device, does not share its storage, and is large enough to offload."""
        if tensor.device != self.host.device or tensor.ndim == 0 or tensor.nbytes < max(1, self.min_bytes):
            return False
        return tensor.untyped_storage().nbytes() == tensor.nbytes
