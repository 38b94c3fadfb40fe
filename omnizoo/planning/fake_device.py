"""A simulated device. Its tensors have shapes, dtypes and lifetimes, but no memory. Tensors on the host are real.

The training step runs on it as on an accelerator, with the same operators. Host syncs are counted: reads of a value,
shapes that depend on values, and copies that are not asynchronous. Small integer tensors that come from the host (ids,
sample boundaries, grid sizes) keep their values, so the shapes that depend on these values are correct.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from omnizoo.ops.device import PLANNED
from omnizoo.ops.torch_private import (
    DEVICE_OF,
    FakeTensor,
    FakeTensorMode,
    register_device,
    replaced,
    storage_key,
    tensors_built_on_host,
    tree_leaves,
    tree_map_only,
    written_arguments,
)
from omnizoo.planning.host_syncs import Sync, calling_line, find_sync

MAX_KNOWN_INTEGERS = 2**22  # maximum number of elements for which the values of an integer tensor are kept
MAX_KNOWN_FLOATS = 64  # the same for floating-point tensors
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}  # operators whose indices may be boolean masks
FILLED = {"arange", "zeros", "ones", "full"}  # operators without tensor arguments whose result has known values
COPIES = ("_to_copy", "copy_", "to")  # operators that may copy between the host and the device
READS = {"_local_scalar_dense", "equal", "is_nonzero"}  # operators that return a Python value
SHAPED_BY_VALUES = {  # operators whose result has a shape that depends on the values of the inputs
    "nonzero",
    "nonzero_numpy",
    "masked_select",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "repeat_interleave",
    "bincount",
}
# Operators that are single kernels on accelerators. On other devices, torch decomposes them into several operators.
FUSED = ("silu_backward", "mish_backward", "_fused_rms_norm")
_TORCH_TENSOR = torch.tensor


class Stream(torch.cpu.Stream):
    """The only stream of the simulated device. Its work is always complete."""

    def record_event(self) -> torch.cpu.Event:  # type: ignore[override]  # the method of torch.cpu returns None
        return torch.cpu.Event()


class DeviceModule:
    """The functions of a device module, such as `torch.cuda`, that torch and FSDP call."""

    Stream: ClassVar[type] = Stream
    Event: ClassVar[type] = torch.cpu.Event
    the_stream = Stream()

    @staticmethod
    def is_available() -> bool:
        return False  # prevents code from choosing the simulated device as the training device

    @staticmethod
    def is_initialized() -> bool:
        return True

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def set_device(device: object) -> None:
        pass

    @staticmethod
    def current_stream(device: object = None) -> object:
        return DeviceModule.the_stream

    @staticmethod
    def stream(stream: object) -> AbstractContextManager[None]:
        return nullcontext()

    @staticmethod
    def synchronize(device: object = None) -> None:
        pass

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]  # without this, recomputation in backward crashes

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        pass


class FakeDevice(FakeTensorMode):
    """Mode in which tensors on `device` are fake.

    `syncs` counts host syncs. `guessed` counts reads of values that only a real device could provide. Such reads
    return 1.
    """

    def __init__(self) -> None:
        register_device(PLANNED, DeviceModule(), FUSED)
        super().__init__(allow_non_fake_inputs=True)
        self.device = torch.device(PLANNED, 0)
        self.syncs: Counter[Sync] = Counter()
        self.guessed: Counter[str] = Counter()
        self.operator = ""  # name of the last operator, for messages
        self._known = WeakTensorKeyDictionary()  # maps a fake tensor to its values, as a tensor on the host
        # Values that are no longer valid, because an operator has overwritten them with unknown values; keyed by
        # storage. These tensors are kept alive, so no other storage gets the same key.
        self._spoiled: dict[int, torch.Tensor] = {}
        self._has_weights_on_host = False
        self._depth = 0  # nesting depth of operators

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context manager: enter the mode, and replace the functions of torch that bypass dispatch modes."""
        with (
            replaced((FakeTensor, "tolist", lambda tensor: self.read(tensor))),
            # FSDP calls this function after it has gathered the weights of a frozen component, although the component
            # has no backward pass.
            replaced((torch.accelerator, "current_stream", DeviceModule.current_stream)),
            # A function mode would also work, but torch would call it for every attribute of every tensor. This would
            # take half of the time of a plan.
            replaced((torch, "tensor", self._tensor)),
            tensors_built_on_host(),
            self,
        ):
            yield

    def read(self, tensor: torch.Tensor) -> Any:
        """Count a host sync, and return the values of a tensor as nested lists, as `tolist` does."""
        if tensor.device.type == PLANNED:
            self.wait("value", "tolist")
        return self._on_host(tensor).tolist()

    def _tensor(self, data: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Replacement for `torch.tensor`. The original reads tensors in a list without calling dispatch modes."""
        if isinstance(data, list | tuple):
            data = tree_map_only(FakeTensor, self.read, data)
        return _TORCH_TENSOR(data, *args, **kwargs)

    def wait(self, kind: str, operator: str) -> None:
        """Count a host sync at the line that called the operator.

        Args:
            kind: Kind of host sync (see `Sync.kind`).
            operator: Name of the operator.
        """
        if self._depth:  # the host sync of the enclosing operator is counted instead
            return
        self.syncs[find_sync(kind, operator)] += 1

    def dispatch(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator: on real tensors on the host, on fake tensors otherwise."""
        if func is DEVICE_OF:
            return args[0].device
        if func.namespace == "prim":  # queries the layout of a tensor
            return super().dispatch(func, types, args, kwargs or {})
        kwargs = dict(kwargs or {})
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if any(type(x) not in (torch.Tensor, torch.nn.Parameter, FakeTensor) for x in tensors):
            return NotImplemented  # DTensor calls the operator again on its local tensors
        if not self._depth:
            self.operator = str(func)
        name = func._schema.name.removeprefix("aten::")
        target = kwargs.get("device")
        if name == "empty_like" and args[0].device.type == "meta" and target is not None and target.type == "cpu":
            # Weights that are offloaded to the host are fake, too.
            self._has_weights_on_host = True
            return FakeTensor(self, func(args[0], **{**kwargs, "device": args[0].device}), target)
        is_real = not any(isinstance(x, FakeTensor) for x in tensors)
        if is_real and (target is None or torch.device(target).type != PLANNED):
            return func(*args, **kwargs)
        result = self._without_kernel(name, func, args, kwargs, tensors)
        return self._run(name, func, types, args, kwargs, tensors) if result is None else result

    def _without_kernel(
        self, name: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[torch.Tensor]
    ) -> Any:
        """Return the result of an operator that needs values or fails on fake tensors; None for other operators."""
        if name in COPIES:
            source = args[1] if name == "copy_" else args[0]
            target = torch.device(kwargs.get("device") or args[0].device)
            if source.device.type == PLANNED and target.type == "cpu":
                return self._to_host(name, source, args, kwargs)
            is_to_device = source.device.type == "cpu" and target.type == PLANNED
            if is_to_device and not _is_asynchronous(name, args, kwargs):
                self.wait("to_device", name)
        if name in READS:
            self.wait("value", name)
            return func(*(self._on_host(x) for x in tensors))
        if name == "_grouped_mm" and tensors[0].dtype != torch.bfloat16:
            # The fake implementation in torch 2.13 accepts bf16 only, although the kernels support fp32 and fp16.
            with self._within():
                half = func(*(x.to(torch.bfloat16) if i < 2 else x for i, x in enumerate(args)), **kwargs)
                return half.to(tensors[0].dtype)
        masks = [x for x in args[1] if _is_mask(x)] if name in INDEXING else []
        if masks or (name in SHAPED_BY_VALUES and kwargs.get("output_size") is None):
            self.wait("shape", name)
        if masks and all(self.values_of(mask) is not None for mask in masks):
            return self._by_mask(func, args, kwargs)
        return None

    def _run(
        self, name: str, func: Any, types: Any, args: Any, kwargs: dict[str, Any], tensors: Sequence[torch.Tensor]
    ) -> Any:
        """Run an operator on fake tensors, and on their values if these are known."""
        known = self._compute(name, func, args, kwargs, tensors)
        if known is not None and name in SHAPED_BY_VALUES:
            with self._within():
                return tree_map_only(torch.Tensor, lambda x: x.to(self.device), known)
        if not any(isinstance(x, FakeTensor) for x in tensors):
            args, kwargs = tree_map_only(torch.Tensor, self.from_tensor, (args, kwargs))
        with self._deeper():
            result = super().dispatch(func, types, args, kwargs)
        if name == "copy_" and args[0].shape == args[1].shape:
            values = self.values_of(args[1])
            known = None if values is None or values.is_meta else values.to(args[0].dtype, copy=True)
        if known is not None:
            self._remember(result, known)
        return result

    def _deeper(self) -> AbstractContextManager[None]:
        """Return a context manager in which operators count as part of the current operator."""
        return replaced((self, "_depth", self._depth + 1))

    @contextmanager
    def _within(self) -> Iterator[None]:
        """Context manager: run operators in place of the operator that was called."""
        with self._deeper(), self:
            yield

    def values_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the values of a tensor as a tensor on the host, or None if they are unknown."""
        if not isinstance(tensor, FakeTensor):
            return tensor
        values: torch.Tensor | None = self._known.get(tensor)
        return None if values is None or storage_key(values) in self._spoiled else values

    def _on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the values of a tensor on the host. If they are unknown, return ones and count this in `guessed`."""
        values = self.values_of(tensor)
        if values is not None:
            return values
        self.guessed[calling_line()[0]] += 1
        return torch.ones((), dtype=tensor.dtype).expand(tensor.shape)  # an expanded scalar takes no memory

    def _to_host(self, name: str, source: torch.Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor:
        """Copy a tensor to the host, and count the host sync."""
        is_known = not source.is_floating_point() or self.values_of(source) is not None
        if self._has_weights_on_host and name != "copy_" and not is_known:
            # Gradients of offloaded weights are copied to the host, too, and stay fake.
            if not _is_asynchronous(name, args, kwargs):
                self.wait("to_host", name)
            shape = torch.empty_like(source, device="meta", dtype=kwargs.get("dtype") or source.dtype)
            return FakeTensor(self, shape, torch.device("cpu"))
        self.wait("to_host", name)
        values = self._on_host(source)
        if name == "copy_":
            copied: torch.Tensor = args[0].copy_(values)
            return copied
        return values.to(kwargs.get("dtype") or source.dtype, copy=self.values_of(source) is not None)

    def _by_mask(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an indexing operator with indices instead of masks. The values of the masks are known."""
        indices: list[Any] = []
        for index in args[1]:
            if _is_mask(index):
                values = self.values_of(index)
                assert values is not None
                indices += values.nonzero(as_tuple=True)
            else:
                indices.append(index)
        with self._within():
            on_device = [None if index is None else index.to(self.device) for index in indices]
            return func(args[0], on_device, *args[2:], **kwargs)

    def _compute(self, name: str, func: Any, args: Any, kwargs: Any, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the result as a tensor on the host if all inputs are small and have known values, otherwise None."""
        if func.namespace != "aten" or not (tensors or name in FILLED):
            return None
        if any(_is_too_much(x) or x.device.type == "meta" for x in tensors):  # `is_meta` would call an operator
            return None
        values = {id(x): self.values_of(x) for x in tensors}
        if any(value is None for value in values.values()):
            self._spoil(func, args, kwargs)
            return None
        dtype = kwargs.get("dtype")
        if not tensors and (dtype.is_floating_point if dtype else name != "arange"):
            return None
        args, kwargs = tree_map_only(torch.device, lambda _: torch.device("cpu"), (args, kwargs))
        args, kwargs = tree_map_only(torch.Tensor, lambda x: values[id(x)], (args, kwargs))
        return func(*args, **kwargs)

    def _spoil(self, func: Any, args: Any, kwargs: Any) -> None:
        """Mark the values of all tensors that the operator modifies in place as unknown."""
        for tensor in written_arguments(func, args, kwargs):
            values = self._known.get(tensor) if isinstance(tensor, FakeTensor) else None
            if values is not None:
                self._spoiled[storage_key(values)] = values

    def _remember(self, result: Any, known: Any) -> None:
        """Store the known values of the fake tensors in `result`, if they are small."""
        for fake, values in zip(tree_leaves(result), tree_leaves(known), strict=True):
            if isinstance(fake, FakeTensor) and isinstance(values, torch.Tensor) and not _is_too_much(values):
                assert fake.shape == values.shape, f"{self.operator}: {fake.shape}, but {values.shape} on the host"
                self._known[fake] = values


def _is_asynchronous(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a copy is asynchronous. Otherwise the host waits until the device has reached the copy."""
    return bool(kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))


def _is_too_much(values: torch.Tensor) -> bool:
    """Whether a tensor is too large to keep its values.

    Floating-point tensors have a lower limit, because shapes are computed from integers and only a few floats.
    """
    if values.is_complex():
        return True
    max_elements = MAX_KNOWN_FLOATS if values.is_floating_point() else MAX_KNOWN_INTEGERS
    return values.numel() > max_elements


def _is_mask(index: Any) -> bool:
    """Whether an index is a boolean mask."""
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)
